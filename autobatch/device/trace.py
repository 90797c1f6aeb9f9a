"""The allocations of a session in order, their replay in an allocator, and snapshots that torch has written.

A memory snapshot, as `torch.cuda.memory._dump_snapshot` writes it, holds for each GPU the latest events of
its allocator and the segments at its end. The state at its beginning follows from both. Files of torch 2.1 to
2.15 differ in the fields of an event; those that are read here are in all of them, but for the frames, the
pools and the settings, which may be missing. No class is loaded.
"""

from __future__ import annotations

import gc
import pickle
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from autobatch.core.errors import InputError
from autobatch.core.text import error_text
from autobatch.device.allocator import Allocator, BudgetExceeded

FREE = -1
"""The size of an event that frees its block."""
OLDER = -1
"""The number of a block that is older than a recording, which only frees it."""
COMMON_POOL = (0, 0)
"""Pool of all blocks that belong to no CUDA graph and no ``torch.cuda.MemPool``."""
RELEASES = ("segment_free", "segment_unmap")
"""Entries of a program that empties the cache, as a search of cuDNN for its fastest kernel does."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The allocations and frees of a session, in order, as a meter records or a program predicts them."""

    events: tuple[tuple[int, int], ...]
    """``(block, bytes)`` for an allocation, ``(block, FREE)`` for a free. Blocks have numbers in the order of
    allocation."""
    marks: tuple[tuple[int, str], ...] = ()
    """``(number of events before, phase)``: the phase that begins there."""
    modules: tuple[tuple[int, str], ...] = ()
    """``(number of events before, dotted name)``: the module whose forward pass runs from there on, empty for
    none."""
    releases: tuple[int, ...] = ()
    """Numbers of events before each of which the program emptied the allocator's cache."""
    streams: tuple[int, ...] = ()
    """The number of the stream of each allocation, in order; empty if there is only one. A private pool is a
    stream of its own."""

    def phase_at(self, index: int) -> str | None:
        """Return the phase of an event; None before the first mark."""
        at = bisect_right(self.marks, index, key=lambda mark: mark[0])
        return self.marks[at - 1][1] if at else None

    def live_after(self, index: int) -> dict[int, int]:
        """Return the bytes of the blocks that are live after an event, by their numbers."""
        live: dict[int, int] = {}
        for block, size in self.events[: index + 1]:
            if size == FREE:
                del live[block]
            else:
                live[block] = size
        return live

    def canonical(self) -> Trace:
        """Return the trace of recorded events in the form that two runs of one program have in common.

        Some frees come in the order of a hash table (autocast's cache). Consecutive frees leave the same free
        blocks in any order, so sorting those between two notes changes no replay. Frees of older blocks and
        frees after the last allocation are left out: no peak depends on them.
        """
        noted = {*self.releases, *(position for position, _ in (*self.marks, *self.modules))}
        moved: dict[int, int] = {}
        events: list[tuple[int, int]] = []
        freed: list[int] = []
        for index, (block, size) in enumerate(self.events):
            if size != FREE or index in noted:
                events.extend((number, FREE) for number in sorted(freed))
                freed.clear()
                moved[index] = len(events)
            if size != FREE:
                events.append((block, size))
            elif block != OLDER:
                freed.append(block)
        while events and events[-1][1] == FREE:
            events.pop()

        def place(position: int) -> int:
            return min(moved.get(position, len(events)), len(events))

        marks = tuple((place(position), phase) for position, phase in self.marks)
        modules = {place(position): name for position, name in self.modules}  # the last at one place
        releases = tuple(map(place, self.releases))
        return Trace(tuple(events), marks, tuple(modules.items()), releases, self.streams)


