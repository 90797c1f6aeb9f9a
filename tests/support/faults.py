"""Errors raised at a chosen operator of a step, and workloads to raise them in."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from autobatch.device.base import SilentMeter
from autobatch.device.cpu import CpuDevice
from tests.support.detection import count_shown, drawn_terms
from tests.support.training import INFO_NCE, Rows, make_loop, make_workload, points

FAULTY_STEP = 1
"""Index of the step that memory runs out in; the one before it creates the optimizer's state."""


class Fault(TorchDispatchMode):
    """Raises an error at operators of the given numbers, counted since it was armed."""

    def __init__(self, *at: int, error: Exception | None = None) -> None:
        super().__init__()
        self.at = set(at)
        self.error = error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        self.armed = False
        self.count = 0
        self.phase = ""
        self.phases: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.armed and func.namespace != "profiler":
            self.count += 1
            self.phases.append(self.phase)
            if self.count - 1 in self.at:
                raise self.error.with_traceback(None)
        return func(*args, **(kwargs or {}))

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Take the phase ``step`` from where weights move."""
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda *_: setattr(self, "phase", "step"))


class Watching:
    """Meter that passes the phase of the step to a fault, and measures as another meter does."""

    def __init__(self, fault: Fault | None, inner: Any | None = None) -> None:
        self._fault = fault
        self._inner = inner or SilentMeter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def mark(self, phase: str) -> None:
        self._inner.mark(phase)
        if self._fault is not None:
            self._fault.phase = phase


class Quick(CpuDevice):
    """CPU device without garbage collection, which would take most of the time of these tests."""

    def release(self) -> None:
        pass


def plain(**changes):
    return make_workload(**{"optimizer": lambda params, lr: AdamW(params, lr=0.01), **changes})


class Noisy(Rows):
    """Rows augmented by the random generators of NumPy and torch."""

    def __getitem__(self, index: int):
        inputs, labels = super().__getitem__(index)
        return inputs + np.random.normal() + torch.randn((), dtype=inputs.dtype), labels


def stateful(dtype: torch.dtype = torch.float64, **changes):
    """Make a workload with dropout, batch statistics and augmentation: all the state that a step changes."""

    def build() -> nn.Module:
        layers = (nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3))
        return nn.Sequential(*layers).to(dtype)

    return plain(model=build, train_data=Noisy(*points(dtype=dtype).columns), **changes)


def stateful_contrastive(dtype: torch.dtype = torch.float64):
    return stateful(dtype, loss=INFO_NCE)


def stateful_terms(dtype: torch.dtype = torch.float64):
    return stateful(dtype, loss=drawn_terms, counts=count_shown)


def train(
    workload, fault: Fault | None, *, device: Any = None, shrink_to: int | None = None, precision="fp32"
):
    """Train three steps with a fault in `FAULTY_STEP`, or with another micro-batch from that step on."""
    device = device or Quick(memory_budget="1GiB")
    with device.training() as inner, fault or nullcontext():
        loop = make_loop(
            workload, target_batch=8, micro_batch=4, steps=3, meter=Watching(fault, inner), device=device,
            precision=precision,
        )  # fmt: skip
        run = loop.run()
        records = [next(run) for _ in range(FAULTY_STEP)]
        if fault is not None:
            fault.watch(loop.train_state.optimizers)
            fault.armed, fault.phase = True, "data"
        loop.micro_batch = shrink_to or loop.micro_batch
        records.append(next(run))
        if fault is not None:
            fault.armed = False
        return loop, [*records, *run]


def operators(workload, *, of_step: bool = False) -> list[tuple[int, str]]:
    """Return the numbers and phases of the operators of a step before its optimizer, or of that alone."""
    fault = Fault()
    train(workload, fault)
    sites = enumerate(fault.phases)
    return [(number, phase) for number, phase in sites if (phase in ("optimizer", "step")) == of_step]
