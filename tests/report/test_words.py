"""Numbers and choices in words."""

from __future__ import annotations

import pytest

from autobatch.report.words import (
    count,
    decimal,
    knobs_in_words,
    metric_in_words,
    percent,
    plural,
    ratio_in_words,
)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, "unknown"),
        (0, "0"),
        (0.00012345, "0.0001234"),
        (1234.5, "1,234"),
        (123456.7, "123,457"),
        (2, "2"),
    ],
)
def test_decimals_have_four_significant_digits(number, text):
    assert decimal(number) == text


def test_whole_numbers_and_their_nouns():
    assert count(1234567) == "1,234,567"
    assert [plural(n, "recovery", "recoveries") for n in (0, 1, 2)] == [
        "0 recoveries", "1 recovery", "2 recoveries"
    ]  # fmt: skip
    assert plural(1, "sample") == "1 sample"


def test_shares_and_ratios_of_speeds_are_whole_percents():
    assert [percent(share) for share in (0.314, -0.02, -0.001)] == ["31 %", "-2 %", "0 %"]
    assert [ratio_in_words(ratio) for ratio in (1.31, 0.98, 1.001)] == [
        "31 % faster",
        "2 % slower",
        "as fast",
    ]


def test_only_an_accuracy_is_a_percentage():
    assert metric_in_words("accuracy", 0.9722) == "accuracy 97.22 %"
    assert metric_in_words("loss", 0.1017) == "loss 0.1017"
    assert metric_in_words("loss", None) == "loss not finite"


def test_knobs_are_named_by_what_they_do():
    chosen = {"precision": "bf16", "channels_last": True, "micro_batch_shift": 1, "loader_workers": 1}
    assert knobs_in_words(chosen) == "bf16, channels-last, micro-batch halved, 1 loader worker"
    assert knobs_in_words({"compile": "off", "pin_memory": False}) == "not compiled, no pin-memory"
