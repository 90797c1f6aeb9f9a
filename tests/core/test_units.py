"""Sizes as text and back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch import InputError
from autobatch.core.units import GiB, KiB, MiB, TiB, format_bytes, format_share, parse_budget, significant

UNITS = {"": 1, "B": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB, "TiB": TiB, "K": KiB, "MB": 10**6, "GB": 10**9}


@given(st.integers(1, 10**9), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]), st.booleans())
def test_a_size_is_its_number_times_its_unit(thousandths: int, unit: str, space: str, lower: bool) -> None:
    text = f"{thousandths // 1000}.{thousandths % 1000:03d}{space}{unit}"
    exact = thousandths * UNITS[unit]
    if exact >= 1000:
        found = parse_budget(text.lower() if lower else text, whole_bytes=GiB)
        assert abs(1000 * found - exact) <= 500


@given(st.integers(1, 100), st.integers(1, 2**60))
def test_a_share_of_memory_is_rounded_down(percent: int, whole: int) -> None:
    budget = parse_budget(f"{percent} %", whole_bytes=whole)
    assert budget == max(1, whole * percent // 100)
    assert parse_budget(whole, whole_bytes=1) == parse_budget(str(whole), whole_bytes=1) == whole


NO_SIZES = ["", " ", "nonsense", "6 Gibibytes", "1e9", "-1", "-1GiB", "0x10", "1,5GiB", "GiB", "6GiB7", "1."]


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ([*NO_SIZES, "inf", "nan", "٣GiB", "9" * 5000, "50%%", -5], "is not a size in bytes: write it like"),
        (["0", "0GiB", "0.0 MiB", "0.1B", 0], "a size must be positive"),
        (["0%", "0.0%", "100.01%", "120%", "9999999%"], "more than 0% and at most 100%"),
    ],
)
def test_an_invalid_size_is_refused_in_one_line_that_names_it(texts: list[Any], said: str) -> None:
    for text in texts:
        with pytest.raises(InputError, match=said) as found:
            parse_budget(text, whole_bytes=GiB)
        assert "\n" not in str(found.value)


@given(st.integers(1, 2**55))
def test_a_formatted_size_reads_back_within_half_a_percent(size: int) -> None:
    assert abs(parse_budget(format_bytes(size), whole_bytes=GiB) - size) <= 0.005 * size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_bytes(None), "unknown"),
        (format_bytes(1023), "1023 B"),
        (format_bytes(10 * KiB - 1), "10.0 KiB"),
        (format_bytes(MiB - 1), "1.00 MiB"),
        (format_bytes(5000 * TiB), "5000 TiB"),
        (format_bytes(-3 * GiB), "-3.00 GiB"),
        (format_share(0.0), "0.0%"),
        (format_share(0.0003), "0.03%"),
        (format_share(0.125), "12.5%"),
        (significant(1.751), "1.75"),
        (significant(999.7), "1,000"),
        (significant(15_600), "15,600"),
        (significant(0.012345), "0.0123"),
    ],
)
def test_numbers_have_three_figures(text: str, expected: str) -> None:
    assert text == expected
