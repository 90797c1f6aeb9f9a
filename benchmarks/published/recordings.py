"""Recordings of real GPUs' allocators, replayed in the model: each block at the address where the GPU put it.

A recording is a snapshot as ``torch.cuda.memory._dump_snapshot`` writes it, or its reduced form: rows of a
CSV file. Before the first event these are ``segment,address,bytes,pool[,stream]`` and ``held,address,bytes``,
or of expandable segments ``begin,address,bytes,pool`` and ``mapped,address,bytes,pool``. Then come ``new``
and ``released`` (segments), ``map`` (pages), ``alloc,address,bytes[,stream]`` and ``free,address``.
"""

from __future__ import annotations

import gzip
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from autobatch.device.allocator import (
    ROUND_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    Block,
    CachingAllocator,
)
from autobatch.device.trace import load_snapshot

Row = tuple[Any, ...]
ACTIONS = {"segment_alloc": "new", "segment_free": "released", "alloc": "alloc", "free_completed": "free"}
GROWS = {"new": 1, "map": 1, "released": -1}


class Outcome(NamedTuple):
    """Result of a replay: blocks, those where the GPU put them, new segments or pages, and reserved peaks."""

    allocations: int
    same: int
    segments: int
    peak_bytes: int
    model_peak_bytes: int

    @property
    def agrees(self) -> bool:
        """True if the model differs nowhere."""
        return (self.same, self.model_peak_bytes) == (self.allocations, self.peak_bytes)


def read(path: Path) -> list[Row]:
    """Return the rows of a recording in its reduced form."""
    with gzip.open(path, "rt") as lines:
        rows = [line.strip().split(",") for line in lines]
    return [tuple(int(part) if part.isdigit() else part for part in row) for row in rows]


def rows_of(content: Mapping[str, Any]) -> Iterator[list[Row]]:
    """Yield the rows of each GPU of a snapshot without expandable segments.

    The state before follows from the end of the recording: its events are undone from the last to the first.
    """
    for device, entries in enumerate(content["device_traces"]):
        segments = [part for part in content["segments"] if part.get("device", 0) == device]
        events = (entry for entry in entries if entry["action"] in ACTIONS)
        rows = [
            (ACTIONS[event["action"]], event["addr"], event["size"], event.get("stream", 0))
            for event in events
        ]
        if rows and not any(part.get("is_expandable") for part in segments):
            yield [*undone(rows, segments), *rows]


def undone(rows: Sequence[Row], segments: Sequence[dict[str, Any]]) -> list[Row]:
    """Return the segments and held blocks before the first of some events, by those after the last.

    In the pool of large blocks no piece up to `SMALL_BYTES` is split off: a gap as small as that behind a
    block is the block's.
    """
    memory = {part["address"]: (part["total_size"], part["stream"]) for part in segments}
    blocks = (block for part in segments for block in part["blocks"])
    held = {block["address"]: block["size"] for block in blocks if block["state"].startswith("active")}
    for kind, address, size, stream in reversed(rows):
        if kind == "new":
            del memory[address]
        elif kind == "released":
            memory[address] = (size, stream)
        elif kind == "free":
            held[address] = -(-size // ROUND_BYTES) * ROUND_BYTES
        else:
            held.pop(address, None)
    ends = (start + size for start, (size, _) in memory.items())
    places = sorted({*held, *ends, *(address for kind, address, *_ in rows if kind == "alloc")})
    for address, size in held.items():
        following = places[bisect_left(places, address + size)]
        if size > SMALL_BYTES >= following - address - size:
            held[address] = following - address
    before = [
        ("segment", start, size, "large" if size > SMALL_SEGMENT_BYTES else "small", stream)
        for start, (size, stream) in memory.items()
    ]
    return [*before, *(("held", *block) for block in held.items())]


class Resumed(CachingAllocator):
    """A model of an allocator that has segments already, and gets new ones at the addresses of a driver."""

    def begin_with(self, rows: Sequence[Row]) -> dict[int, Block]:
        """Put the segments of a recording in place, and return the blocks that are held, by address."""
        handles: dict[int, Block] = {}
        for kind, start, size, name, *stream in (row for row in rows if row[0] in ("segment", "begin")):
            held, mapped = (
                sorted(row[1:3] for row in rows if row[0] == stated and start <= row[1] < start + size)
                for stated in ("held", "mapped")
            )
            end = start + (size if kind == "segment" else sum(part for _, part in mapped))
            spans, position = [], start
            for address, part in [*held, (end, 0)]:
                spans += [(position, address - position, False, True), (address, part, True, True)]
                position = address + part
            spans.append((end, start + size - end, False, False))
            pool, previous = self._pools[stream[0] if stream else 0][name != "small"], None
            for address, part, is_held, is_mapped in (span for span in spans if span[1]):
                block = Block(pool, address, part, mapped=is_mapped)
                block.held, block.previous = is_held, previous
                if previous is not None:
                    previous.next = block
                previous = block
                if is_mapped:
                    self._reserve(part)
                if is_held:
                    handles[address] = block
                    self.allocated_bytes += part
                else:
                    pool.insert(block)
        return handles


def replayed(rows: Sequence[Row]) -> Outcome:
    """Replay a recording, with new segments at the addresses that the driver gave."""
    given: list[int] = []
    nowhere = count(1 << 50, 1 << 40)
    """Addresses of segments that the model needs, and the GPU did not."""
    is_expandable = any(row[0] == "begin" for row in rows)
    model = Resumed(None, is_expandable, addresses=lambda _: given.pop() if given else next(nowhere))
    blocks = model.begin_with(rows)
    changes = [GROWS[row[0]] * row[2] for row in rows if row[0] in GROWS]
    peak = max(accumulate(changes, initial=model.reserved_bytes))
    same = []
    for previous, (action, address, *rest) in pairwise([("",), *rows]):
        if action == "new":
            given.append(address)
        elif action == "released" and previous[0] != "released":
            model.release()
        elif action == "alloc":
            block = blocks[address] = model.malloc(*rest)
            # A segment that the model does not take is a difference, too.
            same.append(not given and (block is None or block.address == address))
            given.clear()
        elif action == "free" and address in blocks:
            model.free(blocks.pop(address))
    segments = sum(change > 0 for change in changes)
    return Outcome(len(same), sum(same), segments, peak, model.peak_reserved_bytes)


def by_age(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield a recording with addresses in the order of its segments' age.

    Of free blocks of one size torch 2.13 takes that of the oldest segment, and 2.11 the lowest.
    """
    moved: dict[int, tuple[int, int]] = {}
    """End of each segment, and the difference of its addresses."""
    for number, (kind, address, *rest) in enumerate(rows):
        if kind in ("segment", "new"):
            moved[address] = (address + rest[0], (number << 40) - address)
        start = max(start for start, (end, _) in moved.items() if start <= address < end)
        yield (kind, address + moved[start][1], *rest)
        if kind == "released":
            del moved[address]


def replays_of(recordings: Iterable[Sequence[Row]]) -> list[Outcome]:
    """Replay recordings, in whichever order of segments they agree with the model."""
    outcomes = []
    for rows in recordings:
        outcome = replayed(rows)
        if not outcome.agrees and not any(row[0] == "begin" for row in rows):
            outcome = max(outcome, replayed([*by_age(rows)]), key=lambda replay: (replay.agrees, replay.same))
        outcomes.append(outcome)
    return outcomes


def read_any(path: Path) -> Iterable[Sequence[Row]]:
    """Return a recording in its reduced form, or those of a snapshot that can be replayed."""
    return [read(path)] if path.name.endswith(".csv.gz") else rows_of(load_snapshot(path))
