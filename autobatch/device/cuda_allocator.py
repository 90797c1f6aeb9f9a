"""torch's CUDA allocator: its settings, the events that it records, and its readings.

Settings are the memory cap, expandable segments and cuBLAS workspaces. ``torch.cuda.memory`` records every
allocation and free with the requested size, hidden workspaces included, so that runs on a GPU calibrate the
same program of events as runs on the CPU. The function is private to torch: without it nothing is recorded,
and the search uses peaks.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch

from autobatch.core.units import KiB, MiB, format_bytes
from autobatch.device.allocator.ledger import MemoryStats
from autobatch.device.allocator.trace import FREE, Trace
from autobatch.device.oom import lost_context_ignored

T = TypeVar("T")
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
_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables of these options. The first that is set counts, even if empty (c10/core/AllocatorConfig.cpp)."""


@contextlib.contextmanager
def capped(index: int, *, limit_bytes: int, total_bytes: int) -> Iterator[None]:
    """Cap the allocator of a GPU within the block, then restore the former cap."""
    before_bytes = read_cap(index, total_bytes)
    _set_cap(index, limit_bytes, total_bytes)
    try:
        yield
    finally:
        with lost_context_ignored():
            _set_cap(index, before_bytes, total_bytes)


def memory_fraction(limit_bytes: int, total_bytes: int) -> float:
    """Return the smallest fraction of a GPU's memory, at most 1.0, that allows all bytes of the limit.

    The allocator multiplies and truncates. One byte less would lose a segment of a limit of whole segments.
    """
    fraction = min(limit_bytes / total_bytes, 1.0)
    while fraction < 1.0 and int(fraction * total_bytes) < limit_bytes:
        fraction = math.nextafter(fraction, 1.0)
    return fraction


def _set_cap(index: int, limit_bytes: int, total_bytes: int) -> None:
    torch.cuda.set_per_process_memory_fraction(memory_fraction(limit_bytes, total_bytes), index)


def read_cap(index: int, total_bytes: int) -> int:
    """Return the current cap in bytes; the total (no cap) on releases that do not report it."""
    read = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return round((1.0 if read is None else read(index)) * total_bytes)


@contextlib.contextmanager
def expandable_segments(release: Callable[[], None]) -> Iterator[None]:
    """Make new segments expandable within the block.

    The allocator reads the setting whenever it requests memory from the driver (``alloc_block`` in
    c10/cuda/CUDACachingAllocator.cpp). Segments are freed as they were made.

    Args:
        release: Frees cached memory; called before each switch.
    """
    configure = _allocator_settings()
    if configure is None:
        yield
        return
    release()
    configure("expandable_segments:True")
    try:
        yield
    finally:
        configure("expandable_segments:False")
        release()


def free_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps, so that the next product takes new ones."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


def free_pinned() -> None:
    """Free the pinned memory of the host that torch keeps for further copies."""
    clear = getattr(torch._C, "_host_emptyCache", None)
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


def allocator_options(environ: Mapping[str, str]) -> str:
    """Return the options of the allocator in the environment: those of the first variable that is set."""
    text = next((environ[name] for name in _VARIABLES if name in environ), "")
    return text.replace(" ", "").lower()


def asks_for_expandable(environ: Mapping[str, str]) -> bool:
    """Return whether the environment asks for expandable segments."""
    return "expandable_segments:true" in allocator_options(environ)


def unmodelled_options(environ: Mapping[str, str]) -> list[str]:
    """Return the options in the environment with which `autobatch.device.allocator` is another allocator."""
    return re.findall(rf"\b({'|'.join(_UNMODELLED)})(?=:)", allocator_options(environ))


def why_not_expandable() -> str | None:
    """Return why the allocator of this process cannot switch to expandable segments; None if it can."""
    return reason_not_expandable(
        os.environ,
        platform=sys.platform if torch.version.hip is None else "HIP",
        backend=torch.cuda.get_allocator_backend(),
        is_configurable=_allocator_settings() is not None,
        settings=_last_settings(),
    )


