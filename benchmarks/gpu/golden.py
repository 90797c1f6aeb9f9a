"""Records of a GPU's allocator, reduced for storage and compared with the model of the allocator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from autobatch.core.units import KiB, MiB
from autobatch.device.allocator.caching import AllocatorConfig, CachingAllocator
from autobatch.device.allocator.trace import FREE, Trace

KEPT = ("alloc", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap")
"""Actions of ``torch.cuda.memory._snapshot()["device_traces"]`` that a replay needs."""
WORKSPACES = (4096 * KiB * 2 + 16 * KiB * 8, 32 * MiB)
"""Sizes of cuBLAS' workspaces: ``:4096:2:16:8``, and on capability 9.0 and later (CublasHandlePool.cpp)."""


class Mismatch(NamedTuple):
    """An entry at which the model reserves another amount than the GPU."""

    index: int
    """Index of the entry."""
    gpu_bytes: int
    model_bytes: int


def reduced(entries: Iterable[Mapping[str, Any]]) -> list[tuple[str, int, int]]:
    """Return action, address and size of the entries that a replay needs, relative to the lowest address."""
    # An allocation that failed has no address, and reserves nothing.
    kept = [(e["action"], int(e["addr"]), int(e["size"])) for e in entries if e["action"] in KEPT]
    lowest = min((address for _, address, _ in kept), default=0)
    return [(action, address - lowest, size) for action, address, size in kept]


def mismatches(
    entries: Iterable[tuple[str, int, int]], config: AllocatorConfig | None = None
) -> list[Mismatch]:
    """Replay the entries of a GPU through the model, and compare what both reserve after every allocation.

    The recording must begin with nothing reserved. Segments that the GPU frees (after ``empty_cache``, or
    to make room) are freed by the model at the next allocation.
    """
    model = CachingAllocator(None, config)
    handles: dict[int, Any] = {}
    found: list[Mismatch] = []
    reserved, gave_back = 0, False
    for index, (action, address, size) in enumerate(entries):
        if action in ("segment_alloc", "segment_map"):
            reserved += size
        elif action in ("segment_free", "segment_unmap"):
            reserved -= size
            gave_back = True
        elif action == "free_completed" and address in handles:
            model.free(handles.pop(address))
        elif action == "alloc":
            if gave_back:
                model.release()
                gave_back = False
            handles[address] = model.malloc(size)
            if model.reserved_bytes != reserved:
                found.append(Mismatch(index, reserved, model.reserved_bytes))
    return found


def lasting(trace: Trace, sizes: Iterable[int] = WORKSPACES) -> dict[int, int]:
    """Count the blocks of these sizes that are never freed, by size: the workspaces of libraries."""
    wanted = set(sizes)
    live: dict[int, int] = {}
    for block, size in trace.events:
        if size == FREE:
            live.pop(block, None)
        else:
            live[block] = size
    return dict(Counter(size for size in live.values() if size in wanted))
