"""Memory snapshots, as `torch.cuda.memory._dump_snapshot` writes them, read without loading any class.

A snapshot holds, for each GPU, the latest events of its allocator and the segments at its end. The state at
its beginning follows from both. Files of torch 2.0 to 2.15 differ in the fields of an event; those that are
read here are in all of them, but for the frames, the pools and the settings, which may be missing.
"""

from __future__ import annotations

import gc
import pickle
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from autobatch.core.errors import InputError
from autobatch.core.text import error_text
from autobatch.device.allocator.trace import FREE, Trace

Entry = Mapping[str, Any]
COMMON_POOL = (0, 0)
"""Pool of all blocks that belong to no CUDA graph and no ``torch.cuda.MemPool``."""
GROWS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


class Frame(NamedTuple):
    """A line of the program that allocated a block, or called what did."""

    file: str
    line: int
    function: str


Stack = tuple[Frame, ...]
"""Frames of an allocation, the innermost first."""


class OutOfMemory(NamedTuple):
    """The first request that the allocator refused. All figures are bytes."""

    asked: int
    free: int
    """Free on the GPU."""
    reserved: int
    largest_piece: int | None
    """The largest free block of the allocator; None if the recording went on."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The events of one GPU's allocator."""

    device: int
    trace: Trace
    """The events as of an empty allocator, up to the first request that was refused: first what is older than
    the recording, in the order in which it is freed."""
    stacks: Sequence[Stack]
    """Frames of each block, by its number."""
    pools: Sequence[int]
    """Number of the stream and pool of each block, by its number."""
    peak_reserved_bytes: int
    older: tuple[int, int]
    """Number and bytes of the blocks that are older than the recording."""
    emptied: int
    """Times that the allocator gave memory back: `torch.cuda.empty_cache`, or a retry."""
    private_bytes: int
    """Bytes in pools of CUDA graphs at the end."""
    is_expandable: bool
    settings: str
    """``PYTORCH_ALLOC_CONF`` of the program, empty if unknown."""
    refused: OutOfMemory | None


class _Plain(pickle.Unpickler):
    """Reader of numbers, text, lists and dictionaries, which is all that a snapshot is made of."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse to load a class or a function.

        Raises:
            UnpicklingError: always.
        """
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no snapshot has")


def load_snapshot(path: Path) -> Any:
    """Load the content of a snapshot: numbers, text, lists and dictionaries."""
    with path.open("rb") as file:
        return _Plain(file).load()


def read_recordings(path: Path) -> list[Recording]:
    """Read the GPUs of a snapshot that have events, those that reserve most first.

    Raises:
        InputError: the file cannot be read, is no snapshot, or has no events.
    """
    collects = gc.isenabled()
    gc.disable()  # collections while millions of events are made take twice as long as all else
    try:
        content = load_snapshot(path)
        settings = str((content.get("allocator_settings") or {}).get("PYTORCH_CUDA_ALLOC_CONF") or "")
        traces, segments = content["device_traces"], content["segments"]
        recordings = [
            _read(device, entries, [part for part in segments if part.get("device", 0) == device], settings)
            for device, entries in enumerate(traces)
            if any(entry["action"] == "alloc" for entry in entries)
        ]
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    except MemoryError:
        raise InputError(f"{path} takes more memory to read than there is, or is damaged") from None
    except Exception as error:  # whatever a damaged file makes of the reader
        raise InputError(
            f"{path} is no memory snapshot of torch ({type(error).__name__}: {error_text(error)}). "
            "torch.cuda.memory._dump_snapshot and autobatch record write one"
        ) from None
    finally:
        if collects:
            gc.enable()
    if not recordings:
        raise InputError(
            f"{path} has no allocations: call torch.cuda.memory._record_memory_history() before the first "
            "step, or use autobatch record"
        )
    return sorted(recordings, key=lambda recording: -recording.peak_reserved_bytes)