def _last_settings() -> str:
    """Return the settings that were made since the process began; empty if torch does not tell."""
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if read is not None:
        return str(read())
    # torch 2.11 reports them in a snapshot only.
    try:
        told = torch.cuda.memory._snapshot()["allocator_settings"]
        return str(next((told[name] for name in _VARIABLES if name in told), ""))
    except (RuntimeError, AttributeError, KeyError, TypeError):
        return ""


def reason_not_expandable(
    environ: Mapping[str, str], *, platform: str, backend: str, is_configurable: bool, settings: str
) -> str | None:
    """Return why an allocator cannot switch to expandable segments while it runs; None if it can.

    Args:
        environ: The environment. Settings of the user in it are left alone.
        platform: The operating system, or ``HIP``.
        backend: Name of the allocator.
        is_configurable: Whether this torch can change settings while it runs.
        settings: Settings made since the process began.
    """
    named = [name for name in _VARIABLES if environ.get(name)]
    if named:
        return f"{named[0]} is set, and its settings are kept"
    if platform != "linux" or backend != "native":
        return "only torch's own allocator has them, for CUDA on Linux"
    if not is_configurable:
        return "this torch cannot change it while it runs: set PYTORCH_ALLOC_CONF=expandable_segments:True"
    # Our own sessions leave torch's default behind.
    if settings.strip() not in ("", "expandable_segments:False"):
        return f"other code has changed the allocator's settings ({settings})"
    return None


def _allocator_settings() -> Callable[[str], None] | None:
    """Return torch's function that changes settings (2.9 and later); None if there is none."""
    return getattr(torch._C, "_accelerator_setAllocatorSettings", None)


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


def snapshot_of(run: Callable[[], T]) -> tuple[T, bytes]:
    """Return what a function returns, and torch's snapshot of its memory as the content of a file."""
    torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS)
    try:
        found = run()
        # As `torch.cuda.memory._dump_snapshot` writes it.
        return found, pickle.dumps(torch.cuda.memory._snapshot())
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


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


class CudaMeter:
    """Readings of one session on a GPU. Peaks and retries count from its beginning.

    Args:
        index: The GPU.
        history: The recording of the allocator. None in training, where no reading waits for the GPU.
    """

    def __init__(self, index: int, history: History | None = None) -> None:
        self._history = history
        self.phase = "setup"
        """The last phase passed to `mark`."""
        self._index = index
        torch.cuda.reset_peak_memory_stats(index)
        self._retries_before = self._retries()

    def count(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do nothing: the batch is on the GPU, and its allocator has counted it."""

    def uncounted(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing: what the host collates is not on the GPU."""
        return contextlib.nullcontext()

    def mark(self, phase: str) -> None:
        """Record that a phase begins; see `autobatch.step.train_step.Mark`."""
        self.phase = phase

    def stats(self) -> MemoryStats:
        """Read the allocator, in bytes. In a probe, wait for the GPU first."""
        if self._history is not None:
            torch.cuda.synchronize(self._index)
        figures = torch.cuda.memory_stats(self._index)
        return MemoryStats(
            allocated_bytes=figures["allocated_bytes.all.current"],
            reserved_bytes=figures["reserved_bytes.all.current"],
            peak_allocated_bytes=figures["allocated_bytes.all.peak"],
            peak_reserved_bytes=figures["reserved_bytes.all.peak"],
            retries=self._retries() - self._retries_before,
        )

    def trace(self) -> Trace | None:
        """Return the events that the allocator recorded; None in training, which records none."""
        return None if self._history is None else self._history.trace()

    def _retries(self) -> int:
        return int(torch.cuda.memory_stats(self._index)["num_alloc_retries"])


def why_refused(stats: MemoryStats, budget_bytes: int) -> str | None:
    """Return the rule that a finished step broke, in words; None if none.

    After a retry, memory was found only by returning the cache to the driver. Every later step would do the
    same, and take several times as long.
    """
    if stats.retries:
        return f"the allocator freed its cache {stats.retries} times to find memory"
    if stats.peak_reserved_bytes is not None and stats.peak_reserved_bytes > budget_bytes:
        return (
            f"the allocator held {format_bytes(stats.peak_reserved_bytes)}, over the budget of "
            f"{format_bytes(budget_bytes)}"
        )
    return None
