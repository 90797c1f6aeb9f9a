"""The chart of learning rates, and the table of the runs that decided."""

from __future__ import annotations

import msgspec

from autobatch.report.charts.rates import pairs_table, rates_figure
from tests.support.sample_run import some_rates


def test_no_trials_give_no_picture():
    assert rates_figure(msgspec.structs.replace(some_rates(), history=[])) is None


def test_learning_rates_use_a_logarithmic_axis_with_plain_numbers():
    picture = rates_figure(some_rates())
    assert [row[0] for row in picture.table.rows] == ["1", "2", "3", "4", "5", "6"]
    assert "0.0001</text>" in picture.svg
    assert "mathdefault" not in picture.svg
    assert [mark.label for mark in picture.legend] == [
        "run", "chosen, 0.0009", "default, 0.0003", "diverged or stopped early"
    ]  # fmt: skip
    assert [row[2] for row in picture.table.rows] == ["1.31", "1.12", "1.9", "not finite", "2.2", "1.1"]


def test_a_single_learning_rate_has_an_axis_too():
    found = some_rates()
    picture = rates_figure(msgspec.structs.replace(found, history=found.history[:1]))
    assert "0.0003" in picture.svg or "0.0001" in picture.svg


def test_the_deciding_runs_are_in_a_table():
    found = some_rates()
    table = pairs_table(found)
    assert table.rows == [["0", "1.31", "1.1", "+15.0%"], ["1", "1.32", "1.111", "+15.0%"],
                          ["2", "1.33", "1.122", "+15.0%"]]  # fmt: skip
    lost = msgspec.structs.replace(found.pairs[0], other_loss=None, gain=-1.0)
    assert pairs_table(msgspec.structs.replace(found, pairs=[lost])).rows == [
        ["0", "1.31", "not finite", "-100.0%"]
    ]
