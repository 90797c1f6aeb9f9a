"""The micro-batches of a batch, made one by one."""

from __future__ import annotations

import torch

from autobatch.training.fetched import Fetched, Running
from autobatch.training.phase_times import PhaseTimes
from autobatch.workload.data import load_micro_batch
from autobatch.workload.split import MicroBatchIds, Split
from tests.support.training import make_workload

PARTS = [MicroBatchIds(0, range(2), [3, 1]), MicroBatchIds(0, range(2, 3), [7])]


def test_the_parts_are_made_in_order() -> None:
    workload = make_workload()
    fetched = Fetched(workload, PARTS, None, PhaseTimes())
    for part, (made, size) in zip(PARTS, fetched, strict=True):
        wanted = load_micro_batch(workload, part.ids)
        assert all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True))
        assert size == len(part.ids)


def test_a_feed_makes_them_and_the_wait_is_timed() -> None:
    times = PhaseTimes(lambda: 0.0)
    times.begin(1.0)
    laps: list[str] = []
    times.lap = laps.append  # type: ignore[method-assign]
    assert list(Fetched(make_workload(), PARTS, iter("ab"), times)) == [("a", 2), ("b", 1)]
    assert laps == ["data"] * 3


def test_the_micro_batch_that_runs_is_blamed_in_both_passes_and_the_fullest_otherwise() -> None:
    placed = [("a", 2), ("b", 1)]
    running = Running(PARTS, placed, runs_twice=True)
    seen: list[tuple[tuple[int, int], bool]] = []

    def look() -> None:
        seen.append((running.blamed(Split(), 2), running.is_in_loss))

    look()
    for _ in range(2):
        for _ in running:
            look()
        look()
    assert seen == [
        ((2, 1), False),
        ((2, 1), False),
        ((1, 1), False),
        ((2, 1), True),
        ((2, 1), False),
        ((1, 1), False),
        ((2, 1), False),
    ]
    assert Running([], [], runs_twice=True).blamed(Split(), 2) == (1, 1)


def test_one_pass_has_no_loss_after_it() -> None:
    running = Running(PARTS, [("a", 2), ("b", 1)], runs_twice=False)
    assert [size for _, size in running] == [2, 1]
    assert not running.is_in_loss
    whole = Running(PARTS[:1], [("a", 2)], runs_twice=True)
    assert next(iter(whole)) == ("a", 2)
    whole.end()
    assert not whole.is_in_loss
