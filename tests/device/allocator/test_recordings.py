"""The model of the caching allocator against recordings of real GPUs, address by address."""

from __future__ import annotations

from pathlib import Path

import pytest

from autobatch.core.units import MiB
from autobatch.device.allocator.caching import CachingAllocator
from autobatch.device.allocator.trace import FREE, Trace, replay
from benchmarks.published.recordings import read, replays_of

RECORDINGS = Path(__file__).parents[2] / "recordings"


@pytest.mark.parametrize("path", sorted(RECORDINGS.rglob("*.csv.gz")), ids=lambda path: path.name[:-7])
def test_each_block_lies_where_the_gpu_put_it(path):
    (found,) = replays_of([read(path)])
    assert found.allocations > 30
    assert found.agrees


WORKSPACE_BYTES = 32 * MiB
"""Workspace of cuBLAS on a GPU of compute capability 9.0, which one recording takes later than the others."""
SEMAPHORES_BYTES = 16


def trace_of(path: Path, *, has_workspace: bool = False) -> Trace:
    """Return the events of a recording in an empty allocator: first what is held, in the order of its frees.

    The scratch of long sums and the library's workspace are left out: not every recording of a set has them.
    """
    rows = [row for row in read(path) if row[0] in ("held", "alloc", "free")]
    held = {address: size for action, address, size in (row for row in rows if row[0] == "held")}
    kept, freed = dict(held), []
    for action, address, *_ in rows:
        if action == "free" and address in kept:
            freed.append((address, kept.pop(address)))
        elif action == "alloc":
            kept.pop(address, None)
    before = freed + sorted(kept.items(), key=lambda block: block[1])
    rows = [("alloc", *block) for block in before] + [row for row in rows if row[0] != "held"]
    # A sum takes its buffer, then its semaphores.
    sums = {at for at, row in enumerate(rows) if row[0] == "alloc" and row[2] == SEMAPHORES_BYTES}
    left_out = sums | {at - 1 for at in sums}
    if has_workspace:
        left_out.add(next(at for at, row in enumerate(rows) if row[2:] == (WORKSPACE_BYTES,)))
    number_of: dict[int, int] = {}
    events = []
    for at, (action, address, *rest) in enumerate(rows):
        if action == "alloc" and at not in left_out:
            number_of[address] = at
            events.append((at, rest[0]))
        elif action == "free" and address in number_of:
            events.append((number_of.pop(address), FREE))
    return Trace(tuple(events)).canonical()


def size_at(m: int, points: tuple[tuple[int, int], tuple[int, int]]) -> int:
    """Return the size of a block at length ``m``: by the square if that explains two lengths, else a line."""
    (first, before), (second, after) = points
    if before * second**2 == after * first**2:
        return before * m**2 // first**2
    return before + (after - before) * (m - first) // (second - first)


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("context-{}-forward", (100, 150, 200)),
        ("context-{}-step", (100, 150, 200)),
        ("decoder-xl-{}", (128, 256, 512)),
        ("decoder-small-{}-step", (128, 256, 512)),
    ],
)
def test_the_events_of_two_lengths_give_the_reserved_peak_of_the_third(name, lengths):
    paths = [RECORDINGS / f"{name.format(length)}.csv.gz" for length in lengths]
    first, second, third = (trace_of(path, has_workspace=name == "decoder-xl-{}") for path in paths)
    events = []
    for (block, before), (same_block, after) in zip(first.events, second.events, strict=True):
        assert (block, before == FREE) == (same_block, after == FREE)
        points = ((lengths[0], before), (lengths[1], after))
        events.append((block, FREE if before == FREE else size_at(lengths[2], points)))
    peaks = [replay(trace, CachingAllocator()).peak_reserved_bytes for trace in (first, second, third)]
    assert replay(Trace(tuple(events)), CachingAllocator()).peak_reserved_bytes == peaks[2]
    line = peaks[0] + (peaks[1] - peaks[0]) * (lengths[2] - lengths[0]) / (lengths[1] - lengths[0])
    assert line < 0.99 * peaks[2], "a line through the peaks would have done"


@pytest.mark.parametrize("name", ["context-200-forward", "context-200-step"])
def test_a_recording_from_the_beginning_replays_to_the_peak_of_the_gpu(name):
    path = RECORDINGS / f"{name}.csv.gz"
    peak = sum(row[2] for row in read(path) if row[0] == "new")  # nothing is released
    assert replay(trace_of(path), CachingAllocator()).peak_reserved_bytes == peak
