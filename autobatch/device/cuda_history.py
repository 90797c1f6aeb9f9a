"""The allocation events of a GPU, from the history that torch's allocator records.

``torch.cuda.memory._record_memory_history`` records every allocation and free with the requested size, hidden
workspaces included. Runs on a GPU therefore calibrate the same program of events as runs on the CPU. The
function is private to torch: without it nothing is recorded, and the search uses peaks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

from autobatch.device.allocator.trace import FREE, Trace

MOST_EVENTS = 300_000
"""Most events of a recording. A longer one would be incomplete, so its trace is None. 25,000 are usual, and a
snapshot makes a Python object of each."""


class History:
    """A recording of the allocator of one GPU."""

    def __init__(self, index: int, *, recording: bool) -> None:
        self._index = index
        self._recording = recording

    def trace(self) -> Trace | None:
        """Return the events since the recording began; None if there are none in a known format."""
        if not self._recording:
            return None
        try:
            snapshot = torch.cuda.memory._snapshot(self._index)
            entries = snapshot["device_traces"][self._index]
            if len(entries) >= MOST_EVENTS or _has_private_pool(
                entries, snapshot.get("segments", ()), self._index
            ):
                return None
            return trace_of(entries)
        except (RuntimeError, KeyError, IndexError, TypeError, AttributeError):
            return None


@contextmanager
def recorded(index: int, *, is_modelled: bool = True) -> Iterator[History]:
    """Record the allocator's events on a GPU within the block.

    Args:
        index: The GPU.
        is_modelled: False if the allocator has options with which no replay is right. Nothing is recorded
            then, nor during a recording of the user's, which another would end.
    """
    recording = is_modelled and not _is_recording() and _record("all")
    try:
        yield History(index, recording=recording)
    finally:
        if recording:
            _record(None)


def trace_of(entries: Iterable[Mapping[str, Any]]) -> Trace:
    """Turn a snapshot's entries into a trace: one block per allocation, freed when its free completes.

    Frees of blocks that are older than the recording are left out. So are allocations that failed: their
    entries have no address (cuDNN catches the error and tries another plan, torch
    aten/src/ATen/native/cudnn/Conv_v8.cpp).
    """
    blocks: dict[int, int] = {}
    events: list[tuple[int, int]] = []
    for entry in entries:
        if entry["action"] == "alloc":
            blocks[entry["addr"]] = len(events)
            events.append((blocks[entry["addr"]], int(entry["size"])))
        elif entry["action"] == "free_completed" and entry["addr"] in blocks:
            events.append((blocks.pop(entry["addr"]), FREE))
    return Trace(tuple(events))


def _has_private_pool(
    entries: Sequence[Mapping[str, Any]], segments: Iterable[Mapping[str, Any]], index: int
) -> bool:
    """Return whether blocks are in a private pool, as those of CUDA graphs.

    Such a pool shares no block with the others, so that one replay of both is wrong. The entries of torch
    2.11 do not name their pool, and its segments do.
    """
    if any("pool_id" in entry for entry in entries):
        return any(_is_private(entry.get("pool_id")) for entry in entries)
    return any(_is_private(one.get("segment_pool_id")) for one in segments if one.get("device") == index)


def _is_private(pool: Sequence[int] | None) -> bool:
    return tuple(pool or (0, 0)) != (0, 0)


def _is_recording() -> bool:
    asked = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    try:
        return asked is not None and bool(asked())
    except RuntimeError:
        return False


def _record(enabled: Literal["all"] | None) -> bool:
    try:
        # Without stacks, which cost more than the allocations.
        torch.cuda.memory._record_memory_history(enabled=enabled, context=None, max_entries=MOST_EVENTS)
    except (RuntimeError, TypeError, AttributeError):
        return False
    return True
