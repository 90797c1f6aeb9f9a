"""The charts of tuning."""

from __future__ import annotations

import msgspec

from autobatch.core.records import Trial
from autobatch.report.charts.trials import (
    comparison_figure,
    trials_figure,
)
from tests.support.sample_run import some_comparisons, some_trials


def test_nothing_to_draw_gives_no_picture():
    assert trials_figure([]) is None
    assert comparison_figure([]) is None


def test_infeasible_trials_have_no_throughput_and_many_trials_are_thinned():
    infeasible = Trial(number=0, samples_per_s=None, feasible=False, note="no")
    assert trials_figure([infeasible]) is None, "one trial says nothing"
    picture = trials_figure([infeasible] * 2)
    assert picture.table.rows == [["1", "", "", "no", "no"]] * 2
    assert picture.note == "0 trials measured, 2 infeasible."
    assert len(trials_figure(some_trials() * 40).table.rows) == 200


def test_trials_count_from_one():
    rows = trials_figure(some_trials()).table.rows
    assert [row[0] for row in rows] == [str(number) for number in range(1, 14)]
    assert rows[-1][-1] == "over the budget by 4 %"


def test_configurations_are_compared_with_the_default_by_ratio_and_interval():
    picture = comparison_figure(some_comparisons())
    assert picture.table.rows == [
        ["compiled, workers 3", "1.160", "1.090 to 1.230", "4", ""],
        ["compiled", "1.152", "1.110 to 1.200", "4", "yes"],
        ["channels-last", "0.990", "unknown", "1", ""],
    ]
    assert "compiled  15 % faster</text>" in picture.svg
    assert [mark.label for mark in picture.legend] == ["chosen"]


def test_trials_are_drawn_relative_to_the_default_with_a_mark_where_the_study_was_continued():
    picture = trials_figure(some_trials())
    assert "speed ÷ speed of the default</text>" in picture.svg
    assert picture.note == "12 trials measured, 1 infeasible. The study was continued 1 time."
    assert "continued later" in [mark.label for mark in picture.legend]
    absolute = [msgspec.structs.replace(one, relative=None, started=None) for one in some_trials()]
    assert "samples/s</text>" in trials_figure(absolute).svg


def test_dollars_and_distant_alphabets_are_not_read_as_formulas():
    odd = msgspec.structs.replace(some_comparisons()[0], changes={"precision": "$x^2$ <b> 学習率"})
    assert "$x^2$ &lt;b&gt; 学習率" in comparison_figure([odd]).svg
