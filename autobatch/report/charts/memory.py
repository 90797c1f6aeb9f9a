"""The charts of memory: peak against micro-batch, and live memory over one optimizer step."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation

from autobatch.core.records import DeviceRecord, MemoryCurve, PredictedPoint, Probe
from autobatch.core.units import format_bytes
from autobatch.report.charts.drawing import (
    Mark,
    Picture,
    Table,
    bytes_unit,
    color,
    downsample,
    draw,
    evenly_spaced,
    plain_axes,
    series,
)
from autobatch.report.facts import held_bytes
from autobatch.report.words import count, decimal, plural


class _Search(NamedTuple):
    """Results of the search, as points to draw."""

    budget: int
    answer: int
    kind: str
    fits: list[tuple[int, int]]
    """Micro-batches and their peaks in bytes."""
    fails: list[int]
    predicted: list[tuple[int, int]]

    @property
    def highest(self) -> int:
        """The largest memory to show, in bytes."""
        return max([self.budget, *(peak for _, peak in [*self.fits, *self.predicted])])

    @property
    def widest(self) -> int:
        """The largest micro-batch to show."""
        return max([1, *self.fails, *(size for size, _ in [*self.fits, *self.predicted])])


def memory_figure(
    device: DeviceRecord, probe: Probe, predicted: list[PredictedPoint] | None = None
) -> Picture | None:
    """Draw peak memory against the micro-batch: the prediction, the runs and the budget.

    Returns:
        The picture; None if there are fewer than two points to draw.
    """
    if len(probe.attempts) + len(predicted or []) < 2:
        return None
    ran = [(attempt, held_bytes(attempt)) for attempt in probe.attempts]
    search = _Search(
        budget=device.budget_bytes,
        answer=probe.micro_batch,
        kind="allocated" if all(a.peak_reserved_bytes is None for a in probe.attempts) else "reserved",
        fits=[(attempt.micro_batch, peak) for attempt, peak in ran if attempt.fits and peak is not None],
        fails=sorted({attempt.micro_batch for attempt in probe.attempts if not attempt.fits}),
        predicted=sorted((point.micro_batch, point.peak_reserved_bytes) for point in predicted or []),
    )
    title = "Peak memory by micro-batch"
    words = (
        f"{plural(sum(a.fits for a in probe.attempts), 'size')} fitted, {len(search.fails)} did not. "
        f"The result is {count(search.answer)}. The budget is {format_bytes(search.budget)}."
    )
    svg = draw("memory", title, words, partial(_paint_search, search), heights=(320, 260))
    return Picture(
        slug="memory", title=title, description=words, svg=svg, legend=_search_legend(search),
        table=attempts_table(probe),
    )  # fmt: skip


def _paint_search(search: _Search, figure: Figure, narrow: bool) -> None:
    unit, name = bytes_unit(search.highest)
    axes = plain_axes(figure, xlabel="micro-batch, samples", title=f"peak {search.kind} memory, {name}")
    budget = search.budget / unit
    axes.axhline(budget, color=color("bad"), linestyle=(0, (5, 3)), linewidth=1.4)
    axes.annotate(
        f"budget {format_bytes(search.budget)}", (0, budget), xycoords=axes.get_yaxis_transform(),
        xytext=(4, -5), textcoords="offset points", va="top", color=color("bad"),
    )  # fmt: skip
    axes.plot(*_points(search.predicted, unit), color=color("muted"), linewidth=1.4)
    axes.plot(*_points(search.fits, unit), "o", color=color("accent"), markersize=7)
    answer = [point for point in search.fits if point[0] == search.answer][-1:]
    axes.plot(
        *_points(answer, unit), "o", color=color("accent"), markersize=14, markerfacecolor="none",
        markeredgewidth=1.8,
    )  # fmt: skip
    axes.plot(
        search.fails, [budget] * len(search.fails), "x", color=color("bad"), markersize=8, markeredgewidth=2,
        transform=axes.transData + ScaledTranslation(0, 10 / 72, figure.dpi_scale_trans),
    )  # fmt: skip
    axes.set_ylim(0, 1.12 * search.highest / unit)
    axes.set_xlim(-0.02 * search.widest, 1.06 * search.widest)
    axes.xaxis.set_major_locator(MaxNLocator(4 if narrow else 8, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))


def _points(pairs: list[tuple[int, int]], unit: int) -> tuple[list[int], list[float]]:
    return [size for size, _ in pairs], [peak / unit for _, peak in pairs]


def _search_legend(search: _Search) -> list[Mark]:
    marks = []
    if search.fits:
        marks.append(Mark(role="accent", label="ran and fits", shape="dot"))
        marks.append(Mark(role="accent", label=f"result, {count(search.answer)}", shape="ring"))
    if search.fails:
        marks.append(Mark(role="bad", label="did not fit (its peak is unknown)", shape="cross"))
    if search.predicted:
        marks.append(Mark(role="muted", label="predicted"))
    return marks


def attempts_table(probe: Probe) -> Table:
    """Build the table of every size that ran, in order."""
    rows = [
        [
            count(attempt.micro_batch),
            "fits" if attempt.fits else "does not fit",
            format_bytes(attempt.peak_allocated_bytes),
            format_bytes(attempt.peak_reserved_bytes),
            decimal(attempt.seconds, 3),
            " in ".join(filter(None, (attempt.reason, attempt.phase))) or "",
        ]
        for attempt in probe.attempts
    ]
    head = ["Micro-batch", "Result", "Peak allocated", "Peak reserved", "Seconds", "Reason"]
    return Table(caption="Every size that ran, in order", head=head, rows=rows)


TABLE_ROWS = 50
DRAWN_POINTS = 380

CACHED = "cached"
"""Category of memory that the allocator holds and no tensor uses; drawn in grey."""


def memory_curve_figure(curve: MemoryCurve) -> Picture | None:
    """Draw live memory over one optimizer step, stacked by category. Return None if it is empty."""
    if not curve.positions or not curve.categories:
        return None
    totals = [sum(sizes) for sizes in zip(*curve.categories.values(), strict=True)]
    drawn, peak = downsample(totals, DRAWN_POINTS), max(totals)
    unit, name = bytes_unit(peak)

    def late(start: float) -> bool:
        """Check if a label that starts here would run out of the picture."""
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
            # On a narrow page the names of short phases would overlap, so every second one is lowered.
            drop = 13 * (number % 2) if narrow else 0
            axes.axvline(start, color=color("rule"), linewidth=1)
            axes.annotate(
                phase, (start, 1), xycoords=axes.get_xaxis_transform(), textcoords="offset points",
                xytext=(-3 if late(start) else 3, -2 - drop), ha="right" if late(start) else "left", va="top",
                color=color("muted"),
            )  # fmt: skip

    title = "Memory over one optimizer step"
    words = f"Live memory by category over the {curve.axis}s of a step. The peak is {format_bytes(peak)}."
    legend = [
        Mark(role="rule" if label == CACHED else f"series-{number % 7 + 1}", label=label, shape="block")
        for number, label in enumerate(curve.categories)
    ]
    svg = draw("memory-over-time", title, words, paint, heights=(320, 260))
    return Picture(
        slug="memory-over-time", title=title, description=words, svg=svg, legend=legend, table=_table(curve),
        note=f"The peak is {format_bytes(peak)}.",
    )  # fmt: skip


def _table(curve: MemoryCurve) -> Table:
    chosen = evenly_spaced(len(curve.positions), TABLE_ROWS)
    rows = [
        [decimal(curve.positions[at], 6), *(format_bytes(sizes[at]) for sizes in curve.categories.values())]
        for at in chosen
    ]
    return Table(
        caption=f"Live memory by category, {count(len(chosen))} of {count(len(curve.positions))} points",
        head=[curve.axis.capitalize(), *curve.categories],
        rows=rows,
    )
