"""torch's CUDA allocator: its settings, the events that it records, and its readings.

``torch.cuda.memory`` records every allocation and free with the requested size, hidden workspaces included,
so runs on a GPU calibrate the same program of events as runs on the CPU. The function is private to torch:
without it nothing is recorded, and the search uses peaks.
"""

from __future__ import annotations

import math
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Literal, TypeVar

import torch

from autobatch.core.units import KiB, MiB
from autobatch.device.allocator.ledger import MemoryStats
from autobatch.device.allocator.trace import FREE, Trace
from autobatch.device.base import SilentMeter
from autobatch.device.oom import lost_context_ignored

T = TypeVar("T")
_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables of the allocator's options. The first that is set counts, even if empty
(c10/core/AllocatorConfig.cpp)."""
_UNMODELLED = (
    "max_split_size_mb",
    "roundup_power2_divisions",
    "roundup_bypass_threshold_mb",
    "garbage_collection_threshold",
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
)
"""Options that change where the allocator puts blocks (c10/core/AllocatorConfig.h, torch 2.13)."""

WorkspaceRule = Literal["apart", "shared", "freed"]
"""When a product takes a workspace: the first of cuBLAS in each thread and the first of cuBLASLt (until torch
2.11), the first of either (until 2.14), or each, which frees it at once (from 2.15 on)."""
FUSED_WORKSPACE_BYTES = MiB
"""Bytes of a workspace of cuBLASLt's own (``parseCUDABlasLtWorkspaceSize``)."""
MOST_EVENTS = 300_000
"""Most events of a recording. A longer one would be incomplete, so its trace is None. 25,000 are usual, and a
snapshot makes a Python object of each."""


@contextmanager
def capped(index: int, *, limit_bytes: int, total_bytes: int) -> Iterator[None]:
    """Cap the allocator of a GPU within the block, then restore the former cap."""
    before_bytes = read_cap(index, total_bytes)
    _set_cap(index, limit_bytes, total_bytes)
    try:
        yield
    finally:
        with lost_context_ignored():
            _set_cap(index, before_bytes, total_bytes)


def read_cap(index: int, total_bytes: int) -> int:
    """Return the current cap in bytes: the total if there is none."""
    return round(torch.cuda.get_per_process_memory_fraction(index) * total_bytes)


def _set_cap(index: int, limit_bytes: int, total_bytes: int) -> None:
    """Set the smallest fraction of the memory that allows all bytes of the limit.

    The allocator multiplies and truncates. One byte less would lose a segment of a limit of whole segments.
    """
    fraction = min(limit_bytes / total_bytes, 1.0)
    while fraction < 1.0 and int(fraction * total_bytes) < limit_bytes:
        fraction = math.nextafter(fraction, 1.0)
    torch.cuda.set_per_process_memory_fraction(fraction, index)


@contextmanager
def expandable_segments(release: Callable[[], None]) -> Iterator[None]:
    """Make new segments expandable within the block, where `why_not_expandable` is None.

    The allocator reads the setting whenever it requests memory from the driver (``alloc_block`` in
    c10/cuda/CUDACachingAllocator.cpp). Segments are freed as they were made, so ``release`` frees cached
    memory before each switch.
    """
    release()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        release()


def why_not_expandable() -> str | None:
    """Return why the allocator cannot switch to expandable segments while it runs; None if it can."""
    named = [name for name in _VARIABLES if os.environ.get(name)]
    if named:
        return f"{named[0]} is set, and its settings are kept"
    is_cuda = sys.platform == "linux" and torch.version.hip is None
    if not is_cuda or torch.cuda.get_allocator_backend() != "native":
        return "only torch's own allocator has them, for CUDA on Linux"
    if not hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        return "this torch cannot change it while it runs: set PYTORCH_ALLOC_CONF=expandable_segments:True"
    settings = _last_settings()
    # Our own sessions leave torch's default behind.
    if settings.strip() not in ("", "expandable_segments:False"):
        return f"other code has changed the allocator's settings ({settings})"
    return None


def _last_settings() -> str:
    """Return the settings that were made since the process began; empty if torch does not tell."""
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if read is not None:
        return str(read())
    # torch 2.11 reports them in a snapshot only.
    try:
        settings = torch.cuda.memory._snapshot()["allocator_settings"]
        return str(next((settings[name] for name in _VARIABLES if name in settings), ""))
    except (RuntimeError, AttributeError, KeyError, TypeError):
        return ""


def allocator_options(environ: Mapping[str, str]) -> str:
    """Return the options of the allocator in the environment: those of the first variable that is set."""
    text = next((environ[name] for name in _VARIABLES if name in environ), "")
    return text.replace(" ", "").lower()


