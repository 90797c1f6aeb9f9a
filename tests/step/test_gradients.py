"""Gradients in 16 bits, in mixed precision, sparse and frozen."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from autobatch import WholeBatchLoss
from autobatch.planning import micro_batches
from autobatch.step.gradients import Gradients, norm_of
from autobatch.step.train_step import accumulate, finish, train_step
from tests.support.steps import EXACT, KINDS, SAMPLES, off, split, train_state_of, whole_tokens
from tests.support.training import (
    Rows,
    apart,
    make_workload,
    network,
    points,
    reference,
)


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
def test_16_bit_gradients_are_summed_in_float32_unless_asked(dtype, options, expected: float, loss) -> None:
    """1024 times 1/1024 is 1, but 0.25 if bf16 is summed in bf16, because the next one is rounded away."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(300, dtype=dtype))

    def values(model: nn.Module, batch) -> torch.Tensor:
        return model.weight.sum() * batch[0].to(dtype)

    whole = WholeBatchLoss(represent=values, loss=lambda _, rows: rows.float().mean())
    workload = make_workload(
        model=One,
        train_data=Rows(torch.ones(1024)),
        loss=whole if loss == "whole" else lambda model, batch: values(model, batch).mean(),
        optimizer=lambda params, lr: torch.optim.SGD(params, lr=1.0),
    )
    train_state = train_state_of(workload, **options)
    result = train_step(train_state, split(workload, [1] * 1024), 1024)
    assert torch.equal(train_state.model.weight, torch.full((300,), -expected, dtype=dtype))
    # In bf16 the norm of 300 quarters would be 4.34375.
    assert result.grad_norm == pytest.approx(expected * 300**0.5, rel=1e-6)
    assert not train_state.model.weight._post_accumulate_grad_hooks


@pytest.mark.parametrize("samples", [1000, 24])
def test_16_bit_gradients_are_within_one_rounding_of_the_float32_sum(samples: int) -> None:
    """Weights of micro-batches (83 of 1000) are not rounded to 8 bits."""
    data = points(samples, dtype=torch.float32)
    workload = make_workload(
        model=lambda: network(torch.bfloat16),
        train_data=data,
        loss=lambda model, batch: cross_entropy(model(batch[0].bfloat16()), batch[1]),
        optimizer=lambda params, lr: torch.optim.SGD(params, lr=1.0),
    )
    sizes = micro_batches(samples, samples // 12)
    train_state = train_state_of(workload)
    parameters = list(train_state.model.parameters())
    expected = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    for batch, size in split(workload, sizes):
        parts = torch.autograd.grad(workload.loss(train_state.model, batch), parameters)
        for total, part in zip(expected, parts, strict=True):
            total.add_(part.double(), alpha=size / samples)
    totals = accumulate(train_state, split(workload, sizes), samples, lambda _: None)
    seen = []
    train_state.optimizers[0].register_step_pre_hook(
        lambda *_: seen.extend(p.grad.clone() for p in parameters)
    )
    finish(train_state, totals, mark=lambda _: None)
    for got, wanted in zip(seen, expected, strict=True):
        assert got.dtype == torch.bfloat16
        assert apart(got.double(), wanted) < 2.0**-8


def test_sparse_gradients_are_measured_and_applied() -> None:
    def sparse() -> nn.Module:
        return nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Linear(4, 7)).double()

    changes = {**KINDS["tokens"][0], "model": sparse}
    workload = make_workload(**changes)
    dense = make_workload(
        **{**changes, "model": lambda: nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)).double()}
    )
    expected, _ = reference(dense, [range(SAMPLES)], whole_tokens, clip=0.1)
    train_state = train_state_of(workload, max_grad_norm=0.1)
    train_step(train_state, split(workload, [5, 19]), SAMPLES)
    assert off(train_state, workload, expected) <= EXACT


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
    assert shared.grad is None
    assert own.grad is None


class StaticProduct(torch.autograd.Function):
    """``weight · x``, whose backward pass writes to the same memory each time, as a CUDA graph does."""

    memory = torch.zeros(3)

    @staticmethod
    def forward(ctx, weight, x):
        ctx.save_for_backward(x)
        return weight @ x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        StaticProduct.memory.copy_(gradient * x)
        # Another tensor on that memory, which torch may make the gradient of the weight.
        return StaticProduct.memory.detach(), None


@pytest.mark.parametrize("are_overwritten", [True, False])
def test_gradients_that_the_next_backward_pass_overwrites_are_summed_apart(are_overwritten: bool) -> None:
    weight = nn.Parameter(torch.zeros(3))
    gradients = Gradients(nn.Module(), (torch.optim.SGD([weight], lr=1.0),), are_overwritten=are_overwritten)
    micro_batches = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 30.0])]
    with gradients.summed_apart():
        for x in micro_batches:
            StaticProduct.apply(weight, x).backward()
    gradients.round_sums()
    if are_overwritten:
        assert weight.grad.tolist() == [11.0, 22.0, 33.0]
        assert weight.grad.data_ptr() != StaticProduct.memory.data_ptr()
    else:  # what torch does without sums: 10 is added to itself
        assert weight.grad.tolist() == [20.0, 40.0, 60.0]
