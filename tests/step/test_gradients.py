"""Gradients in 16 bits, in mixed precision, sparse and of several groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autobatch import WholeBatchLoss
from autobatch.step.gradients import Gradients, norm_of
from tests.support.steps import EXACT, KINDS, SAMPLES, off, step_of
from tests.support.training import Rows, make_workload, reference, train_state_of, whole_tokens


@pytest.mark.parametrize("loss", ["mean", "whole"])
@pytest.mark.parametrize(
    ("dtype", "options", "expected"),
    [
        (torch.bfloat16, {}, 1.0),
        (torch.float16, {}, 1.0),
        (torch.float32, {"gradient_dtype": "weights"}, 1.0),
        (torch.bfloat16, {"gradient_dtype": "weights"}, 0.25),
    ],
)
def test_16_bit_gradients_are_summed_in_float32_unless_asked(
    dtype: torch.dtype, options: Any, expected: float, loss: str
) -> None:
    """1024 times 1/1024 is 1, but 0.25 if bf16 is summed in bf16, because the next one is rounded away."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(300, dtype=dtype))

    def values(model: nn.Module, batch: Any) -> torch.Tensor:
        return model.weight.sum() * batch[0].to(dtype)

    whole = WholeBatchLoss(represent=values, loss=lambda _, rows: rows.float().mean())
    workload = make_workload(
        model=One,
        train_data=Rows(torch.ones(1024)),
        loss=whole if loss == "whole" else lambda model, batch: values(model, batch).mean(),
        optimizer=lambda params, lr: torch.optim.SGD(params, lr=1.0),
    )
    train_state = train_state_of(workload, **options)
    result = step_of(train_state, workload, [1] * 1024)
    assert torch.equal(train_state.model.weight, torch.full((300,), -expected, dtype=dtype))
    # In bf16 the norm of 300 quarters would be 4.34375.
    assert result.grad_norm == pytest.approx(expected * 300**0.5, rel=1e-6)
    assert not train_state.model.weight._post_accumulate_grad_hooks


def test_sparse_gradients_are_measured_and_applied() -> None:
    def made(sparse: bool) -> Any:
        model = lambda: nn.Sequential(nn.Embedding(7, 4, sparse=sparse), nn.Linear(4, 7)).double()  # noqa: E731
        return make_workload(**{**KINDS["tokens"][0], "model": model})

    expected, _ = reference(made(False), [range(SAMPLES)], whole_tokens, clip=0.1)
    train_state = train_state_of(made(True), max_grad_norm=0.1)
    step_of(train_state, made(True), [5, 19])
    assert off(train_state, made(True), expected) <= EXACT


def test_a_parameter_of_two_groups_counts_once_and_hooks_are_removed() -> None:
    shared, own = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(3))
    optimizers = (torch.optim.SGD([shared], lr=1.0), torch.optim.SGD([own, shared], lr=1.0))
    gradients = Gradients(nn.Module(), optimizers)
    with gradients.summed_apart():
        for _ in range(2):
            (shared.float().sum() + own.sum() * 3).backward()
    assert not shared._post_accumulate_grad_hooks
    first, second = gradients.by_optimizer()
    assert [(g.dtype, g.tolist()) for g in first] == [(torch.float32, [2.0, 2.0])]
    assert [g.tolist() for g in second] == [[6.0] * 3]
    assert float(norm_of([*first, *second])) == pytest.approx((2 * 2**2 + 3 * 6**2) ** 0.5)
    assert shared.grad is None, "only the float32 sum is kept"
    gradients.round_sums()
    assert (shared.grad.dtype, shared.grad.tolist()) == (torch.bfloat16, [2.0, 2.0])
    gradients.clear()
    assert shared.grad is own.grad is None
