"""The sum of a batch over ranks that are threads, against sums that torch makes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autobatch import InputError
from autobatch.distributed import reduce
from autobatch.distributed.reduce import bring_to_host, kinds_of, sum_gradients, sum_totals
from autobatch.step.gradients import Gradients
from autobatch.step.loss import StepTotals

WORLD = 3
SIZES = [(3, 2), (40,), (2,), (5, 5), (6, 2), (1,)]
FLOATS = [torch.float32] * len(SIZES)


class Rank:
    """A thread with what a sum uses of `Group`."""

    barrier = threading.Barrier(WORLD)
    given: list[Any] = [None] * WORLD

    def __init__(self, rank: int) -> None:
        self.rank, self.sums = rank, 0

    def gather(self, value: Any) -> list[Any]:
        self.given[self.rank] = value
        self.barrier.wait(20)
        found = list(self.given)
        self.barrier.wait(20)
        return found

    def sum(self, tensors: Sequence[Tensor], act: str) -> None:
        for tensor in tensors:
            self.sums += 1
            tensor.copy_(torch.stack(self.gather(tensor.clone())).sum(0))


def gradients_of(rank: int, dtypes: Sequence[torch.dtype]) -> tuple[list[nn.Parameter], Gradients]:
    """Make parameters with gradients; rank 1 lacks one, and all lack the last."""
    generator = torch.Generator().manual_seed(rank)
    parameters = [nn.Parameter(torch.zeros(size, dtype=one)) for size, one in zip(SIZES, dtypes, strict=True)]
    for number, parameter in enumerate(parameters[:-1]):
        if (rank, number) != (1, 2):
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return parameters, Gradients(nn.ParameterList(parameters), (torch.optim.SGD(parameters, lr=1.0),))


def run_ranks(dtypes: Sequence[torch.dtype], *, is_sparse: bool = False) -> list[tuple[Any, int]]:
    """Return the gradients of each rank after the sum, or its error, and its messages."""
    found: list[Any] = [None] * WORLD

    def run(number: int) -> None:
        rank: Any = Rank(number)
        parameters, gradients = gradients_of(number, dtypes)
        if is_sparse and number == 1:
            parameters[0].grad = parameters[0].grad.to_sparse(1)  # type: ignore[union-attr]
        of_ranks = rank.gather(kinds_of(gradients))
        try:
            sum_gradients(rank, gradients, of_ranks)
            found[number] = [parameter.grad for parameter in parameters], rank.sums
        except InputError as error:
            found[number] = error, rank.sums

    started = [threading.Thread(target=run, args=(rank,)) for rank in range(WORLD)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return found


@pytest.mark.parametrize(("together", "messages"), [(4000, 1), (40, 4), (0, 5)])
@pytest.mark.parametrize("first", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_are_summed_in_any_capacity(
    monkeypatch: pytest.MonkeyPatch, together: int, messages: int, first: torch.dtype
) -> None:
    """Small gradients of a type travel together, and others alone."""
    monkeypatch.setattr(reduce, "TOGETHER_BYTES", together)
    dtypes = [first, *FLOATS[1:]]
    found = run_ranks(dtypes)
    own = [[p.grad for p in gradients_of(rank, dtypes)[0]] for rank in range(WORLD)]
    for gradients, sums in found:
        assert sums == messages + (together > 0 and first is not torch.float32)
        assert gradients[-1] is None, "no rank has one"
        for number in range(len(SIZES) - 1):
            ours = [one[number] for one in own if one[number] is not None]
            torch.testing.assert_close(gradients[number], torch.stack(ours).sum(0), rtol=1e-12, atol=1e-6)
            assert torch.equal(gradients[number], found[0][0][number])


def test_a_sparse_gradient_on_one_rank_is_refused_on_every_rank() -> None:
    found = run_ranks(FLOATS, is_sparse=True)
    assert ["use sparse=False" in str(error) for error, _ in found] == [True] * WORLD


def totals(form: dict[str, bool] | None, **sums: Any) -> StepTotals:
    return StepTotals(samples=9, form=form, sizes=[] if form is None else [3], **sums)


def test_sums_of_ranks_with_and_without_samples_are_those_of_one() -> None:
    counted = {"": True}
    own = [
        totals(counted, divisor=4.0, loss=torch.tensor(0.5), count=3),
        totals(None),
        totals(counted, divisor=4.0, loss=0.25, count=torch.tensor(2.0)),
    ]
    sum_totals(own[1], [bring_to_host(one) for one in own])
    assert (own[1].loss, own[1].count, own[1].divisor) == (0.75, 5.0, 4.0)
    other = totals({"first": False, "second": False}, divisor=4.0)
    with pytest.raises(InputError, match="second"):
        sum_totals(own[0], [own[0], bring_to_host(other)])