def unmodelled_options(environ: Mapping[str, str]) -> list[str]:
    """Return the options in the environment with which `autobatch.device.allocator` is another allocator."""
    return re.findall(rf"\b({'|'.join(_UNMODELLED)})(?=:)", allocator_options(environ))


def free_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps, and the pinned host memory that torch keeps for copies."""
    for name in ("_cuda_clearCublasWorkspaces", "_host_emptyCache"):
        clear = getattr(torch._C, name, None)
        if clear is not None:
            clear()


def workspace_rule(version: str, environ: Mapping[str, str]) -> WorkspaceRule:
    """Return when a version of torch takes the workspaces of cuBLAS (ATen/cuda/CublasHandlePool.cpp).

    ``TORCH_CUBLAS_WORKSPACE_CACHE=1`` makes later versions keep them too.
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < (2, 12):
        return "apart"
    is_kept = (major, minor) < (2, 15) or environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"
    return "shared" if is_kept else "freed"


def usual_workspaces(capability: tuple[int, int]) -> tuple[int, int]:
    """Return the bytes of a cuBLAS workspace, and their number: one for each thread that runs products.

    The sizes are those of ATen/cuda/CublasHandlePool.cpp, ``CUBLAS_WORKSPACE_CONFIG`` left out.
    """
    return (32 * MiB if capability >= (9, 0) else 4096 * 2 * KiB + 16 * 8 * KiB), 2


@contextmanager
def recorded() -> Iterator[bool]:
    """Record the allocator's events within the block, for `recorded_trace`.

    Yields:
        False if torch cannot record, or records for the user already, which another recording would end.
    """
    recording = False
    with suppress(RuntimeError, TypeError, AttributeError):
        if not torch._C._cuda_isHistoryEnabled():
            _record("all")
            recording = True
    try:
        yield recording
    finally:
        if recording:
            _record(None)


def _record(enabled: Literal["all"] | None) -> None:
    # Without stacks, which cost more than the allocations.
    torch.cuda.memory._record_memory_history(enabled=enabled, context=None, max_entries=MOST_EVENTS)


def recorded_trace(index: int) -> Trace | None:
    """Return the events of a GPU since the recording began; None if no replay of them is right.

    That is so if the beginning is lost, the format is unknown, or blocks are in a private pool, as those of
    CUDA graphs: it shares no block with the others.
    """
    try:
        snapshot = torch.cuda.memory._snapshot(index)
        entries = snapshot["device_traces"][index]
        # The entries of torch 2.11 do not name their pool, and its segments do.
        pools = [one["pool_id"] for one in entries if "pool_id" in one] or [
            one.get("segment_pool_id") for one in snapshot.get("segments", ()) if one.get("device") == index
        ]
        is_private = any(tuple(pool or (0, 0)) != (0, 0) for pool in pools)
        return None if is_private or len(entries) >= MOST_EVENTS else trace_of(entries)
    except (RuntimeError, KeyError, IndexError, TypeError, AttributeError):
        return None


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


def snapshot_of(run: Callable[[], T]) -> tuple[T, bytes]:
    """Return what a function returns, and torch's snapshot of its memory as the content of a file."""
    torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS)
    try:
        found = run()
        # As `torch.cuda.memory._dump_snapshot` writes it.
        return found, pickle.dumps(torch.cuda.memory._snapshot())
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


class CudaMeter(SilentMeter):
    """Readings of one session on a GPU. Peaks and retries count from its beginning.

    Args:
        index: The GPU.
        waits: Whether readings wait until the GPU has finished its work, as in a probe.
        records: Whether the session is `recorded`.
    """

    def __init__(self, index: int, *, waits: bool = False, records: bool = False) -> None:
        self._index, self._waits, self._records = index, waits, records
        torch.cuda.reset_peak_memory_stats(index)
        self._retries_before = torch.cuda.memory_stats_as_nested_dict(index)["num_alloc_retries"]

    def stats(self) -> MemoryStats:
        """Read the allocator, in bytes."""
        if self._waits:
            torch.cuda.synchronize(self._index)
        # A loop reads after every step, and the flat dictionary takes 15 times as long.
        figures = torch.cuda.memory_stats_as_nested_dict(self._index)
        allocated, reserved = figures["allocated_bytes"]["all"], figures["reserved_bytes"]["all"]
        return MemoryStats(
            allocated_bytes=allocated["current"],
            reserved_bytes=reserved["current"],
            peak_allocated_bytes=allocated["peak"],
            peak_reserved_bytes=reserved["peak"],
            retries=figures["num_alloc_retries"] - self._retries_before,
        )

    def trace(self) -> Trace | None:
        """Return the events that the allocator recorded; None in training, which records none."""
        return recorded_trace(self._index) if self._records else None