def _read(device: int, entries: list[Entry], segments: Sequence[Entry], settings: str) -> Recording:
    """Read the events of one GPU."""
    signed = (GROWS.get(entry["action"], 0) * entry["size"] for entry in entries if "size" in entry)
    reserved = peak = sum(segment["total_size"] for segment in segments) - sum(signed)
    pool_of, stack_of = _Pools(segments), _Stacks()
    numbers: dict[int, int] = {}
    """Of the live blocks, by address."""
    events: list[tuple[int, int]] = []
    known: list[tuple[int, Stack]] = []
    """Pool and frames of each block, by its number."""
    older: list[tuple[int, int]] = []
    emptied, before, end, refused = 0, "", None, None
    for at, entry in enumerate(entries):
        entries[at] = {}  # millions of them take a gigabyte
        action = entry["action"]
        if action == "alloc":
            numbers[entry["addr"]] = len(known)
            events.append((len(known), _bytes(entry["size"])))
            known.append((pool_of(entry), stack_of(entry)))
        elif action == "free_completed":
            number = numbers.pop(entry["addr"], None)
            if number is None:
                number = len(known)
                older.append((number, _bytes(entry["size"])))
                known.append((pool_of(entry), ()))
            events.append((number, FREE))
        elif action in GROWS:
            reserved += GROWS[action] * entry["size"]
            peak = peak if refused else max(peak, reserved)
            emptied += GROWS[action] < 0 < GROWS.get(before, 1)
        elif action == "oom" and refused is None:
            emptied -= GROWS.get(before, 0) < 0
            refused = OutOfMemory(int(entry["size"]), int(entry["device_free"]), reserved, None)
            end = len(events)
            events.append((len(known), refused.asked))
            known.append((pool_of(entry), stack_of(entry)))
        before = action
    blocks = [(segment, block) for segment in segments for block in blocks_of(segment)]
    for segment, block in sorted(blocks, key=lambda pair: (_asked(pair[1]), pair[1]["address"])):
        if str(block["state"]).startswith("active") and block["address"] not in numbers:
            older.append((len(known), _asked(block)))
            known.append((pool_of({**segment, "addr": block["address"]}), stack_of(block)))
    if end is not None and refused is not None:
        if end + 1 == len(events):
            free = (int(block["size"]) for _, block in blocks if block["state"] == "inactive")
            refused = refused._replace(largest_piece=max(free, default=0))
        events = events[: end + 1]
    whole = [*older, *events]
    order = [number for number, size in whole if size != FREE]
    return Recording(
        device=device,
        trace=Trace(tuple(whole)).canonical(),
        stacks=[known[number][1] for number in order],
        pools=[known[number][0] for number in order],
        peak_reserved_bytes=peak,
        older=(len(older), sum(size for _, size in older)),
        emptied=emptied,
        private_bytes=sum(segment["total_size"] for segment in segments if _pool_id(segment) != COMMON_POOL),
        is_expandable=any(segment.get("is_expandable") for segment in segments),
        settings=settings,
        refused=refused,
    )


def blocks_of(segment: Entry) -> Iterator[Entry]:
    """Yield the blocks of a segment with their addresses, which torch 2.0 leaves out."""
    address = segment["address"]
    for block in segment["blocks"]:
        yield {"address": address, **block}
        address += block["size"]


def _asked(block: Entry) -> int:
    """Return the bytes that were asked for; torch 2.0 has them in the history."""
    history = block.get("history") or [{}]
    return _bytes(block.get("requested_size") or history[0].get("real_size") or block["size"])


def _bytes(size: Any) -> int:
    """Return a size; raise ValueError if it is none."""
    if int(size) < 0:
        raise ValueError(f"a block has {size} bytes")
    return int(size)


def _pool_id(segment: Entry) -> tuple[int, int]:
    return tuple(segment.get("segment_pool_id") or COMMON_POOL)


class _Pools:
    """The numbers of streams and pools; that of the first one is 0."""

    def __init__(self, segments: Sequence[Entry]) -> None:
        private = [segment for segment in segments if _pool_id(segment) != COMMON_POOL]
        self._private = sorted(
            (segment["address"], segment["total_size"], _pool_id(segment)) for segment in private
        )
        self._numbers: dict[object, int] = {}

    def __call__(self, entry: Entry) -> int:
        """Return the number of the pool of an event; torch up to 2.11 tells it of segments only."""
        pool = entry.get("pool_id") or COMMON_POOL
        if self._private and "addr" in entry:
            place = bisect_right(self._private, entry["addr"], key=lambda segment: segment[0]) - 1
            address, size, private = self._private[max(0, place)]
            pool = private if address <= entry["addr"] < address + size else pool
        return self._numbers.setdefault((entry.get("stream", 0), tuple(pool)), len(self._numbers))


class _Stacks:
    """The frames of events, each once, as many events share them."""

    def __init__(self) -> None:
        self._by_identity: dict[int, tuple[Any, Stack]] = {}
        """With the frames themselves, as the identity is theirs while they live."""
        self._by_value: dict[Stack, Stack] = {}

    def __call__(self, entry: Entry) -> Stack:
        """Return the frames of an event; empty if it has none."""
        frames = entry.get("frames") or ()
        if id(frames) not in self._by_identity:
            stack = tuple(
                Frame(str(frame["filename"]), int(frame["line"]), str(frame["name"])) for frame in frames
            )
            self._by_identity[id(frames)] = frames, self._by_value.setdefault(stack, stack)
        return self._by_identity[id(frames)][1]
