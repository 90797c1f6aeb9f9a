"""The charts of samples of different sizes."""

from __future__ import annotations

import msgspec

from autobatch.core.records.plan import SizeCut
from autobatch.core.records.probe import LengthLimit
from autobatch.report.charts.sizes import lengths_figure, padding_figure
from autobatch.report.sentences import padding_in_words

CUT = SizeCut(
    sizes=[10.0, 60.0], micro_batches=[80, 15], limits_by="replay", padding_by_count=1.88, padding=1.09,
    steps_by_count=15.0, steps=11.625, expected_speedup=1.62, replayed_batches=300,
)  # fmt: skip


def test_the_padding_is_shown_before_and_after() -> None:
    picture = padding_figure(CUT)
    assert picture is not None
    assert picture.table.rows == [["by count", "1", "0.88", "15.0"], ["by size", "1", "0.09", "11.6"]]
    assert picture.description.startswith("Split by count, 1.88 elements")
    assert "1.88</text>" in picture.svg
    assert padding_figure(SizeCut(sizes=[1.0], micro_batches=[1], limits_by="longest")) is None


def test_the_saving_is_told_in_words_as_far_as_it_is_known() -> None:
    words = padding_in_words(CUT)
    assert "1.09 are computed" in words
    assert "1 ÷ 1.62 of the time" in words
    assert "300 batches of the run fits" in words
    unknown = msgspec.structs.replace(CUT, expected_speedup=None, replayed_batches=None)
    assert "time" not in padding_in_words(unknown)
    assert padding_in_words(msgspec.structs.replace(CUT, padding=None)).startswith("Each batch is sorted")


def test_the_limits_are_shown_for_each_size() -> None:
    lengths = [
        LengthLimit(size=size, micro_batch=limit, upper_bound_by="replay")
        for size, limit in ((10.0, 80), (60.0, 15))
    ]
    picture = lengths_figure(lengths)
    assert picture is not None
    assert picture.table.rows == [["10", "80", "800"], ["60", "15", "900"]]
    assert picture.description == "80 samples of a size up to 10 fit, and 15 of the largest, 60."
    assert lengths_figure(lengths[:1]) is None
