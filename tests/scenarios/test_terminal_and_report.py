"""The terminal and the report describe the same records."""

from __future__ import annotations

import io

import msgspec
import pytest

from autobatch.core.records.run import RunRecord
from autobatch.probing.estimates.estimate import estimate_limits
from autobatch.probing.estimates.settings import EstimateSettings
from autobatch.report.sentences import headline, training_in_words
from autobatch.report.summary import describe_reached, describe_training
from autobatch.report.terminal import Terminal
from tests.support.sample_run import a_device, a_probe, a_run
from tests.support.step_workloads import WORKLOADS


@pytest.mark.parametrize(
    ("changes", "is_largest"),
    [
        ({}, True),
        ({"limited_by": "max_micro_batch", "upper_bound_by": "cap"}, False),
        ({"upper_bound_by": None, "stopped_by": "time limit"}, False),
        ({"source": "asked", "limited_by": "max_micro_batch", "upper_bound_by": "cap"}, False),
    ],
)
def test_only_the_largest_micro_batch_is_called_so(changes, is_largest):
    probe = msgspec.structs.replace(a_probe(), **changes)
    stream = io.StringIO()
    Terminal(stream).probed(probe)
    assert ("94 ran and do not" in stream.getvalue()) == is_largest
    sentence = headline(RunRecord(device=a_device(), probe=probe))
    assert ("is the largest" in sentence) == is_largest


def test_averaged_weights_and_failed_checkpoints_are_reported():
    plain = a_run().training
    averaged = msgspec.structs.replace(plain, ema=0.999, failed_checkpoints=[40, 80])
    assert describe_reached(plain) == "held-out accuracy 93.12 %"
    assert describe_reached(averaged) == "held-out accuracy 93.12 % of the averaged weights"
    changed = msgspec.structs.replace(plain, skipped_steps=1, validation={"accumulated": 7.0, "x": None})
    assert ", 1 step skipped" in describe_training(changed)
    assert describe_reached(changed) == "held-out accumulated 7, x not finite"
    assert training_in_words(averaged) == (
        training_in_words(plain) + " 2 periodic checkpoints could not be written."
        " The held-out figures are those of the averaged weights (decay 0.999)."
    )


def test_no_figure_is_cut_off_on_a_narrow_terminal(tmp_path):
    options = EstimateSettings(profiles=["rtx-3060-12gb", "t4"], max_micro_batch=4)
    found = estimate_limits(WORKLOADS["perceptron"](), options, home=tmp_path)
    wide = {"micro_batch": 12_345_678, "micro_batch_low": 11_345_678, "micro_batch_high": 13_345_678}
    rows = [msgspec.structs.replace(one, **wide) for one in found.estimates]
    text = io.StringIO()
    Terminal(text).estimated(msgspec.structs.replace(found, estimates=rows))
    assert "…" not in text.getvalue()
    assert text.getvalue().count("12,345,678  11,345,678 to 13,345,678") == 2
