"""The model of the caching allocator against recordings of real GPUs, address by address."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.published.recordings import read, replays_of

RECORDINGS = Path(__file__).parents[1] / "recordings"


@pytest.mark.parametrize("path", sorted(RECORDINGS.rglob("*.csv.gz")), ids=lambda path: path.name[:-7])
def test_each_block_lies_where_the_gpu_put_it(path):
    (found,) = replays_of([read(path)])
    assert found.allocations > 30
    assert found.agrees
