"""Snapshots of a step in the format of ``torch.cuda.memory._dump_snapshot``, for pytorch.org/memory_viz.

The format is that of ``torch/cuda/memory.py`` (``_snapshot``), with the category of each allocation as
``torch/cuda/_memory_viz.py`` writes it for a profile. The page reads pickles of protocol 2 to 4
(``torch/utils/viz/MemoryViz.js``). Events come from a trace, and addresses from a replay in an allocator.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from typing import Any

from autobatch.device.allocator.caching import Block, Pool
from autobatch.device.allocator.ledger import Allocator
from autobatch.device.allocator.trace import FREE, Trace
from autobatch.footprint.tracing.recording import Label

PROTOCOL = 4
"""Newest pickle protocol that the page reads."""
ALIGNMENT = 64
"""Bytes to which an allocator without segments aligns addresses."""
LARGE_BYTES = 2**20
"""Segments of more bytes belong to the pool of large blocks (c10/cuda/CUDACachingAllocator.cpp)."""
_POOL = (0, 0)


def snapshot(trace: Trace, allocator: Allocator, labels: Sequence[Label] = ()) -> dict[str, Any]:
    """Return a snapshot of a trace.

    Args:
        trace: the allocations and frees, canonical.
        allocator: empty and without a limit. If it has no segments, each block is one of its own.
        labels: by block number; empty if unknown.
    """
    memory = _Segments(allocator) if allocator.reserved_bytes is not None else _Blocks()
    events: list[dict[str, Any]] = []
    live: dict[int, dict[str, Any]] = {}
    handles: dict[int, Any] = {}
    for index, (block, size) in enumerate(trace.events):
        if size == FREE:
            entry = live.pop(block, None)
            if entry is None:
                continue
            allocator.free(handles.pop(block))
            events += [
                {**entry, "action": act, "time_us": index} for act in ("free_requested", "free_completed")
            ]
            continue
        if size == 0:
            continue
        handles[block] = allocator.malloc(size)
        label = labels[block] if block < len(labels) else None
        phase = trace.phase_at(index) or "setup"
        address, grown = memory.place(handles[block], size)
        events += [_entry(*one, index=index, phase=phase) for one in grown]
        live[block] = _entry("alloc", address, size, index=index, phase=phase, label=label)
        events.append(live[block])
    return {"segments": memory.segments(list(live.values()), handles.values()), "device_traces": [events]}


def dump(trace: Trace, allocator: Allocator, labels: Sequence[Label] = ()) -> bytes:
    """Return a `snapshot` as the content of a file."""
    return pickle.dumps(snapshot(trace, allocator, labels), protocol=PROTOCOL)


def _entry(
    action: str, address: int, size: int, *, index: int, phase: str, label: Label | None = None
) -> dict[str, Any]:
    """Return an event; the module, the kind and the phase of a block stand in place of a stack."""
    frames = [{"filename": "phase", "line": 0, "name": phase}]
    if label is not None:
        frames.insert(0, {"filename": label.kind, "line": 0, "name": label.module or "(no module)"})
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": 0,
        "time_us": index,
        "pool_id": _POOL,
        "frames": frames,
        "category": "unknown" if label is None else label.kind,
    }


class _Blocks:
    """Addresses in an allocator without segments, which are never used again."""

    def __init__(self) -> None:
        self._next = ALIGNMENT

    def place(self, handle: object, size: int) -> tuple[int, list[tuple[str, int, int]]]:
        """Return the address of a block, and no new segments."""
        del handle
        address = self._next
        self._next += -(-size // ALIGNMENT) * ALIGNMENT
        return address, []

    def segments(self, live: list[dict[str, Any]], handles: Iterable[Any]) -> list[dict[str, Any]]:
        """Return each live block as a segment."""
        del handles
        return [_segment([_block(one["addr"], one["size"], one)]) for one in live]


class _Segments:
    """Segments of the model of CUDA's allocator, as they are seen at each block."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._reserved = 0
        self._starts: set[int] = set()
        self._pools: dict[int, Pool] = {}

    def place(self, handle: Block, size: int) -> tuple[int, list[tuple[str, int, int]]]:
        """Return the address of a block, and the memory that its segment took for it, if any."""
        del size
        reserved = self._allocator.reserved_bytes or 0
        grown, self._reserved = reserved - self._reserved, reserved
        head = _head_of(handle)
        is_new = head.address not in self._starts
        self._starts.add(head.address)
        self._pools[id(handle.pool)] = handle.pool
        if grown <= 0:
            return handle.address, []
        end = head.address + sum(one.size for one in _chain(head))
        return handle.address, [("segment_alloc" if is_new else "segment_map", end - grown, grown)]

    def segments(self, live: list[dict[str, Any]], handles: Iterable[Block]) -> list[dict[str, Any]]:
        """Return the segments at the end, with their blocks."""
        by_address = {one["addr"]: one for one in live}
        free = [block for pool in self._pools.values() for _, _, block in pool.free]
        heads = {head.address: head for head in map(_head_of, [*handles, *free])}
        return [
            _segment([_block(one.address, one.size, by_address.get(one.address)) for one in _chain(head)])
            for _, head in sorted(heads.items())
        ]


def _head_of(block: Block) -> Block:
    while block.previous is not None:
        block = block.previous
    return block


def _chain(block: Block | None) -> Sequence[Block]:
    """Return the blocks from here to the end of the segment that have memory."""
    found = []
    while block is not None and block.mapped:
        found.append(block)
        block = block.next
    return found


def _block(address: int, size: int, held: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "address": address,
        "size": size,
        "requested_size": 0 if held is None else held["size"],
        "state": "inactive" if held is None else "active_allocated",
        "frames": [] if held is None else held["frames"],
    }


def _segment(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    total = sum(one["size"] for one in blocks)
    held = [one for one in blocks if one["state"] == "active_allocated"]
    active = sum(one["size"] for one in held)
    return {
        "device": 0,
        "address": blocks[0]["address"],
        "total_size": total,
        "allocated_size": active,
        "active_size": active,
        "requested_size": sum(one["requested_size"] for one in held),
        "stream": 0,
        "segment_type": "large" if total > 2 * LARGE_BYTES else "small",
        "segment_pool_id": _POOL,
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }
