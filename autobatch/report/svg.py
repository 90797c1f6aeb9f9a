"""From a matplotlib figure to an inline SVG that follows the theme of its page.

Colours are drawn as stand-ins and written as CSS variables with the light colour as fallback, so that one
picture reads on light and on dark. Every picture is drawn twice, for a desk and for a phone: scaled down, its
text would be too small to read. The output is the same for the same input.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from html import escape
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from autobatch.report.palette import LIGHT
from autobatch.units import GiB, KiB, MiB, TiB

WIDE, NARROW = 720, 328
"""Widths in CSS pixels: one unit of the picture is one pixel there."""

Painter = Callable[[Figure, bool], None]
"""Draws on a figure; the flag is true for the narrow one."""


def color(role: str) -> str:
    """The stand-in by which matplotlib knows a role of the palette."""
    return f"#0a0b{list(LIGHT).index(role):02x}"


def series(number: int) -> str:
    """The stand-in of the n-th category, counted from 0; they repeat after the last."""
    names = [role for role in LIGHT if role.startswith("series-")]
    return color(names[number % len(names)])


def draw(slug: str, title: str, description: str, painter: Painter, *, heights: tuple[int, int]) -> str:
    """Draw a picture for wide and for narrow pages; style sheets show one of them.

    Args:
        slug: names the picture in ids; unique on its page.
        title: what the picture is, for those who do not see it.
        description: what it shows, likewise.
        painter: draws it.
        heights: of the wide and the narrow one, in CSS pixels.
    """
    sizes = (("wide", WIDE, heights[0]), ("narrow", NARROW, heights[1]))
    return "".join(
        _one(f"{slug}-{name}", name, title, description, painter, size=(width, height))
        for name, width, height in sizes
    )


def _one(
    slug: str, name: str, title: str, description: str, painter: Painter, *, size: tuple[int, int]
) -> str:
    with mpl.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", r"Glyph .* missing"
        )  # browsers have the font; only widths are guessed
        mpl.rcdefaults()  # a person's own matplotlibrc shall not change the report
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
    """Keep the drawing; theme, name and label it for a page."""
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
    """The unit in which an axis that ends at ``size`` bytes reads best, and its name."""
    steps = ((TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB"))
    return next(((unit, name) for unit, name in steps if size >= unit), (1, "B"))


def plain_axes(figure: Figure, *, xlabel: str = "", title: str = "") -> Axes:
    """Add one axes in the style of the report."""
    axes = figure.add_subplot()
    axes.set_xlabel(xlabel)
    axes.set_title(title)
    return axes
