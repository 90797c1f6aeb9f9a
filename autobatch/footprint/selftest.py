"""A step whose memory is known by hand: does this torch still allocate it, traced the way predictions are?

Tracing leans on private parts of torch. Where they have moved, it fails or tells something else, and then
this says so instead of a wrong prediction.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autobatch.device.allocator.trace import FREE
from autobatch.footprint.trace_mode import Recording
from autobatch.footprint.trace_step import Setting, record
from autobatch.workload.contract import Workload

_SAMPLES = 10


_WIDTH = 64


class _Known(nn.Module):
    """Layer norm, a linear layer, dropout: what CUDA does in another way than the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.linear = nn.Linear(_WIDTH, _WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.linear(self.norm(x)), 0.5, self.training)


def self_test() -> str | None:
    """Say why predictions cannot be trusted with this torch; ``None``: they can."""
    workload = Workload(
        model=_Known,
        train_data=[0],
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda parameters, rate: torch.optim.Adam(parameters, lr=rate),
        learning_rate=1.0,
    )
    setting = Setting(
        workload=workload,
        model=_Known(),
        batch_of=lambda size: torch.zeros(size, _WIDTH),
        precision="bf16",
        capability=(8, 0),
        steps=(1,),
    )
    try:
        found = record(setting, _SAMPLES)
    except Exception as error:
        return f"a step that is known does not run ({type(error).__name__}: {error})".splitlines()[0]
    for what, is_now, known in (
        ("keeps", _held_at_the_end(found), 3 * 4 * (_WIDTH * _WIDTH + 2 * _WIDTH)),
        ("allocates in its forward", _forward(found), sorted(_known_forward())),
    ):
        if is_now != known:
            return f"a step that is known {what} {is_now} bytes with torch {torch.__version__}, not {known}"
    return None


def _known_forward() -> list[int]:
    """Under bf16 autocast on CUDA: an fp32 layer norm, a bf16 product, a dropout with a mask of bytes."""
    values = _SAMPLES * _WIDTH
    norm = [4 * values, 4 * _SAMPLES, 4 * _SAMPLES]  # result, means, deviations
    casts = [2 * values, 2 * _WIDTH * _WIDTH]  # input and weight of the product
    return [*norm, *casts, 2 * values, 2 * values, values]  # product, dropout and its mask


def _forward(recording: Recording) -> list[int]:
    """Sizes of what the forward allocates, without single numbers."""
    trace = recording.trace
    sizes = (size for index, (_, size) in enumerate(trace.events) if trace.phase_at(index) == "forward")
    return sorted(size for size in sizes if size >= 4 * _SAMPLES)


def _held_at_the_end(recording: Recording) -> int:
    """Weights and optimizer state after the step."""
    live: dict[int, int] = {}
    for block, size in recording.trace.events:
        if size == FREE:
            live.pop(block)
        else:
            live[block] = size
    kinds = ("parameters", "optimizer state")
    return sum(size for block, size in live.items() if recording.labels[block].kind in kinds)
