"""The published rounding of gradients that are summed in float32 and in the type of 16-bit weights."""

from __future__ import annotations

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


def loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    kind = next(model.parameters()).dtype
    return cross_entropy(model(inputs.to(kind)).to(torch.promote_types(kind, torch.float32)), labels)


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    "count", [count if count == 64 else pytest.param(count, marks=pytest.mark.slow) for count in FIGURES]
)
def test_the_rounding_is_as_published(count: int) -> None:
    draw, size = torch.Generator().manual_seed(1), BATCH // count
    columns = torch.randn(BATCH, WIDTH, generator=draw), torch.randint(CLASSES, (BATCH,), generator=draw)

    def sum_of(model: nn.Module, size: int) -> Tensor:
        total = torch.zeros(())
        for part in zip(*(column.split(size) for column in columns), strict=True):
            model.zero_grad()
            (loss(model, *part) * (size / BATCH)).backward()
            total = total + gradient(model)
        return total

    expected = sum_of(build_model(), size), sum_of(build_model().double(), BATCH)
    for dtype, percents in FIGURES[count].items():
        model, found = build_model(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *_, found=found, model=model: found.append(gradient(model)))
        workload = make_workload(train_data=Rows(*columns), sampler=range(BATCH))
        plan = msgspec.structs.replace(small_plan(BATCH, size), gradient_dtype=dtype)
        for batch in autobatch.batches(workload, plan, optimizer=optimizer):
            for micro in batch:
                batch.backward(loss(model, *micro.data))
            batch.step()
        off = [100 * float((found[0] - whole).norm() / whole.norm()) for whole in expected]
        assert off == pytest.approx(percents, rel=0.15, abs=0.06), dtype
