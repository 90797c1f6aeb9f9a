"""Gradients in 16 bits, in mixed precision, sparse and of several groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from autobatch import WholeBatchLoss
from autobatch.planning import micro_batches
from autobatch.step.gradients import Gradients, norm_of
from autobatch.step.train_step import accumulate, finish
from tests.support.steps import EXACT, KINDS, SAMPLES, off, split, step_of, train_state_of, whole_tokens
from tests.support.training import Rows, apart, make_workload, network, points, reference


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


def test_16_bit_gradients_are_within_one_rounding_of_the_float32_sum() -> None:
    """Weights of micro-batches (83 of 1000) are not rounded to 8 bits."""
    workload = make_workload(
        model=lambda: network(torch.bfloat16),
        train_data=points(1000, dtype=torch.float32),
        loss=lambda model, batch: cross_entropy(model(batch[0].bfloat16()), batch[1]),
        optimizer=lambda params, lr: torch.optim.SGD(params, lr=1.0),
    )
    sizes = micro_batches(1000, 1000 // 12)
    train_state = train_state_of(workload)
    parameters = list(train_state.model.parameters())
    expected = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    for batch, size in split(workload, sizes):
        parts = torch.autograd.grad(workload.loss(train_state.model, batch), parameters)
        for total, part in zip(expected, parts, strict=True):
            total.add_(part.double(), alpha=size / 1000)
    totals = accumulate(train_state, split(workload, sizes), 1000, lambda _: None)
    seen: list[torch.Tensor] = []
    train_state.optimizers[0].register_step_pre_hook(
        lambda *_: seen.extend(p.grad.clone() for p in parameters)
    )
    finish(train_state, totals, mark=lambda _: None)
    for got, wanted in zip(seen, expected, strict=True):
        assert got.dtype == torch.bfloat16
        assert apart(got.double(), wanted) < 2.0**-8


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
