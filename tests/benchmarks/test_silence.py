"""A cut link and a stopped rank: every rank leaves in time with a named cause, and no bit is lost."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.ranks import silence
from benchmarks.ranks.silence import Runs, disturb_hosts, stop_ranks
from tests.support.hosts import can_make_hosts

pytestmark = [pytest.mark.program, pytest.mark.distributed]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks on a busy machine leave later than those that are timed, but long before they are killed."""
    monkeypatch.setattr(silence, "TOLERANCE_S", 60.0)


def test_a_stopped_rank_is_named_in_time(tmp_path: Path) -> None:
    runs = stop_ranks(Runs(tmp_path / "stop", 60), 1, random.Random(1))
    assert not any(runs.found.values())
    assert len(runs.seen) == 1


@pytest.mark.skipif(not can_make_hosts(), reason="hosts are network namespaces, which root may make")
@pytest.mark.parametrize(("kind", "seed", "what"), [("cut", 1, "cut"), ("kill", 12, "launcher 0")])
def test_hosts_that_lose_each_other_leave_in_time_and_meet_again(
    tmp_path: Path, kind: str, seed: int, what: str
) -> None:
    runs = disturb_hosts(Runs(tmp_path / "run", 120), kind, 1, random.Random(seed))
    assert not any(runs.found.values())
    assert ([one["what"] for one in runs.seen], runs.newest) == ([what], 120)
