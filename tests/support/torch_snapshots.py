"""Memory snapshots in torch's own format, built from recordings of real GPUs or by hand."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from benchmarks.published.recordings import read

RECORDINGS = Path(__file__).parents[1] / "recordings"
ACTIONS = {
    "new": "segment_alloc",
    "released": "segment_free",
    "map": "segment_map",
    "alloc": "alloc",
    "free": "free_completed",
}


def snapshot_of(name: str) -> dict[str, Any]:
    """Return a recording as torch dumps it: the events, and the segments with their blocks at the end."""
    rows = read(RECORDINGS / f"{name}.csv.gz")
    live: dict[int, int] = {}
    memory: dict[int, list[int]] = {}
    """Bytes and stream of each piece of memory, by its address."""
    events, sizes = [], {}
    for action, address, *rest in rows:
        if action == "held":
            live[address] = sizes[address] = rest[0]
        elif action in ("segment", "mapped"):
            memory[address] = [rest[0], rest[2] if len(rest) > 2 else 0]
        elif action in ACTIONS:
            at = 0 if action == "free" else 1
            stream = next((part for part in rest[at:] if part != ""), 0)
            size = sizes.get(address, 0) if action == "free" else rest[0]
            if action in ("new", "map"):
                memory[address] = [size, stream]
            elif action == "released":
                del memory[address]
            elif action == "alloc":
                live[address] = sizes[address] = size
            else:
                live.pop(address, None)
            events.append({"action": ACTIONS[action], "addr": address, "size": size, "stream": stream})
    is_expandable = any(row[0] in ("map", "mapped", "begin") for row in rows)
    segments = []
    for start, (total, stream) in sorted(memory.items()):
        held = [(address, live[address]) for address in sorted(live) if start <= address < start + total]
        segments.append(segment(start, total, held, stream=stream, is_expandable=is_expandable))
    return {"segments": segments, "device_traces": [events]}


def segment(
    start: int, total: int, held: list[tuple[int, int]] = (), *, stream: int = 0, **fields: Any
) -> dict[str, Any]:
    """Return a segment with the blocks that are held in it, and free ones between."""
    blocks, at = [], start
    for address, size in held:
        if address > at:
            blocks.append({"address": at, "size": address - at, "state": "inactive"})
        rounded = -(-size // 512) * 512
        active = {"address": address, "size": rounded, "requested_size": size, "state": "active_allocated"}
        blocks.append(active)
        at = address + rounded
    if at < start + total:
        blocks.append({"address": at, "size": start + total - at, "state": "inactive"})
    return {
        "device": 0, "address": start, "total_size": total, "stream": stream, "blocks": blocks, **fields
    }  # fmt: skip


def write(path: Path, content: object) -> Path:
    """Write a snapshot as torch does."""
    path.write_bytes(pickle.dumps(content))
    return path
