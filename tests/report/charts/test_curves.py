"""The chart of the training run."""

from __future__ import annotations

import pytest

from autobatch.report.charts.curves import smoothed, training_figure
from autobatch.report.charts.drawing import downsample
from tests.support.sample_run import a_run, a_step


def test_no_records_give_no_picture():
    assert training_figure([]) is None


def test_the_run_is_described_in_words():
    run = a_run()
    picture = training_figure(run.metrics, run.checkpoints)
    assert picture.description == (
        "loss, learning rate, samples/s over 120 optimizer steps, with 1 recovery and 3 checkpoints."
    )
    assert [mark.label for mark in picture.legend] == [
        "value at each optimizer step", "recovery from out of memory", "checkpoint"
    ]  # fmt: skip


def test_long_runs_are_thinned_but_keep_their_spikes():
    records = [a_step(step, loss=9.0 if step == 7777 else 1.0) for step in range(1, 20_001)]
    picture = training_figure(records)
    assert len(picture.svg) < 150_000
    assert len(picture.table.rows) == 50
    assert picture.table.rows[0][0] == "1"
    assert picture.table.rows[-1][0] == "20,000"
    drawn = downsample([record.loss for record in records], 600)
    assert 7776 in drawn
    assert len(drawn) <= 602


def test_steps_that_ran_again_count_once_and_gaps_have_no_speed():
    records = [a_step(1, loss=5.0), a_step(2), a_step(1, loss=4.0), a_step(5, applied=False, loss=None)]
    rows = training_figure(records).table.rows
    assert [row[0] for row in rows] == ["1", "2", "5"]
    assert rows[0][1] == "4"
    assert rows[1][3] != ""
    assert rows[2][1:4:2] == ["", ""]
    assert rows[2][-1] == "no optimizer step was taken"


def test_the_speed_of_a_step_counts_its_own_samples():
    records = [a_step(1, samples=1000, seconds=2.0), a_step(2, samples=1600, seconds=3.0)]
    assert [row[3] for row in training_figure(records).table.rows] == ["500", "200"]


def test_one_step_is_drawn_as_a_point():
    assert training_figure([a_step(1)]).svg.count("<use") >= 6, "three curves, wide and narrow"


def test_a_long_noisy_curve_has_a_smoothed_line_over_it() -> None:
    flat = [1.0] * 1000
    assert smoothed(flat) == pytest.approx(flat)
    noisy = [1.0 + (-1) ** at for at in range(1000)]
    assert all(abs(value - 1.0) < 0.1 for value in smoothed(noisy)[20:-20])
    assert smoothed([1.0] * 100) == []
    few, many = (training_figure([a_step(step) for step in range(1, steps)]) for steps in (100, 1000))
    assert many.svg.count("<path") > few.svg.count("<path")
