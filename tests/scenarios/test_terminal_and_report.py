"""The table of an estimate on a narrow terminal."""

from __future__ import annotations

import io

import msgspec

from autobatch.estimates.estimator import estimate_limits
from autobatch.report.terminal import Terminal
from tests.support.options import as_options
from tests.support.step_workloads import WORKLOADS


def test_no_figure_is_cut_off_on_a_narrow_terminal(tmp_path):
    options = as_options("estimate", profile=["rtx-3060-12gb", "t4"], max_micro_batch=4)
    found = estimate_limits(WORKLOADS["perceptron"](), options, home=tmp_path)
    wide = {"micro_batch": 12_345_678, "micro_batch_low": 11_345_678, "micro_batch_high": 13_345_678}
    rows = [msgspec.structs.replace(one, **wide) for one in found.estimates]
    text = io.StringIO()
    Terminal(text).estimated(msgspec.structs.replace(found, estimates=rows))
    assert "…" not in text.getvalue()
    assert text.getvalue().count("12,345,678  11,345,678 to 13,345,678") == 2
