"""The allocation events of a CUDA card, from the allocator's own history.

``torch.cuda.memory._record_memory_history`` notes every allocation and free with the size that was asked for,
hidden workspaces included; so runs on a card calibrate the same program of events as runs on the CPU. It is
private to torch: where it has moved, nothing is recorded, and the search goes by peaks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch

from autobatch.device.allocator.trace import FREE, Trace

MOST_EVENTS = 2_000_000
"""A step that allocates more often than this is not recorded whole, and then not at all."""


class History:
    """A recording that is going on; ``trace`` reads it."""

    def __init__(self, index: int, *, recording: bool) -> None:
        self._index = index
        self._recording = recording

    def trace(self) -> Trace | None:
        """The events since the recording began; ``None`` where nothing could be recorded."""
        if not self._recording:
            return None
        try:
            entries = torch.cuda.memory._snapshot(self._index)["device_traces"][self._index]
        except (RuntimeError, KeyError, IndexError, TypeError, AttributeError):
            return None
        return None if len(entries) >= MOST_EVENTS else trace_of(entries)


@contextmanager
def recorded(index: int) -> Iterator[History]:
    """Record the allocator's events of a card inside.

    The workspaces of cuBLAS are given back first: they are taken once in a process, and every recording must
    see them taken.
    """
    _forget_workspaces()
    recording = _record("all")
    try:
        yield History(index, recording=recording)
    finally:
        if recording:
            _record(None)


def trace_of(entries: Iterable[Mapping[str, Any]]) -> Trace:
    """Turn a snapshot's entries into a trace: one block for each allocation, freed when that completes.

    Frees of blocks that were taken before the recording began are left out.
    """
    blocks: dict[int, int] = {}
    events: list[tuple[int, int]] = []
    for entry in entries:
        action, address = entry["action"], entry["addr"]
        if action == "alloc":
            blocks[address] = len(events)
            events.append((blocks[address], int(entry["size"])))
        elif action == "free_completed" and address in blocks:
            events.append((blocks.pop(address), FREE))
    return Trace(tuple(events))


def _record(enabled: Literal["all"] | None) -> bool:
    try:
        # No stacks: they cost more than the allocation.
        torch.cuda.memory._record_memory_history(enabled=enabled, context=None, max_entries=MOST_EVENTS)
    except (RuntimeError, TypeError, AttributeError):
        return False
    return True


def _forget_workspaces() -> None:
    forget = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if forget is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call,unused-ignore]
        forget()
