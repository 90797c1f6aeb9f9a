"""The figure of the memory of one optimizer step."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from autobatch.records import MemoryCurve
from autobatch.report.picture import Mark, Picture, Table, every, telling
from autobatch.report.svg import bytes_unit, color, draw, plain_axes, series
from autobatch.report.verdict import count, decimal
from autobatch.units import format_bytes

TABLE_ROWS = 50
DRAWN_POINTS = 380
CACHED = "cached"
"""A category of what the allocator holds and no tensor uses: grey."""


def memory_curve_figure(curve: MemoryCurve) -> Picture | None:
    """Draw live memory over one optimizer step, stacked by category; ``None`` where there is nothing."""
    if not curve.positions or not curve.categories:
        return None
    totals = [sum(sizes) for sizes in zip(*curve.categories.values(), strict=True)]
    drawn, peak = telling(totals, DRAWN_POINTS), max(totals)
    unit, name = bytes_unit(peak)

    def late(start: float) -> bool:
        """Whether a word that starts there would run out of the picture."""
        return start > curve.positions[0] + 0.85 * (curve.positions[-1] - curve.positions[0])

    def paint(figure: Figure, narrow: bool) -> None:
        axes = plain_axes(figure, xlabel=curve.axis, title=f"live memory, {name}")
        layers = [[sizes[at] / unit for at in drawn] for sizes in curve.categories.values()]
        colors = [
            color("rule") if label == CACHED else series(number)
            for number, label in enumerate(curve.categories)
        ]
        axes.stackplot([curve.positions[at] for at in drawn], layers, colors=colors, linewidth=0, step="post")
        axes.margins(x=0)
        axes.set_ylim(0, (1.25 if narrow else 1.15) * max(peak, 1) / unit)
        axes.xaxis.set_major_locator(MaxNLocator(4 if narrow else 8, integer=True))
        for number, (phase, start) in enumerate(curve.phases.items()):
            # On a narrow page the names of short phases would run into one another.
            drop = 13 * (number % 2) if narrow else 0
            axes.axvline(start, color=color("rule"), linewidth=1)
            axes.annotate(
                phase, (start, 1), xycoords=axes.get_xaxis_transform(), textcoords="offset points",
                xytext=(-3 if late(start) else 3, -2 - drop), ha="right" if late(start) else "left", va="top",
                color=color("muted"),
            )  # fmt: skip

    title = "Memory over one optimizer step"
    words = f"Live memory by category over the {curve.axis}s of a step; it peaks at {format_bytes(peak)}."
    legend = [
        Mark(role="rule" if label == CACHED else f"series-{number % 7 + 1}", label=label, shape="block")
        for number, label in enumerate(curve.categories)
    ]
    svg = draw("memory-over-time", title, words, paint, heights=(320, 260))
    return Picture(
        slug="memory-over-time", title=title, description=words, svg=svg, legend=legend, table=_table(curve),
        note=f"It peaks at {format_bytes(peak)}.",
    )  # fmt: skip


def _table(curve: MemoryCurve) -> Table:
    chosen = every(len(curve.positions), TABLE_ROWS)
    rows = [
        [decimal(curve.positions[at], 6), *(format_bytes(sizes[at]) for sizes in curve.categories.values())]
        for at in chosen
    ]
    return Table(
        caption=f"Live memory by category, {count(len(chosen))} of {count(len(curve.positions))} points",
        head=[curve.axis.capitalize(), *curve.categories],
        rows=rows,
    )
