"""Foreign text is shown, never obeyed."""

from __future__ import annotations

import pytest

from autobatch import DoesNotFitError, InputError
from autobatch.core.progress import Broadcast
from autobatch.core.text import printable
from tests.support.planted import PLANTED
from tests.support.probes import Listener


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("3 × 4 – naïve 日本", "3 × 4 – naïve 日本"),
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("\x9b2J", r"\x9b2J"),
        ("one\ntwo\r\tthree", r"one\ntwo\r\tthree"),
        ("a\u202ecba", r"a\u202ecba"),
        ("a\u2028b", r"a\u2028b"),
        ("bad \udcff byte", r"bad \udcff byte"),
        ("a\xa0b", "a\xa0b"),
        ("nul\0", r"nul\x00"),
    ],
)
def test_what_a_terminal_would_obey_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
    shown.encode()


def test_errors_their_notes_and_remarks_show_foreign_text_harmlessly() -> None:
    for kind in (InputError, DoesNotFitError):
        error = kind(f"found {PLANTED}")
        error.add_note(f"one {PLANTED}\ntwo")
        assert str(error).isprintable()
        assert all(line.isprintable() for line in error.__notes__[0].split("\n"))
        assert len(error.__notes__[0].split("\n")) == 3, "the lines of a traceback stay lines"
    listener = Listener()
    Broadcast([listener]).note(PLANTED)
    assert listener.notes == [" ".join(printable(PLANTED.replace("\r\n", " ")).split())]


def test_a_long_text_loses_its_middle_and_keeps_both_ends() -> None:
    text = "head" + "x" * 100_000 + "tail"
    short = printable(text)
    assert len(short) == 2000
    assert short.startswith("head")
    assert short.endswith("tail")
    assert " … " in short
    assert printable(text, limit=None) == text
    assert len(printable("\x1b" * 5000, limit=100)) == 100