def trace_of(
    entries: Iterable[Mapping[str, Any]],
    marks: Sequence[tuple[int, str]] = (),
    modules: Sequence[tuple[int, str]] = (),
) -> Trace:
    """Turn what the allocator recorded into a trace: a block per allocation, freed when its free completes.

    Allocations that failed are left out: their entries have no address (cuDNN catches the error and tries
    another plan, torch aten/src/ATen/native/cudnn/Conv_v8.cpp).

    Args:
        entries: Of the allocator of one GPU.
        marks: ``(allocations and frees before, phase)``.
        modules: The same for the modules that run.
    """
    numbers: dict[int, int] = {}
    """Of the live blocks, by address."""
    events: list[tuple[int, int]] = []
    releases: dict[int, None] = {}
    streams: list[int] = []
    stream_numbers: dict[object, int] = {}
    for entry in entries:
        action = entry["action"]
        if action == "alloc":
            numbers[entry["addr"]] = len(streams)
            events.append((len(streams), int(entry["size"])))
            streams.append(stream_numbers.setdefault(stream_of(entry), len(stream_numbers)))
        elif action == "free_completed":
            events.append((numbers.pop(entry["addr"], OLDER), FREE))
        elif action in RELEASES:
            releases[len(events)] = None
    recorded = Trace(tuple(events), tuple(marks), tuple(modules), tuple(releases), tuple(streams))
    return recorded.canonical()


def stream_of(entry: Mapping[str, Any]) -> tuple[int, tuple[int, ...]]:
    """Return the stream of an event of the allocator or of a segment, with its private pool."""
    pool = entry.get("pool_id") or entry.get("segment_pool_id") or COMMON_POOL
    return entry.get("stream", 0), tuple(pool)


class Replay(NamedTuple):
    """The outcome of a replay, up to the first refusal. Sizes are bytes; None if nothing is cached."""

    fits: bool
    allocated_bytes: int
    """Bytes held at the end."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    peak_at: int
    """Index of the event after which most bytes were allocated."""


def replay(trace: Trace, allocator: Allocator) -> Replay:
    """Run a trace through an allocator, up to the first refusal."""
    handles: dict[int, Any] = {}
    malloc, free = allocator.malloc, allocator.free
    peak, peak_at, fits = -1, 0, True
    releases, streams = {*trace.releases}, iter(trace.streams)
    for index, (block, size) in enumerate(trace.events):
        if index in releases:
            allocator.release()
        if size == FREE:
            free(handles.pop(block))
            continue
        try:
            handles[block] = malloc(size, next(streams, 0))
        except BudgetExceeded:
            fits = False
            break
        if allocator.allocated_bytes > peak:
            peak, peak_at = allocator.allocated_bytes, index
    return Replay(
        fits=fits,
        allocated_bytes=allocator.allocated_bytes,
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        peak_at=peak_at,
    )


Entry = Mapping[str, Any]
GROWS = {"segment_alloc": 1, "segment_map": 1} | dict.fromkeys(RELEASES, -1)


class Frame(NamedTuple):
    """A line of the program that allocated a block, or called what did."""

    file: str
    line: int
    function: str


Stack = tuple[Frame, ...]
"""Frames of an allocation, the innermost first."""
LIBRARIES = ("site-packages", "dist-packages", "/lib/python", "/torch/", "<frozen", "<string>", "?")
"""Parts of the names of files that are not the user's own."""


