"""A picture with everything that makes it readable without being seen."""

from __future__ import annotations

from collections.abc import Sequence

from autobatch.records import Record


class Table(Record, frozen=True):
    """Rows of text under a head; the first column names the row."""

    caption: str
    head: list[str]
    rows: list[list[str]]


class Mark(Record, frozen=True):
    """One entry of a legend."""

    role: str
    """A colour of the palette."""
    label: str
    shape: str = "line"
    """``line``, ``dash``, ``dot``, ``ring``, ``cross``, ``block`` or ``triangle``."""


class Picture(Record, frozen=True):
    """A figure, what it shows in words, its legend and its data."""

    slug: str
    title: str
    description: str
    svg: str
    legend: list[Mark]
    table: Table
    note: str = ""
    """What the page says below it, where the text around it does not say it already."""


def every(length: int, limit: int) -> list[int]:
    """Choose at most ``limit`` indices of ``length``, evenly, the first and the last among them."""
    if length <= limit:
        return list(range(length))
    return sorted({round(place * (length - 1) / (limit - 1)) for place in range(limit)})


def telling(values: Sequence[float], limit: int) -> list[int]:
    """Choose about ``limit`` indices at most, leaving out what would not be seen: extremes stay."""
    if len(values) <= limit:
        return list(range(len(values)))
    kept = {0, len(values) - 1}
    size = -(-len(values) * 2 // limit)
    for start in range(0, len(values), size):
        bucket = range(start, min(start + size, len(values)))
        kept |= {min(bucket, key=values.__getitem__), max(bucket, key=values.__getitem__)}
    return sorted(kept)
