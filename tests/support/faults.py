"""Errors raised at a chosen operator of a step, and workloads to raise them in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from autobatch import Workload
from autobatch.device.base import Meter
from autobatch.device.cpu import CpuDevice
from tests.support.training import adamw, make_workload

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
        self._inner = inner or Meter()

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


def plain(**changes: Any) -> Workload:
    return make_workload(**{"optimizer": adamw, "learning_rate": 0.01, **changes})
