"""Conversion between bytes and text; the only module that knows KiB from KB."""

from __future__ import annotations

import re
from fractions import Fraction

from autobatch.core.errors import InputError
from autobatch.core.text import quoted

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30
TiB = 1 << 40
_UNITS = {
    "": 1, "b": 1,
    "k": KiB, "kib": KiB, "kb": 10**3,
    "m": MiB, "mib": MiB, "mb": 10**6,
    "g": GiB, "gib": GiB, "gb": 10**9,
    "t": TiB, "tib": TiB, "tb": 10**12,
}  # fmt: skip
_QUANTITY = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?|\.[0-9]{1,30})\s*([A-Za-z]*)\s*")
_DURATION = re.compile(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(min|h)\s*")
_PERCENT = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*%\s*")


def significant(number: float, digits: int = 3) -> str:
    """Write a number with a few significant digits, a large one as a whole number: ``1.75``, ``15,600``."""
    # A number that rounding carries to 10 ** digits is a large one too: 999.7 is not 1e+03.
    return f"{number:,.{digits}g}" if abs(number) < 10**digits - 0.5 else f"{number:,.0f}"


def parse_bytes(text: str | int) -> int:
    """Parse a size in bytes: ``"6GiB"``, ``"512 MiB"``, ``"1.5GB"``, ``"4096"`` or an ``int``.

    A single letter means the binary unit, as in most tools (``6G`` is 6 GiB).

    Raises:
        InputError: the text is not a size, or the size is not positive.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        size = text
    else:
        match = _QUANTITY.fullmatch(str(text))
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise InputError(
                f"{quoted(text)} is not a size in bytes: write it like 6GiB, 512MiB, 1.5GB or 4096"
            )
        size = round(Fraction(match[1]) * unit)
    if size <= 0:
        raise InputError(f"{quoted(text)} is a size of {size} bytes: a size must be positive")
    return size


def parse_budget(text: str | int, *, whole_bytes: int) -> int:
    """Parse a memory budget in bytes: a size, or a share of ``whole_bytes`` such as ``"80%"``.

    Raises:
        InputError: the text is neither a size nor a share over 0 % and at most 100 %.
    """
    match = _PERCENT.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return parse_bytes(text)
    percent = Fraction(match[1])
    if not 0 < percent <= 100:
        raise InputError(f"{quoted(text)} is not a share of memory: write more than 0% and at most 100%")
    # At least 1 byte: a budget of 0 would be no budget.
    return max(1, int(whole_bytes * percent / 100))


def parse_duration(text: str) -> float:
    """Parse a time in seconds: ``"15min"`` or ``"1.5h"``.

    Raises:
        InputError: the text is no time, or the time is not positive.
    """
    match = _DURATION.fullmatch(text)
    seconds = float(match[1]) * (60 if match[2] == "min" else 3600) if match else 0.0
    if seconds <= 0:
        raise InputError(f"{quoted(text)} is no number of steps and no time: write it like 500, 15min or 2h")
    return seconds


def format_bytes(size: int | None) -> str:
    """Format a size in binary units with three significant figures; ``unknown`` for None."""
    if size is None:
        return "unknown"
    if abs(size) < KiB:
        return f"{size} B"
    value, names = size / KiB, ["KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= KiB - 0.5 and len(names) > 1:
        value /= KiB
        del names[0]
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{decimals}f} {names[0]}"


def format_share(share: float) -> str:
    """Return a share as a percentage: ``12.5%``, and ``0.03%`` for what would be rounded to nothing."""
    return f"{share:.1%}" if share == 0 or abs(share) >= 0.001 else f"{100 * share:.1g}%"
