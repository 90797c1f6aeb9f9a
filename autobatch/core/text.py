"""Foreign text made safe to print: one line, no control characters, a bounded length."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

LONGEST_LINE = 2000
"""Characters of a message; a terminal shows that many in 25 lines."""
LONGEST_ERROR = 500
"""Characters of an exception's text inside a message."""
LONGEST_VALUE = 120
"""Characters of a value inside a message."""
ELLIPSIS = " … "


def printable(text: object, *, limit: int | None = LONGEST_LINE) -> str:
    r"""Return text that a terminal shows as it reads: ``\x1b`` in place of the escape character.

    Control characters, line ends, invisible marks that reorder a line, and bytes that are not UTF-8 are
    escaped. The middle of a text over the limit is left out; None for no limit.
    """
    whole = cut(str(text), limit)
    if whole.isprintable():
        return whole
    shown = (
        character
        if character.isprintable() or unicodedata.category(character) == "Zs"
        else repr(character)[1:-1]
        for character in whole
    )
    return cut("".join(shown), limit)


def printable_lines(text: str, *, limit: int | None = LONGEST_LINE) -> str:
    """Return a text of several lines with each line `printable`."""
    return "\n".join(printable(line, limit=limit) for line in text.rstrip("\n").split("\n"))


def one_line(text: object, *, limit: int | None = LONGEST_LINE) -> str:
    """Return text in one line: white space becomes single spaces, and the rest is `printable`."""
    return printable(" ".join(str(text).split()), limit=limit)


def quoted(value: object) -> str:
    """Return the representation of a value, cut."""
    return printable(repr(cut(value, LONGEST_VALUE) if isinstance(value, str) else value), limit=150)


def error_text(error: BaseException, *, first_line: bool = False) -> str:
    """Return an exception's text, or its first line, as one line that is cut; empty if it has none."""
    try:
        text = str(error)
    except Exception:  # a class of the user's may fail in any way
        return ""
    return one_line(text.partition("\n")[0] if first_line else text, limit=LONGEST_ERROR)


def module_in_words(name: str) -> str:
    """Write the name of a module; that of a `torch.nn.Sequential`, a number, as a place: ``model[0]``."""
    first, dot, rest = name.partition(".")
    return f"model[{first}]{dot}{rest}" if first.isdecimal() else name


def listed(names: Sequence[str]) -> str:
    """Write names as English lists them: ``fit``, ``fit and plan``, ``fit, plan and tune``."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def cut(text: str, limit: int | None) -> str:
    """Leave out the middle of a text that is longer than ``limit``."""
    if limit is None or len(text) <= limit:
        return text
    kept = max(2, limit - len(ELLIPSIS))
    tail = kept // 3
    return f"{text[: kept - tail]}{ELLIPSIS}{text[len(text) - tail :]}"
