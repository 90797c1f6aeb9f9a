"""The sum of a batch of one rank with others that are fakes, against sums that torch makes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from autobatch import InputError
from autobatch.distributed import engine
from autobatch.distributed.engine import Whole, present
from autobatch.distributed.ranks import Ranks
from autobatch.step.gradients import Gradients

SIZES = [(3, 2), (40,), (2,), (5, 5), (6, 2), (1,)]
LACKING, NOBODYS = 2, 5
"""Parameters of which this rank has no gradient, and of which none has one."""


class Among(Ranks):
    """One of three ranks; the two others have twice what this one has."""

    sums = 0

    def sum(self, tensors: Sequence[Tensor], act: str) -> None:
        self.sums += len(tensors)
        for tensor in tensors:
            tensor.mul_(5)


def gradients_of(dtypes: Sequence[torch.dtype]) -> tuple[list[nn.Parameter], Gradients]:
    parameters = [nn.Parameter(torch.zeros(size, dtype=one)) for size, one in zip(SIZES, dtypes, strict=True)]
    for number, parameter in enumerate(parameters):
        if number not in (LACKING, NOBODYS):
            # Not contiguous where it has two dimensions.
            parameter.grad = torch.randn(parameter.shape[::-1]).to(parameter.dtype).T
    return parameters, Gradients(nn.ParameterList(parameters), (torch.optim.SGD(parameters, lr=1.0),))


@pytest.mark.filterwarnings("ignore:The use of `x.T`")
@pytest.mark.parametrize(("together", "messages"), [(4000, 1), (40, 4), (0, 5)])
@pytest.mark.parametrize("first", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_are_summed_in_any_capacity(
    monkeypatch: pytest.MonkeyPatch, together: int, messages: int, first: torch.dtype
) -> None:
    """Small gradients of a type travel together, and others alone."""
    monkeypatch.setattr(engine, "TOGETHER_BYTES", together)
    parameters, gradients = gradients_of([first, *[torch.float32] * 5])
    before = [None if one.grad is None else one.grad.clone() for one in parameters]
    ranks, of_others = Among(), bytes(number != NOBODYS for number in range(len(SIZES)))
    Whole(ranks).sum_gradients(gradients, [present(gradients), of_others, of_others])
    assert ranks.sums == messages + (together > 0 and first is not torch.float32)
    for number, (parameter, own) in enumerate(zip(parameters, before, strict=True)):
        if number == NOBODYS:
            assert parameter.grad is None
        else:
            expected = torch.zeros_like(parameter) if own is None else 5 * own
            assert torch.equal(parameter.grad, expected)


def test_a_sparse_gradient_is_refused() -> None:
    parameters, gradients = gradients_of([torch.float32] * 6)
    parameters[0].grad = parameters[0].grad.to_sparse(1)
    with pytest.raises(InputError, match="use sparse=False"):
        present(gradients)
