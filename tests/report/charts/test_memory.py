"""The charts of memory."""

from __future__ import annotations

import msgspec

from autobatch.core.records import Attempt, MemoryCurve
from autobatch.core.units import GiB, MiB
from autobatch.report.charts.memory import attempts_table, held_bytes, memory_curve_figure, memory_figure
from tests.support.sample_run import a_device, a_memory_curve, a_probe, a_run


def an_attempt(micro_batch, *, fits=True, allocated=None, reserved=None):
    return Attempt(
        micro_batch=micro_batch,
        fits=fits,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        seconds=0.1,
    )


def test_the_search_is_described_in_words():
    picture = memory_figure(a_device(), a_probe(), a_run().predicted)
    assert picture.description == "4 sizes fitted, 2 did not. The result is 93. The budget is 6.00 GiB."
    assert [mark.label for mark in picture.legend] == [
        "ran and fits", "result, 93", "did not fit (its peak is unknown)", "predicted"
    ]  # fmt: skip


def test_every_size_that_ran_is_in_the_table():
    rows = attempts_table(a_probe()).rows
    assert [row[:2] for row in rows] == [
        ["1", "fits"], ["8", "fits"], ["64", "fits"], ["93", "fits"],
        ["94", "does not fit"], ["97", "does not fit"],
    ]  # fmt: skip
    assert rows[-1][-1] == "CUDA out of memory. Tried to allocate 512.00 MiB in backward"


def test_nothing_to_draw_gives_no_picture():
    assert memory_figure(a_device(), msgspec.structs.replace(a_probe(), attempts=[])) is None
    assert memory_curve_figure(MemoryCurve(positions=[], categories={})) is None


def test_reserved_bytes_count_against_the_budget_if_the_allocator_reserves():
    assert held_bytes(an_attempt(1, allocated=1, reserved=2)) == 2
    assert held_bytes(an_attempt(1, allocated=1)) == 1
    assert held_bytes(an_attempt(1)) is None


def test_unknown_peaks_and_nothing_that_fits():
    attempts = [an_attempt(1), an_attempt(2, allocated=MiB), an_attempt(3, fits=False)]
    probe = msgspec.structs.replace(a_probe(), attempts=attempts)
    picture = memory_figure(a_device(), probe)
    assert "peak allocated memory, GiB</text>" in picture.svg
    assert [row[2:4] for row in picture.table.rows] == [
        ["unknown", "unknown"],
        ["1.00 MiB", "unknown"],
        ["unknown", "unknown"],
    ]
    one = msgspec.structs.replace(probe, attempts=attempts[:1])
    assert memory_figure(a_device(), one) is None, "a single dot says nothing"
    failed = msgspec.structs.replace(probe, attempts=2 * attempts[2:])
    assert [mark.label for mark in memory_figure(a_device(), failed).legend] == [
        "did not fit (its peak is unknown)"
    ]


def test_a_memory_curve_of_any_length_is_drawn():
    curve = MemoryCurve(positions=[0.0], categories={"parameters": [0]})
    assert memory_curve_figure(curve).table.rows == [["0", "0 B"]]
    long = MemoryCurve(
        positions=[float(at) for at in range(20_000)], categories={"a": [at % 7 for at in range(20_000)]}
    )
    assert len(memory_curve_figure(long).svg) < 100_000
    assert memory_curve_figure(a_memory_curve()).note == "The peak is 4.98 GiB."


def test_cached_memory_is_grey_and_categories_are_stacked():
    curve = MemoryCurve(positions=[0.0, 1.0], categories={"parameters": [GiB, GiB], "cached": [0, 2 * GiB]})
    picture = memory_curve_figure(curve)
    assert [(mark.label, mark.role) for mark in picture.legend] == [
        ("parameters", "series-1"),
        ("cached", "rule"),
    ]
    assert picture.note == "The peak is 3.00 GiB."
