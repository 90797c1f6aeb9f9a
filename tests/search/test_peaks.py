"""The room that the peak of an attempt leaves."""

from __future__ import annotations

import pytest

from autobatch.search.peaks import has_ample_room
from tests.support.sizes import outcome_of


@pytest.mark.parametrize(
    ("micro_batch", "peak", "ample"),
    [(2, 100, True), (2, 500, True), (2, 540, False), (300, 790, True), (300, 990, False), (1, 450, False)],
)
def test_ample_room_is_far_more_than_one_sample_more(micro_batch: int, peak: int, ample: bool) -> None:
    ran = outcome_of(micro_batch, True, peak).attempt
    assert has_ample_room(ran, 1000) is ample
    assert not has_ample_room(outcome_of(micro_batch, True, None).attempt, 1000)
