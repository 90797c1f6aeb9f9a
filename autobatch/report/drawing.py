"""Pictures as SVG, with the title, description and data that make them accessible."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import AutoLocator, MaxNLocator, ScalarFormatter

from autobatch.core.text import error_text
from autobatch.core.units import GiB, KiB, MiB, TiB
from autobatch.report.tables import Table

WIDE, NARROW = 720, 328
"""Widths in CSS pixels; one unit of the picture is one pixel."""


class Colors(NamedTuple):
    """One colour of the report."""

    light: str
    """On a light page."""
    dark: str
    """On a dark page."""
    either: str
    """The color for an unknown theme: readable on white and on near-black."""


PALETTE: Mapping[str, Colors] = {
    "paper": Colors("#fbfbf9", "#14181a", "transparent"),
    "surface": Colors("#f2f4f2", "#1c2225", "transparent"),
    "ink": Colors("#1b2126", "#e6eae8", "currentColor"),
    "muted": Colors("#5a656d", "#9aa6ab", "#7d7d7d"),
    "rule": Colors("#dde2df", "#2d3539", "#80808059"),
    "accent": Colors("#0b6b72", "#5cc0c4", "#0d8189"),
    "on-accent": Colors("#ffffff", "#0d1416", "#ffffff"),
    "soft": Colors("#a6cdd0", "#2c6468", "#53999e"),
    "bad": Colors("#b23a24", "#f08b73", "#cf432a"),
    "warn": Colors("#95620a", "#dcae5a", "#aa700b"),
    "series-1": Colors("#0b6b72", "#5cc0c4", "#0c7880"),
    "series-2": Colors("#69a1ab", "#35777f", "#5b97a2"),
    "series-3": Colors("#c79a4b", "#cfa257", "#ad8236"),
    "series-4": Colors("#b4c1d0", "#5b6b7d", "#5e7896"),
    "series-5": Colors("#8ba37c", "#8fae7d", "#6d865e"),
    "series-6": Colors("#b3858f", "#bd838e", "#9b606d"),
    "series-7": Colors("#8d7fb0", "#9d8fc2", "#7a69a6"),
    "layer-1": Colors("#2f5d46", "#2f6a4c", "#2c7a55"),
    "layer-2": Colors("#8fb573", "#a3c586", "#7b9550"),
    "layer-3": Colors("#4f7f3f", "#5a8d4c", "#3f7f31"),
    "layer-4": Colors("#c3d39a", "#d0deae", "#90904f"),
    "layer-5": Colors("#7d8f2e", "#8d9f40", "#6c7d1c"),
    "layer-6": Colors("#dde2b0", "#e6ebc6", "#4b8f46"),
}
"""Colours by role."""
SERIES, LAYERS = 7, 6
"""Numbers of colours for categories, and for the layers of a category."""


class Picture(NamedTuple):
    """A chart with its description and data."""

    slug: str
    title: str
    svg: str
    """The drawings for wide and for narrow pages; the style sheet shows one of them."""
    table: Table
    note: str = ""
    """Text below the chart; empty if the page already has it."""


def color(role: str) -> str:
    """Return the colour by which matplotlib refers to a role of the palette."""
    return f"#0a0b{list(PALETTE).index(role):02x}"


def series(number: int) -> str:
    """Return the colour of category ``number``, counted from 0; colours repeat after the last."""
    return color(f"series-{number % SERIES + 1}")


def layer(number: int) -> str:
    """Return the colour of part ``number`` of a category, counted from 0; colours repeat after the last."""
    return color(f"layer-{number % LAYERS + 1}")


def evenly_spaced(length: int, limit: int) -> list[int]:
    """Return at most ``limit`` evenly spaced indices of ``length``, including the first and the last."""
    if length <= limit:
        return list(range(length))
    return sorted({round(place * (length - 1) / (limit - 1)) for place in range(limit)})


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


def draw(
    slug: str,
    title: str,
    description: str,
    painter: Callable[[Figure, bool], None],
    table: Table,
    *,
    heights: tuple[int, int],
    note: str = "",
    x: Sequence[float] = (),
) -> Picture:
    """Draw a picture for wide and for narrow pages.

    If matplotlib cannot draw it, for example because a loss is 1e308, a sentence is in its place.

    Args:
        slug: prefix of the ids in the picture; unique on its page.
        title: title for screen readers.
        description: description for screen readers.
        painter: draws on a figure; the flag is true for the narrow drawing. What it labels is in the legend.
        table: the data.
        heights: heights of the wide and the narrow drawing without its legend, in CSS pixels.
        note: text below the picture.
        x: the place of each row of the table on the horizontal axis, for charts that show the row nearest to
            the pointer. A stack has its layers in the columns after the first, in order.
    """
    sizes = {"wide": (WIDE, heights[0]), "narrow": (NARROW, heights[1])}
    try:
        svg = "".join(
            _inline(_drawn(f"{slug}-{name}", painter, *size, x), slug, name, title, description)
            for name, size in sizes.items()
        )
    except Exception as error:
        reason = escape(f"{type(error).__name__}: {error_text(error)}")
        svg = f"<p>The figure of {escape(title)} is left out, it cannot be drawn ({reason}).</p>"
    return Picture(slug, title, svg, table, note)


def _drawn(
    salt: str, painter: Callable[[Figure, bool], None], width: int, height: int, places: Sequence[float]
) -> str:
    """Return the SVG file that matplotlib writes; its ids depend on the salt.

    If there are places for the pointer, the SVG has them as data, and the panels that they are on. A panel is
    its left, top, right and bottom in pixels, then its range of values from left to right and upwards.
    """
    is_narrow = width == NARROW
    with mpl.rc_context(), warnings.catch_warnings():
        # The browser has the font; a missing glyph only makes matplotlib guess its width.
        warnings.filterwarnings("ignore", r"Glyph .* missing")
        warnings.filterwarnings("ignore", category=RuntimeWarning)  # overflow in figures of 1e308
        mpl.rcdefaults()  # the user's matplotlibrc must not change the report
        mpl.rcParams.update(_style(11 if is_narrow else 12))
        mpl.rcParams["svg.hashsalt"] = salt
        figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
        painter(figure, is_narrow)
        for axes in figure.axes:
            locators = MaxNLocator(4 if is_narrow else 8, integer=True), MaxNLocator(5)
            for axis, locator in zip((axes.xaxis, axes.yaxis), locators, strict=True):
                if isinstance(axis.get_major_locator(), AutoLocator):
                    axis.set_major_locator(locator)
                if (
                    isinstance(axis.get_major_formatter(), ScalarFormatter)
                    and max(axis.get_view_interval()) >= 1000
                ):
                    axis.set_major_formatter("{x:,.0f}")
        _add_legend(figure, width, height)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    if not places:
        return buffer.getvalue()
    height = round(72 * figure.get_figheight())
    panels = []
    for axes in figure.axes:
        left, bottom, right, top = axes.get_position().extents
        edges = (left * width, (1 - top) * height, right * width, (1 - bottom) * height)
        panels.append([*edges, *axes.get_xlim(), *axes.get_ylim()])
    panels, points = ([[float(f"{edge:.6g}") for edge in row] for row in rows] for rows in (panels, [places]))
    return buffer.getvalue().replace("<svg ", f'<svg data-panels="{panels}" data-x="{points[0]}" ', 1)


def _add_legend(figure: Figure, width: int, height: int) -> None:
    """Explain below the charts what has a label, in as many columns as there is room for."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    if not found:
        return
    columns = min(len(found), max(1, width // (44 + 7 * max(map(len, found)))))
    rows = -(-len(found) // columns)
    figure.set_figheight((height + 18 * rows) / 72)
    figure.legend(list(found.values()), list(found), loc="outside lower left", ncols=columns)


def _inline(file: str, slug: str, name: str, title: str, description: str) -> str:
    """Turn an SVG file into a part of a page: colours of the palette, unique ids, title and description."""
    prefix = f"{slug}-{name}"
    body = re.sub(r"<metadata>.*?</metadata>\s*|<!--.*?-->\s*", "", file, flags=re.DOTALL)
    body = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', body)
    body = re.sub(r'(href="|url\()#', rf"\1#{prefix}-", body)
    body = re.sub(
        r"(font-family:|font: (?:\w+ )*?[\d.]+px) [^;\"]+", r"\1 var(--sans, system-ui, sans-serif)", body
    )
    # Hundredths of a pixel are enough, and a third of the size.
    body = re.sub(r' d="[^"]+"', lambda path: re.sub(r"(\.\d\d)\d+| (?=\n)", r"\1", path[0]), body)
    for role, colors in PALETTE.items():
        body = body.replace(color(role), f"var(--{role}, {colors.light})")
    start = re.search(r'<svg( data-panels="[^"]*" data-x="[^"]*")?[^>]*?(viewBox="[^"]+")[^>]*>', body)
    assert start is not None  # matplotlib always writes it
    return (
        f'<svg class="{name}" {start[2]}{start[1] or ""} xmlns="http://www.w3.org/2000/svg" '
        f'xmlns:xlink="http://www.w3.org/1999/xlink" role="img" '
        f'aria-label="{escape(title)}" aria-describedby="{prefix}-description">'
        f'<title>{escape(title)}</title><desc id="{prefix}-description">{escape(description)}</desc>'
        f"{body[start.end() :].strip()}"
    )


def _style(font_size: int) -> dict[Any, Any]:
    ink, muted, rule = color("ink"), color("muted"), color("rule")
    return {
        "svg.fonttype": "none",
        "text.parse_math": False,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
        "font.size": font_size,
        "axes.titlesize": font_size,
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
        "legend.frameon": False,
        "legend.borderpad": 0,
        "legend.borderaxespad": 0,
        "legend.columnspacing": 1.5,
        "legend.fontsize": font_size,
        "lines.linewidth": 1.8,
        "lines.solid_capstyle": "round",
        # In pixels: long runs have more points than that.
        "path.simplify_threshold": 1.0,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "axes.formatter.useoffset": False,
        "axes.formatter.limits": (-7, 9),
    }
