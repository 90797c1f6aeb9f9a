"""Gradients in 16 bits, in mixed precision, sparse and of several groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autobatch import WholeBatchLoss
from autobatch.step.train_step import accumulate
from tests.support.steps import EXACT, KINDS, SAMPLES, off, split, step_of
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
    accumulate(train_state, train_state.feed(iter(split(workload, [1]))), 1)
    train_state.gradients.clear()  # as if memory had run out
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


def test_a_parameter_of_two_optimizers_counts_once() -> None:
    def two(params: Any, lr: float) -> list[torch.optim.Optimizer]:
        first, *others = params
        return [torch.optim.SGD([first], lr=lr), torch.optim.SGD([*others, first], lr=lr)]

    one, both = (
        step_of(train_state_of(made), made, [12, 12])
        for made in (make_workload(), make_workload(optimizer=two))
    )
    assert both.grad_norm == pytest.approx(one.grad_norm, rel=EXACT)
