"""Recordings of real GPUs at two sizes, fitted and replayed at a third, against that recording."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from autobatch.device.allocator.caching import AllocatorConfig, CachingAllocator
from autobatch.device.allocator.trace import FREE, Trace, replay
from autobatch.footprint.alignment import Sized, align
from benchmarks.published.recordings import Row, read

RECORDINGS = Path(__file__).parents[1] / "recordings"
SETS = {
    "context-{}-forward": ((100, 150, 200), 0.0),
    "context-{}-step": ((100, 150, 200), 0.0),
    "decoder-xl-{}": ((128, 256, 512), 0.0),
    "decoder-large-{}": ((128, 256, 512), 0.002),
    "decoder-small-{}-step": ((128, 256, 512), 0.02),
}
"""Lengths of the samples, and how far the reserved peak may be off. The last two begin in the middle of a
run: the order of what was there is unknown."""


def events(rows: Sequence[Row]) -> Trace:
    """Return the blocks of a recording, after those that were there before, the smallest first."""
    before = sorted((row for row in rows if row[0] == "held"), key=lambda row: (row[2], row[1]))
    found: list[tuple[int, int]] = []
    live: dict[int, int] = {}
    for kind, address, *size in [*before, *(row for row in rows if row[0] in ("alloc", "free"))]:
        if kind != "free":
            live[address] = len(found)
            found.append((len(found), size[0]))
        elif address in live:
            found.append((live.pop(address), FREE))
    return Trace(tuple(found)).canonical()


def reserved_peak(rows: Sequence[Row]) -> int:
    """Return the most bytes in segments that the GPU had."""
    now = most = 0
    for kind, _, *size in rows:
        now += {"segment": 1, "new": 1, "released": -1}.get(kind, 0) * (size[0] if size else 0)
        most = max(most, now)
    return most


@pytest.mark.parametrize("name", SETS)
def test_two_sizes_give_the_reserved_peak_of_a_third(name: str) -> None:
    sizes, most_off = SETS[name]
    rows = [read(RECORDINGS / f"{name.format(size)}.csv.gz") for size in sizes]
    *known, third = sizes
    program = align([Sized(size, events(of)) for size, of in zip(known, rows, strict=False)]).program
    found = replay(program.at(third), CachingAllocator(None, AllocatorConfig())).peak_reserved_bytes
    assert found is not None
    first, second, real = map(reserved_peak, rows)
    assert abs(found - real) <= most_off * real
    # A straight line through the two peaks is 4 to 10 % too low.
    line = second + (second - first) * (third - known[1]) / (known[1] - known[0])
    assert 0.9 < line / real < 0.97
