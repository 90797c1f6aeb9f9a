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
    "": 1, "b": 1, "%": 1,
    "k": KiB, "kib": KiB, "kb": 10**3,
    "m": MiB, "mib": MiB, "mb": 10**6,
    "g": GiB, "gib": GiB, "gb": 10**9,
    "t": TiB, "tib": TiB, "tb": 10**12,
}  # fmt: skip
_NUMBER = r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?|\.[0-9]{1,30})\s*"
_SIZE = re.compile(rf"{_NUMBER}([A-Za-z]*|%)\s*")


def significant(number: float, digits: int = 3) -> str:
    """Write a number with a few significant digits: ``1.75``, ``15,600`` as a whole number, ``2.31e+14``."""
    # A number that rounding carries to 10 ** digits is a large one too: 999.7 is not 1e+03.
    is_whole = 10**digits - 0.5 <= abs(number) < 1e9
    return f"{number:,.0f}" if is_whole else f"{number:,.{digits}g}"


def parse_budget(text: str | int, *, whole_bytes: int) -> int:
    """Parse a size in bytes (``"6GiB"``, ``"1.5GB"``, ``"4096"``, an ``int``), or a share (``"80%"``).

    A single letter means the binary unit, as in most tools (``6G`` is 6 GiB). A share is that of
    ``whole_bytes``, rounded down, and at least 1 byte.

    Raises:
        InputError: the text is neither, the size is not positive, or the share is not within 0 to 100 %.
    """
    match = _SIZE.fullmatch(str(text))
    if match is None or match[2].lower() not in _UNITS:
        raise InputError(f"{quoted(text)} is not a size in bytes: write it like 6GiB, 512MiB, 1.5GB or 4096")
    number = Fraction(match[1])
    if match[2] == "%":
        if not 0 < number <= 100:
            raise InputError(f"{quoted(text)} is not a share of memory: write more than 0% and at most 100%")
        return max(1, int(whole_bytes * number / 100))
    size = round(number * _UNITS[match[2].lower()])
    if size <= 0:
        raise InputError(f"{quoted(text)} is a size of {size} bytes: a size must be positive")
    return size


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
