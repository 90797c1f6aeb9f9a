"""Foreign text is shown, never obeyed; sizes are read and written."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch import InputError
from autobatch.core.text import printable
from autobatch.core.units import GiB, KiB, MiB, TiB, format_bytes, parse_budget, significant
from tests.support.planted import PLANTED


def test_what_a_terminal_would_obey_is_escaped() -> None:
    shown = {
        "3 × 4 – naïve 日本": "3 × 4 – naïve 日本",
        "\x1b[31mred\x07 \x9b2J": r"\x1b[31mred\x07 \x9b2J",
        "one\ntwo\r\tthree": r"one\ntwo\r\tthree",
        "a\u202ecba\u2028": r"a\u202ecba\u2028",
        "bad \udcff byte": r"bad \udcff byte",
        "a\xa0b nul\0": "a\xa0b nul\\x00",
    }
    assert {text: printable(text) for text in shown} == shown
    short = printable("head" + "x" * 100_000 + "tail")
    assert (len(short), short[:4], short[-4:]) == (2000, "head", "tail")
    assert len(printable("\x1b" * 5000, limit=100)) == 100


def test_errors_and_their_notes_show_foreign_text_harmlessly() -> None:
    error = InputError(f"found {PLANTED}")
    error.add_note(f"one {PLANTED}\ntwo")
    assert all(line.isprintable() for line in (str(error), *error.__notes__[0].split("\n")))
    assert len(error.__notes__[0].split("\n")) == 3, "the lines of a traceback stay lines"


UNITS = {"": 1, "B": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB, "TiB": TiB, "K": KiB, "MB": 10**6, "GB": 10**9}


@given(st.integers(1, 10**9), st.sampled_from(sorted(UNITS)), st.integers(1, 100))
def test_a_size_is_its_number_times_its_unit_or_a_share(thousandths: int, unit: str, percent: int) -> None:
    text = f"{thousandths // 1000}.{thousandths % 1000:03d} {unit}"
    exact = thousandths * UNITS[unit]
    if exact >= 1000:
        assert abs(1000 * parse_budget(text.lower(), whole_bytes=GiB) - exact) <= 500
        assert abs(parse_budget(format_bytes(exact), whole_bytes=GiB) - exact) <= 0.005 * exact
    share = parse_budget(f"{percent} %", whole_bytes=thousandths)
    assert share == max(1, thousandths * percent // 100)


NO_SIZES = ["", "nonsense", "1e9", "-1GiB", "1,5GiB", "6GiB7", "1.", "inf", "٣GiB", -5, "9" * 5000, "50%%"]


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (NO_SIZES, "is not a size in bytes: write it like"),
        (["0", "0.0 MiB", "0.1B", 0], "a size must be positive"),
        (["0%", "100.01%", "9999999%"], "more than 0% and at most 100%"),
    ],
)
def test_an_invalid_size_is_refused_in_one_line_that_names_it(texts: list[Any], said: str) -> None:
    for text in texts:
        with pytest.raises(InputError, match=said) as found:
            parse_budget(text, whole_bytes=GiB)
        assert "\n" not in str(found.value)


def test_numbers_have_three_figures() -> None:
    sizes = {None: "unknown", 1023: "1023 B", 10 * KiB - 1: "10.0 KiB", MiB - 1: "1.00 MiB"}
    assert {size: format_bytes(size) for size in sizes} == sizes
    numbers = {1.751: "1.75", 999.7: "1,000", 15_600: "15,600", 0.012345: "0.0123", 2.31e14: "2.31e+14"}
    assert {number: significant(number) for number in numbers} == numbers
