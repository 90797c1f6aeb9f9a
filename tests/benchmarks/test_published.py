"""The benchmark against published measurements: recordings that differ are seen, and no row runs twice."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.published import __main__ as published
from benchmarks.published.recordings import read, read_any, replayed, replays_of
from tests.support.torch_snapshots import RECORDINGS, snapshot_of, write


def test_a_block_at_another_address_and_another_peak_are_seen() -> None:
    rows = read(RECORDINGS / "context-100-forward.csv.gz")
    assert replayed(rows).agrees
    last = max(at for at, row in enumerate(rows) if row[0] == "alloc")
    moved = [*rows[:last], ("alloc", rows[last][1] + 512, *rows[last][2:]), *rows[last + 1 :]]
    found = replayed(moved)
    assert (found.same, found.agrees) == (found.allocations - 1, False)
    first = next(at for at, row in enumerate(rows) if row[0] == "new")
    assert not replayed([*rows[:first], ("new", 1 << 45, 4 << 30), *rows[first:]]).agrees


@pytest.mark.parametrize("taken", [0, 1])
def test_of_equal_blocks_that_of_the_oldest_segment_or_the_lowest_is_taken(taken: int) -> None:
    places, size = (1 << 40, 1 << 39), 20 << 20
    rows = [(kind, place, size) for place in places for kind in ("new", "alloc")]
    rows += [*(("free", place) for place in places), ("alloc", places[taken], size)]
    (found,) = replays_of([rows])
    assert found.agrees
    assert replayed(rows).agrees == (taken == 1)


@pytest.mark.parametrize("name", ["context-200-forward", "fine-tuning", "decoder-medium-128-step"])
def test_a_snapshot_of_torch_is_replayed_like_its_reduced_form(tmp_path: Path, name: str) -> None:
    rows = read(RECORDINGS / f"{name}.csv.gz")
    snapshot = write(tmp_path / "snapshot.pickle", snapshot_of(name))
    assert replays_of(read_any(snapshot)) == [replayed(rows)]


def test_a_limit_is_judged_by_the_nearest_end_of_its_bracket() -> None:
    for failed, size, ratio in (("128", 95, 95 / 96), ("128", 96, 1), ("128", 127, 1), ("128", 160, 1.25)):
        assert math.isclose(published.off({"ran": "96", "failed": failed}, size), ratio)
    assert published.off({"ran": "96", "failed": ""}, 999) == 1
