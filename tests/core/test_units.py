"""Sizes as text and back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch import InputError
from autobatch.core.units import GiB, KiB, MiB, format_bytes, format_share, parse_budget, significant

TiB = 1024 * GiB


def parse(text: str | int) -> int:
    return parse_budget(text, whole_bytes=GiB)


UNITS = {"": 1, "B": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB, "TiB": TiB, "K": KiB, "MB": 10**6, "GB": 10**9}


@given(st.integers(1, 10**6), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]), st.booleans())
def test_a_size_is_its_number_times_its_unit(number: int, unit: str, space: str, lower: bool) -> None:
    text = f"{number}{space}{unit}"
    assert parse(text.lower() if lower else text) == number * UNITS[unit]


@given(st.integers(1, 10**15), st.sampled_from(["KiB", "MiB", "GiB", "TiB"]))
def test_fractions_are_exact_to_the_byte(thousandths: int, unit: str) -> None:
    text = f"{thousandths // 1000}.{thousandths % 1000:03d}{unit}"
    assert abs(parse(text) - thousandths * UNITS[unit] / 1000) <= max(1, thousandths * UNITS[unit] * 1e-15)


@given(st.integers(1, 2**55))
def test_a_formatted_size_reads_back_within_half_a_percent(size: int) -> None:
    text = format_bytes(size)
    assert abs(parse(text) - size) <= 0.005 * size
    if size < 1000 * TiB:
        assert len(text.split()[0].replace(".", "")) <= (3 if not text.startswith("10") else 4)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (None, "unknown"),
        (0, "0 B"),
        (1023, "1023 B"),
        (KiB, "1.00 KiB"),
        (10 * KiB - 1, "10.0 KiB"),
        (MiB - 1, "1.00 MiB"),
        (6 * MiB, "6.00 MiB"),
        (1536 * MiB, "1.50 GiB"),
        (900 * TiB, "900 TiB"),
        (5000 * TiB, "5000 TiB"),
        (-3 * GiB, "-3.00 GiB"),
    ],
)
def test_sizes_have_three_figures_and_a_binary_unit(size: int | None, text: str) -> None:
    assert format_bytes(size) == text


NO_SIZES = ["", " ", "nonsense", "6 Gibibytes", "1e9", "-1", "-1GiB", "0x10", "1,5GiB", "GiB", "6GiB7", "1."]


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (
            [*NO_SIZES, "inf", "nan", "٣GiB", "9" * 5000, "50%%", -5],
            "is not a size in bytes: write it like 6GiB",
        ),
        (["0", "0GiB", "0.0 MiB", "0.1B", 0], "a size must be positive"),
        (["0%", "0.0%", "100.01%", "120%", "9999999%"], "more than 0% and at most 100%"),
    ],
)
def test_an_invalid_size_is_refused_in_one_line_that_names_it(texts: list[Any], said: str) -> None:
    for text in texts:
        with pytest.raises(InputError, match=said) as found:
            parse(text)
        assert "\n" not in str(found.value)


@given(st.integers(1, 100), st.integers(1, 2**60))
def test_a_share_of_memory_is_rounded_down(percent: int, whole: int) -> None:
    budget = parse_budget(f"{percent}%", whole_bytes=whole)
    assert 1 <= budget <= whole
    assert budget in (whole * percent // 100, 1)
    assert parse_budget("100 %", whole_bytes=whole) == whole
    assert parse_budget(whole, whole_bytes=1) == parse_budget(str(whole), whole_bytes=1) == whole


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0.0%"), (0.0003, "0.03%"), (0.00000041, "4e-05%"), (0.125, "12.5%"), (2, "200.0%")],
)
def test_a_small_share_is_not_rounded_to_nothing(share: float, text: str) -> None:
    assert format_share(share) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(1.751, "1.75"), (999.4, "999"), (999.7, "1,000"), (15_600, "15,600"), (0.012345, "0.0123")],
)
def test_a_large_number_is_written_without_an_exponent(number: float, text: str) -> None:
    assert significant(number) == text
