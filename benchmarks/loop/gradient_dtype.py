"""The rounding of gradients that are summed in float32 and in the type of 16-bit weights.

python -m benchmarks.loop.gradient_dtype
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from autobatch import Workload
from autobatch.core.records import GradientDtype
from autobatch.planning import micro_batches
from autobatch.step.train_state import StepSettings, build_train_state
from autobatch.step.train_step import accumulate
from benchmarks.report import arguments

BATCH, WIDTH, CLASSES = 1024, 256, 10
PARTS = (1, 8, 64, 256, 1024)
ROW = "| {} | {} | {:.1e} | {:.1e} |"


def build_model() -> nn.Module:
    """Build a network with weights in bf16."""
    torch.manual_seed(0)
    layers = [
        nn.Linear(WIDTH, WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, CLASSES),
    ]
    return nn.Sequential(*layers).bfloat16()


def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Return the mean cross-entropy, in the precision of the model's weights."""
    kind = next(model.parameters()).dtype
    return cross_entropy(model(batch[0].to(kind)).to(torch.promote_types(kind, torch.float32)), batch[1])


def gradient(model: nn.Module) -> Tensor:
    """Return the gradient of a model as one vector in float64."""
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def summed(parts: Sequence[Sequence[Tensor]], dtype: GradientDtype) -> Tensor:
    """Return the gradient of a batch as a step accumulates it."""
    workload = Workload(
        model=build_model,
        train_data=[0],
        loss=loss,
        optimizer=lambda parameters, rate: torch.optim.SGD(parameters, lr=rate),
        learning_rate=1.0,
    )
    state = build_train_state(
        workload,
        build_model(),
        torch.device("cpu"),
        StepSettings(precision="fp32", gradient_dtype=dtype),
        learning_rate=1.0,
    )
    totals = accumulate(state, [(part, len(part[1])) for part in parts], BATCH, lambda _: None)
    state.gradients.round_sums()
    return gradient(state.model) * (totals.divisor / BATCH)


def of_the_parts(parts: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the sum, in float64, of the gradients that bf16 gives for each micro-batch."""
    total = torch.zeros(())
    for part in parts:
        model = build_model()
        (loss(model, part) * (len(part[1]) / BATCH)).backward()
        total = total + gradient(model)
    return total


def main() -> None:
    """Print the distance of each gradient from its float64 sum and from the gradient of a float64 model."""
    arguments(__doc__)
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCH, WIDTH, generator=draw)
    labels = torch.randint(CLASSES, (BATCH,), generator=draw)
    wide = build_model().double()
    loss(wide, (inputs.double(), labels)).backward()
    exact = gradient(wide)
    print("| micro-batches | --gradient-dtype | off the float64 sum | off the float64 model |")
    print("|---|---|---|---|")
    for count in PARTS:
        sizes = micro_batches(BATCH, BATCH // count)
        parts = list(zip(inputs.split(sizes), labels.split(sizes), strict=True))
        reference = of_the_parts(parts)
        for dtype in get_args(GradientDtype):
            found = summed(parts, dtype)
            off = ((found - one).norm() / one.norm() for one in (reference, exact))
            print(ROW.format(count, dtype, *map(float, off)), flush=True)


if __name__ == "__main__":
    main()
