"""Pictures as SVG, with the title, description, legend and data that make them accessible."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from autobatch.core.records import Record
from autobatch.core.text import error_text
from autobatch.core.units import GiB, KiB, MiB, TiB
from autobatch.report.theme import LIGHT


class Table(Record, frozen=True):
    """A table of text; the first column names the row."""

    caption: str
    head: list[str]
    rows: list[list[str]]


class Mark(Record, frozen=True):
    """One entry of a legend."""

    role: str
    """Role of its colour in the palette."""
    label: str
    shape: str = "line"
    """``line``, ``dash``, ``dot``, ``ring``, ``cross``, ``block`` or ``triangle``."""


class Picture(Record, frozen=True):
    """A chart with its description, legend and data."""

    slug: str
    title: str
    description: str
    svg: str
    legend: list[Mark]
    table: Table
    note: str = ""
    """Text below the chart; empty if the page already has it."""


def evenly_spaced(length: int, limit: int) -> list[int]:
    """Return at most ``limit`` evenly spaced indices of ``length``, including the first and the last."""
    if length <= limit:
        return list(range(length))
    return sorted({round(place * (length - 1) / (limit - 1)) for place in range(limit)})


def downsample(values: Sequence[float], limit: int) -> list[int]:
    """Return at most about ``limit`` indices, keeping the extremes of each bucket."""
    if len(values) <= limit:
        return list(range(len(values)))
    kept = {0, len(values) - 1}
    size = -(-len(values) * 2 // limit)
    for start in range(0, len(values), size):
        bucket = range(start, min(start + size, len(values)))
        kept |= {min(bucket, key=values.__getitem__), max(bucket, key=values.__getitem__)}
    return sorted(kept)


WIDE, NARROW = 720, 328
"""Widths in CSS pixels; one unit of the picture is one pixel."""
Painter = Callable[[Figure, bool], None]
"""Function that draws on a figure; the flag is true for the narrow drawing."""


def color(role: str) -> str:
    """Return the colour by which matplotlib refers to a role of the palette."""
    return f"#0a0b{list(LIGHT).index(role):02x}"


def series(number: int) -> str:
    """Return the colour of category ``number``, counted from 0; colours repeat after the last."""
    names = [role for role in LIGHT if role.startswith("series-")]
    return color(names[number % len(names)])


def draw(slug: str, title: str, description: str, painter: Painter, *, heights: tuple[int, int]) -> str:
    """Draw a picture for wide and for narrow pages; the style sheet shows one of them.

    Args:
        slug: prefix of the ids in the picture; unique on its page.
        title: title for screen readers.
        description: description for screen readers.
        painter: the function that draws it.
        heights: heights of the wide and the narrow drawing, in CSS pixels.

    Returns:
        The SVG; a note in its place if matplotlib cannot draw it, for example because a loss is 1e308.
    """
    sizes = (("wide", WIDE, heights[0]), ("narrow", NARROW, heights[1]))
    try:
        return "".join(
            _one(f"{slug}-{name}", name, title, description, painter, size=(width, height))
            for name, width, height in sizes
        )
    except Exception as error:
        reason = f"{type(error).__name__}: {error_text(error)}"
        return f"<p>The figure of {escape(title)} is left out, it cannot be drawn ({escape(reason)}).</p>"


def _one(
    slug: str, name: str, title: str, description: str, painter: Painter, *, size: tuple[int, int]
) -> str:
    with mpl.rc_context(), warnings.catch_warnings():
        # The browser has the font; a missing glyph only makes matplotlib guess its width.
        warnings.filterwarnings("ignore", r"Glyph .* missing")
        warnings.filterwarnings("ignore", category=RuntimeWarning)  # overflow in figures of 1e308
        mpl.rcdefaults()  # the user's matplotlibrc must not change the report
        mpl.rcParams.update(_style(slug, narrow=name == "narrow"))
        figure = Figure(figsize=(size[0] / 72, size[1] / 72), layout="constrained")
        painter(figure, name == "narrow")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return _finish(buffer.getvalue(), slug, name, title, description)


def _style(slug: str, *, narrow: bool) -> dict[Any, Any]:
    ink, muted, rule = color("ink"), color("muted"), color("rule")
    return {
        "svg.hashsalt": slug,
        "svg.fonttype": "none",
        "text.parse_math": False,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
        "font.size": 11 if narrow else 12,
        "axes.titlesize": 11 if narrow else 12,
        "axes.titlelocation": "left",
        "axes.titlecolor": ink,
        "text.color": ink,
        "axes.labelcolor": muted,
        "xtick.labelcolor": muted,
        "ytick.labelcolor": muted,
        "xtick.color": rule,
        "ytick.color": rule,
        "axes.edgecolor": rule,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.color": rule,
        "grid.linewidth": 1,
        "figure.constrained_layout.hspace": 0.1,
        "lines.linewidth": 1.8,
        "lines.solid_capstyle": "round",
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "axes.formatter.useoffset": False,
        "axes.formatter.limits": (-7, 9),
    }


def _finish(text: str, slug: str, name: str, title: str, description: str) -> str:
    """Turn matplotlib's SVG into an inline one: colour variables, unique ids, title and description."""
    body = text[text.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->\s*", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="([^"]+)"', rf'id="{slug}-\1"', body)
    body = re.sub(r'(href="|url\()#', rf"\1#{slug}-", body)
    body = re.sub(r"(font: (?:\w+ )*?[\d.]+px) [^;\"]+", r"\1 var(--sans, system-ui, sans-serif)", body)
    for role, light in LIGHT.items():
        body = body.replace(color(role), f"var(--{role}, {light})")
    viewbox = re.search(r'viewBox="([^"]+)"', body)
    assert viewbox is not None  # matplotlib always writes it
    head = (
        f'<svg class="{name}" viewBox="{viewbox[1]}" xmlns="http://www.w3.org/2000/svg" '
        f'xmlns:xlink="http://www.w3.org/1999/xlink" role="img" '
        f'aria-label="{escape(title)}" aria-describedby="{slug}-description">'
        f'<title>{escape(title)}</title><desc id="{slug}-description">{escape(description)}</desc>'
    )
    return head + body[body.index(">") + 1 :].strip()


def bytes_unit(size: int) -> tuple[int, str]:
    """Return the largest unit that ``size`` bytes fill, and its name."""
    steps = ((TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB"))
    return next(((unit, name) for unit, name in steps if size >= unit), (1, "B"))


def plain_axes(figure: Figure, *, xlabel: str = "", title: str = "") -> Axes:
    """Add one axes in the style of the report."""
    axes = figure.add_subplot()
    axes.set_xlabel(xlabel)
    axes.set_title(title)
    return axes
