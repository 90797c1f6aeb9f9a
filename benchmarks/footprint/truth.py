"""What a step really allocates on the CPU: the events of torch's own profiler, with no mode of ours active.

The profiler sees every allocation of the CPU's allocator, scratch space inside of operators included; a trace
on fakes sees tensors alone. Both run `autobatch.step.train_step.run_window`, which is what trains.
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
from autobatch.probing.attempt import WINDOWS, Bench
from autobatch.step.restore import lent
from autobatch.step.train_state import assemble
from autobatch.step.train_step import run_window
from autobatch.workload.nested import tensors_of, to_device
from autobatch.workload.rng import preserved_random_state


class Prepared:
    """A batch that was made before: handing it out allocates nothing but the batch itself."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def batch(self, _: int) -> Any:
        return _copied(self._batch)


class Onlooker:
    """A meter that does nothing, for nothing of ours is to run."""

    def adopt(self, tensors: Any) -> None:
        pass

    @contextmanager
    def aside(self) -> Iterator[None]:
        yield

    def mark(self, phase: str) -> None:
        pass


def profiled(bench: Bench, micro_batch: int) -> Trace:
    """Run the windows of an attempt, and tell what the process allocated and freed meanwhile."""
    prepared = replace(bench, costliest=Prepared(bench.costliest.batch(micro_batch)))
    with preserved_random_state(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        train(prepared, micro_batch, Onlooker())
    return trace_of(prof.profiler.kineto_results.experimental_event_tree())


def train(bench: Bench, micro_batch: int, meter: Any) -> None:
    """Run the windows that are traced on copies of the model's tensors.

    Raises:
        torch.OutOfMemoryError: they outgrow the budget of the device.
    """
    device = bench.device.torch_device
    with lent(bench.model, device) as model:
        meter.adopt(tensor.data for tensor in [*model.parameters(), *model.buffers()])
        meter.mark("setup")
        trainee = assemble(
            bench.workload,
            model.train(),
            device,
            precision=bench.precision,
            learning_rate=bench.workload.learning_rate,
            max_grad_norm=bench.max_grad_norm,
            knobs=bench.knobs,
        )
        for count in WINDOWS:
            run_window(
                trainee, _batches(bench, micro_batch, count, meter), micro_batch * count, mark=meter.mark
            )
        bench.device.synchronize()


def _batches(bench: Bench, micro_batch: int, count: int, meter: Any) -> Iterator[tuple[Any, int]]:
    for _ in range(count):
        with meter.aside():
            batch = to_device(bench.costliest.batch(micro_batch), bench.device.torch_device)
        meter.adopt(tensors_of(batch))
        yield batch, micro_batch


def trace_of(tree: list[Any]) -> Trace:
    """The allocations in a profiler's tree of events, in order; without frees of what was there."""
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
    """Whether the private parts of torch that tell the events are where they are looked for."""
    return hasattr(_EventType, "Allocation") and hasattr(torch.profiler, "profile")
