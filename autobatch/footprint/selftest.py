"""A self-test of predictions: trace a step whose memory is known by hand.

Tracing depends on private parts of torch. If they have moved, tracing fails or returns other sizes, and the
self-test reports that in place of a wrong prediction.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from autobatch.device.allocator.trace import FREE
from autobatch.footprint.tracing.apart import run_apart
from autobatch.footprint.tracing.recording import Recording
from autobatch.footprint.tracing.trace_step import Setting, record
from autobatch.workload.contract import Workload

_SAMPLES = 10
_WIDTH = 64


class _KnownModel(nn.Module):
    """Layer norm, a linear layer and dropout, which CUDA runs differently than the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.linear = nn.Linear(_WIDTH, _WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.linear(self.norm(x)), 0.5, self.training)


@functools.cache
def self_test() -> str | None:
    """Return the reason why predictions with this torch are wrong, None if they are right.

    The answer is kept, because torch stays the same in a process.
    """
    workload = Workload(
        model=_KnownModel,
        train_data=[0],
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda parameters, rate: torch.optim.Adam(parameters, lr=rate),
        learning_rate=1.0,
    )
    setting = Setting(
        workload=workload,
        model=_KnownModel(),
        batch_of=lambda size: torch.zeros(size, _WIDTH, device="cpu"),
        precision="bf16",
        capability=(8, 0),
        steps=(1,),
    )
    try:
        # A backward pass in this process would let a CUDA build refuse autograd in every later copy.
        recording = run_apart(lambda: record(setting, _SAMPLES))
    except Exception as error:
        return f"the self-test step does not run ({type(error).__name__}: {error})".splitlines()[0]
    for does, found, expected in (
        ("keeps", _kept_bytes(recording), 3 * 4 * (_WIDTH * _WIDTH + 2 * _WIDTH)),
        ("allocates in its forward", _forward_bytes(recording), sorted(_expected_forward_bytes())),
    ):
        if found != expected:
            return f"the self-test step {does} {found} bytes with torch {torch.__version__}, not {expected}"
    return None


def _expected_forward_bytes() -> list[int]:
    """Return the sizes on CUDA: an fp32 layer norm, a bf16 product, a dropout with a mask of bytes."""
    values = _SAMPLES * _WIDTH
    norm = [4 * values, 4 * _SAMPLES, 4 * _SAMPLES]  # result, means, deviations
    casts = [2 * values, 2 * _WIDTH * _WIDTH]  # input and weight of the product
    return [*norm, *casts, 2 * values, 2 * values, values]  # product, dropout and its mask


def _forward_bytes(recording: Recording) -> list[int]:
    """Return the sizes that the forward allocates, except single numbers."""
    trace = recording.trace
    sizes = (size for index, (_, size) in enumerate(trace.events) if trace.phase_at(index) == "forward")
    return sorted(size for size in sizes if size >= 4 * _SAMPLES)


def _kept_bytes(recording: Recording) -> int:
    """Return the bytes of weights and optimizer state after the step."""
    live: dict[int, int] = {}
    for block, size in recording.trace.events:
        if size == FREE:
            live.pop(block)
        else:
            live[block] = size
    kinds = ("parameters", "optimizer state")
    return sum(size for block, size in live.items() if recording.labels[block].kind in kinds)