class OutOfMemory(NamedTuple):
    """The first request that the allocator refused. All figures are bytes."""

    asked: int
    free: int
    """Free on the GPU."""
    reserved: int


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The events of one GPU's allocator."""

    device: int
    trace: Trace
    """The events as of an empty allocator, up to the first request that was refused: first what is older than
    the recording, in the order in which it is freed."""
    stacks: Sequence[Stack]
    """Frames of each block, by its number."""
    peak_reserved_bytes: int
    older: tuple[int, int]
    """Number and bytes of the blocks that are older than the recording."""
    private_bytes: int
    """Bytes in pools of CUDA graphs at the end."""
    is_expandable: bool
    falls: bool
    """The driver put each new segment below those before it."""
    settings: str
    """``PYTORCH_ALLOC_CONF`` of the program, empty if unknown."""
    refused: OutOfMemory | None
    """None if memory did not run out."""


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
    placed = [entry["addr"] for entry in entries if entry["action"] == "segment_alloc"]
    peak, refused, refused_at = _course(entries, sum(segment["total_size"] for segment in segments))
    older, stack_of, stacks = _older(entries, segments), _interned(), list[Stack]()
    sizes = [int(block["size"]) for block in older]
    if refused_at is not None:  # as the last allocation
        entries[refused_at:] = [{**entries[refused_at], "action": "alloc", "addr": None}]

    def noted() -> Iterator[Entry]:
        """Yield the blocks that are older and then the entries, and note the stacks of all blocks."""
        for part in (older, entries):
            for at, entry in enumerate(part):
                part[at] = {}  # millions of them take a gigabyte
                if entry["action"] == "alloc":
                    if entry["size"] < 0:
                        raise ValueError(f"a block has {entry['size']} bytes")
                    stacks.append(stack_of(entry.get("frames") or ()))
                yield entry

    private = [part for part in segments if stream_of(part)[1] != COMMON_POOL]
    return Recording(
        device=device,
        trace=trace_of(noted()),
        stacks=stacks,
        peak_reserved_bytes=peak,
        older=(len(sizes), sum(sizes)),
        private_bytes=sum(segment["total_size"] for segment in private),
        is_expandable=any(segment.get("is_expandable") for segment in segments),
        falls=len(placed) > 1 and placed == sorted(placed, reverse=True),
        settings=settings,
        refused=refused,
    )


def _older(entries: Sequence[Entry], segments: Sequence[Entry]) -> list[Entry]:
    """Return the blocks that are older than the recording, as allocations: first those that it frees."""
    live, older = set[int](), list[Entry]()
    for entry in entries:
        if entry["action"] == "alloc":
            live.add(entry["addr"])
        elif entry["action"] == "free_completed" and entry["addr"] in live:
            live.remove(entry["addr"])
        elif entry["action"] == "free_completed":
            older.append({**entry, "action": "alloc", "frames": ()})
    held = [(segment, block) for segment in segments for block in segment["blocks"]]
    for segment, block in sorted(held, key=lambda pair: (pair[1]["size"], pair[1]["address"])):
        if str(block["state"]).startswith("active") and block["address"] not in live:
            made = {"action": "alloc", "addr": block["address"], "frames": block.get("frames")}
            older.append({**segment, **made, "size": block.get("requested_size") or block["size"]})
    return older


def _course(entries: Sequence[Entry], reserved_at_end: int) -> tuple[int, OutOfMemory | None, int | None]:
    """Return the peak of reserved bytes up to the first refusal, and that refusal with its place."""
    signed = (GROWS.get(entry["action"], 0) * entry["size"] for entry in entries if "size" in entry)
    reserved = peak = reserved_at_end - sum(signed)
    for at, entry in enumerate(entries):
        if entry["action"] == "oom":
            return peak, OutOfMemory(int(entry["size"]), int(entry["device_free"]), reserved), at
        if entry["action"] in GROWS:
            reserved += GROWS[entry["action"]] * entry["size"]
            peak = max(peak, reserved)
    return peak, None, None


def _interned() -> Callable[[Any], Stack]:
    """Return a function that makes the frames of events plain, and each stack once, as many share it."""
    by_identity: dict[int, tuple[Any, Stack]] = {}
    by_value: dict[Stack, Stack] = {}

    def stack_of(frames: Any) -> Stack:
        if id(frames) not in by_identity:
            stack = tuple(
                Frame(str(frame["filename"]), int(frame["line"]), str(frame["name"])) for frame in frames
            )
            # With the frames themselves, as the identity is theirs while they live.
            by_identity[id(frames)] = frames, by_value.setdefault(stack, stack)
        return by_identity[id(frames)][1]

    return stack_of


def line_of(stack: Stack) -> str:
    """Return the user's own line that allocated a block, else that of a library; empty without frames."""
    python = [frame for frame in stack if frame.file.endswith(".py") or frame.file.startswith("<")]
    own = [frame for frame in python if not any(part in frame.file for part in LIBRARIES)]
    for frame in [*own, *python]:
        return f"{frame.file.replace(chr(92), '/').rsplit('/', 1)[-1]}:{frame.line} {frame.function}"
    return ""
