"""The published rounding of gradients that are summed in float32 and in the type of 16-bit weights."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import autobatch
from tests.support.custom_loops import small_plan
from tests.support.training import Rows, make_workload

BATCH, WIDTH, CLASSES = 1024, 256, 10
FIGURES = {
    1: {"fp32": (0.0, 0.4), "weights": (0.0, 0.4)},
    8: {"fp32": (0.2, 0.5), "weights": (0.4, 0.6)},
    64: {"fp32": (0.2, 0.5), "weights": (1.0, 1.1)},
    256: {"fp32": (0.2, 0.5), "weights": (3.8, 3.9)},
    1024: {"fp32": (0.2, 0.5), "weights": (19.0, 19.0)},
}
"""By micro-batches: percent off the float64 sum of their gradients, and off that of a float64 model."""


def build_model() -> nn.Module:
    torch.manual_seed(0)
    body = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU()]
    return nn.Sequential(*body, nn.Linear(WIDTH, CLASSES)).bfloat16()


def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    kind = next(model.parameters()).dtype
    return cross_entropy(model(batch[0].to(kind)).to(torch.promote_types(kind, torch.float32)), batch[1])


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def of_the_batch(model: nn.Module, parts: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the sum, in float64, of the gradients of micro-batches."""
    total = torch.zeros(())
    for part in parts:
        model.zero_grad()
        (loss(model, part) * (len(part[1]) / BATCH)).backward()
        total = total + gradient(model)
    return total


def summed(data: Rows, size: int, dtype: str) -> Tensor:
    """Return the gradient of a batch as a step accumulates it."""
    model, found = build_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: found.append(gradient(model)))
    workload = make_workload(train_data=data, sampler=range(BATCH))
    plan = msgspec.structs.replace(small_plan(BATCH, size), gradient_dtype=dtype)
    for batch in autobatch.batches(workload, plan, optimizer=optimizer):
        for micro in batch:
            batch.backward(loss(model, micro.data))
        batch.step()
    return found[0]


@pytest.mark.parametrize(
    "count", [count if count == 64 else pytest.param(count, marks=pytest.mark.slow) for count in FIGURES]
)
def test_the_rounding_is_as_published(count: int) -> None:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCH, WIDTH, generator=draw)
    labels = torch.randint(CLASSES, (BATCH,), generator=draw)
    size = BATCH // count
    parts = list(zip(inputs.split(size), labels.split(size), strict=True))
    of_parts = of_the_batch(build_model(), parts)
    exact = of_the_batch(build_model().double(), [(inputs.double(), labels)])
    for dtype, percents in FIGURES[count].items():
        found = summed(Rows(inputs, labels), size, dtype)
        off = [100 * float((found - one).norm() / one.norm()) for one in (of_parts, exact)]
        assert off == pytest.approx(percents, rel=0.15, abs=0.06), dtype
