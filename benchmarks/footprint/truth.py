"""The real allocations of a step on the CPU, from torch's profiler, without autobatch's modes.

The profiler sees every allocation of the CPU's allocator, including scratch space in operators. A trace on
fake tensors sees tensors alone. Both run `autobatch.step.train_step.train_step`, as training does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from autobatch.device.allocator.trace import FREE, Trace
from autobatch.setup.attempt import ATTEMPT_STEPS
from autobatch.setup.setup import Setup
from autobatch.step.restore import temporary_weights
from autobatch.step.train_state import StepSettings, build_train_state
from autobatch.step.train_step import train_step
from autobatch.workload.nested import tensors_of, to_device
from autobatch.workload.rng import preserved_random_state


class Prepared:
    """A batch that was created before, so that returning it allocates only the batch."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def batch(self, _: int) -> Any:
        return _copied(self._batch)


class Onlooker:
    """A meter that does nothing, so that autobatch's modes stay off."""

    def count(self, tensors: Any) -> None:
        pass

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        yield

    def mark(self, phase: str) -> None:
        pass


def profiled(setup: Setup, micro_batch: int) -> Trace:
    """Run the steps of an attempt, and return the allocations and frees of the process."""
    prepared = replace(setup, worst_case=Prepared(setup.worst_case.batch(micro_batch)))
    # Without acc_events, torch 2.11 warns that a later cycle would clear the events.
    recorded = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    with preserved_random_state(), recorded as prof:
        train(prepared, micro_batch, Onlooker())
    return trace_of(prof.profiler.kineto_results.experimental_event_tree())


def train(setup: Setup, micro_batch: int, meter: Any) -> None:
    """Run the traced steps on copies of the model's tensors.

    Raises:
        torch.OutOfMemoryError: they exceed the budget of the device.
    """
    device = setup.device.torch_device
    with temporary_weights(setup.model, device) as model:
        meter.count(tensor.data for tensor in [*model.parameters(), *model.buffers()])
        meter.mark("setup")
        train_state = build_train_state(
            setup.workload,
            model.train(),
            device,
            StepSettings(precision=setup.precision, max_grad_norm=setup.max_grad_norm, knobs=setup.knobs),
            learning_rate=setup.workload.learning_rate,
        )
        for count in ATTEMPT_STEPS:
            train_step(
                train_state, _batches(setup, micro_batch, count, meter), micro_batch * count, mark=meter.mark
            )
        setup.device.synchronize()


def _batches(setup: Setup, micro_batch: int, count: int, meter: Any) -> Iterator[tuple[Any, int]]:
    for _ in range(count):
        with meter.uncounted():
            batch = to_device(setup.worst_case.batch(micro_batch), setup.device.torch_device)
        meter.count(tensors_of(batch))
        yield batch, micro_batch


def trace_of(tree: list[Any]) -> Trace:
    """Return the allocations of a profiler's event tree in order, without frees of earlier blocks."""
    found: list[tuple[int, int, int]] = []
    waiting = list(tree)
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    blocks: dict[int, int] = {}
    events: list[tuple[int, int]] = []
    for _, pointer, size in sorted(found, key=lambda one: one[0]):
        if size > 0:
            blocks[pointer] = len(events)
            events.append((blocks[pointer], size))
        elif pointer in blocks:
            events.append((blocks.pop(pointer), FREE))
    return Trace(tuple(events)).canonical()


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, list | tuple):
        return type(value)(_copied(one) for one in value)
    return value


def has_profiler() -> bool:
    """Check that the private parts of torch that give the events exist."""
    return hasattr(_EventType, "Allocation") and hasattr(torch.profiler, "profile")
