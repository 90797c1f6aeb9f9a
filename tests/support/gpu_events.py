"""The allocation events of a function on a GPU, and those that a trace predicts for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from autobatch.device.allocator.trace import FREE, Trace
from autobatch.device.cuda_allocator import trace_of
from autobatch.device.profiles import Processors
from autobatch.footprint.program import derived_bytes
from autobatch.footprint.tracing.cuda_policy import cuda_policy
from autobatch.footprint.tracing.fakes import fake_copy, new_mode
from autobatch.footprint.tracing.trace_mode import Recorder, Recording


def events_of(trace: Trace) -> list[str]:
    """Return events as text: the bytes of each block when it is taken and when it is freed."""
    sizes = {block: size for block, size in trace.events if size != FREE}
    return [f"{'-' if size == FREE else '+'}{sizes[block]}" for block, size in trace.events]


def on_processors(recording: Recording, processors: Processors) -> Trace:
    """Return a recording with the scratch of reductions on a GPU."""
    events = tuple(
        (block, derived_bytes(*recording.derived[block], processors))
        if size != FREE and block in recording.derived
        else (block, size)
        for block, size in recording.trace.events
    )
    return Trace(events, recording.trace.marks).without_empty()


def predicted(
    function: Callable[..., Any],
    inputs: Any,
    *,
    capability: tuple[int, int],
    processors: Processors,
) -> list[str]:
    """Return the events of a function on inputs that are there already, from a trace on fakes."""
    mode = new_mode()
    recorder = Recorder(on_gpu=True)
    with mode, cuda_policy(capability), recorder:
        with recorder.uncounted():
            fakes = tree_map_only(Tensor, lambda tensor: fake_copy(tensor, mode), inputs)
        kept = function(*fakes)
        recorder.settle()
    del kept
    return events_of(on_processors(recorder.recording(), processors))


def real(function: Callable[..., Any], inputs: Any) -> list[str]:
    """Return the events of a function on the GPU, from the history of torch's allocator."""
    inputs = tree_map_only(Tensor, lambda x: x.detach().cuda().requires_grad_(x.requires_grad), inputs)
    function(*inputs)  # takes workspaces, and loads libraries
    return events_of(history(lambda: function(*inputs)).canonical())


def history(function: Callable[[], Any]) -> Trace:
    """Return the events of a call on the GPU."""
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(enabled="all", context=None)
    try:
        kept = function()
        torch.cuda.synchronize()
        entries = torch.cuda.memory._snapshot()["device_traces"][0]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    del kept
    return trace_of(entries)


def processors_here() -> Processors:
    """Return the processors of this machine's GPU."""
    gpu = torch.cuda.get_device_properties(0)
    return Processors(gpu.multi_processor_count, gpu.max_threads_per_multi_processor)
