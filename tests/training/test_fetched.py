"""The micro-batches of a batch, made one by one."""

from __future__ import annotations

import torch

from autobatch.training.fetched import Fetched
from autobatch.training.phase_times import PhaseTimes
from autobatch.workload.data import load_micro_batch
from autobatch.workload.split import MicroBatchIds
from tests.support.training import make_workload

PARTS = [MicroBatchIds(0, range(2), [3, 1]), MicroBatchIds(0, range(2, 3), [7])]


def test_the_parts_are_made_in_order_and_counted() -> None:
    workload = make_workload()
    fetched = Fetched(workload, PARTS, None, PhaseTimes())
    for number, (part, (made, size)) in enumerate(zip(PARTS, fetched, strict=True), 1):
        wanted = load_micro_batch(workload, part.ids)
        assert all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True))
        assert (size, fetched.count) == (len(part.ids), number)


def test_a_feed_makes_them_and_the_wait_is_timed() -> None:
    times = PhaseTimes(lambda: 0.0)
    times.begin(1.0)
    laps: list[str] = []
    times.lap = laps.append  # type: ignore[method-assign]
    assert list(Fetched(make_workload(), PARTS, iter("ab"), times)) == [("a", 2), ("b", 1)]
    assert laps == ["data"] * 3
