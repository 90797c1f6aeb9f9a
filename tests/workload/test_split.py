"""Splits by count: every sample once, in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autobatch.workload.order import GlobalBatch
from autobatch.workload.split import CountSplit, MicroBatchIds


@given(st.integers(1, 40), st.integers(1, 50))
def test_a_batch_splits_into_micro_batches_that_hold_every_sample_in_order(samples: int, limit: int) -> None:
    ids = list(range(100, 100 + samples))
    parts = CountSplit().parts(GlobalBatch(4, 1, ids), limit)
    assert [sample for part in parts for sample in part.ids] == ids
    assert [ids[place] for part in parts for place in part.places] == ids
    assert all(part.batch_index == 4 for part in parts)
    sizes = [len(part.ids) for part in parts]
    assert max(sizes) <= limit
    assert max(sizes) - min(sizes) <= 1
    assert len(parts) == -(-samples // limit)


def test_a_failed_micro_batch_is_halved_upwards() -> None:
    for size, half in ((1, 1), (2, 1), (7, 4)):
        assert CountSplit().halved(MicroBatchIds(0, range(size), [0] * size), 9) == half
    assert CountSplit().of_longest(9) == 9
