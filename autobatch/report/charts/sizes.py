"""Charts of samples of different sizes: the padding of a split, and the limit for each size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

from matplotlib.figure import Figure

from autobatch.core.records.plan import SizeCut
from autobatch.core.records.probe import LengthLimit
from autobatch.report.charts.drawing import Mark, Picture, Table, color, draw, plain_axes
from autobatch.report.words import count, decimal


def padding_figure(cut: SizeCut) -> Picture | None:
    """Draw what is computed for each real element, padding included, by count and by size.

    Returns:
        The picture; None if the padding is unknown.
    """
    if cut.padding is None or cut.padding_by_count is None:
        return None
    rows = [("by count", cut.padding_by_count, cut.steps_by_count), ("by size", cut.padding, cut.steps)]
    title = "Padded and real"
    words = (
        f"Split by count, {cut.padding_by_count:.2f} elements are computed for each real one. Split by size, "
        f"{cut.padding:.2f} are."
    )
    table = Table(
        caption="Elements computed for each real one, as a mean over batches of the run",
        head=["Split", "Real", "Padding", "Micro-batches of a batch"],
        rows=[
            [name, "1", f"{ratio - 1:.2f}", "unknown" if steps is None else f"{steps:.1f}"]
            for name, ratio, steps in rows
        ],
    )
    ratios = [(name, ratio) for name, ratio, _ in rows]
    svg = draw("padding", title, words, partial(_paint_padding, ratios), heights=(150, 150))
    legend = [
        Mark(role="accent", label="real", shape="block"),
        Mark(role="muted", label="padding", shape="block"),
    ]
    return Picture(slug="padding", title=title, description=words, svg=svg, legend=legend, table=table)


def lengths_figure(lengths: Sequence[LengthLimit], unit: Literal["tokens"] | None = None) -> Picture | None:
    """Draw the largest micro-batch over the size of its samples; None for fewer than two sizes."""
    if len(lengths) < 2:
        return None
    title = "Largest micro-batch by size"
    first, last = lengths[0], lengths[-1]
    words = (
        f"{count(first.micro_batch)} samples of a size up to {decimal(first.size)} fit, and "
        f"{count(last.micro_batch)} of the largest, {decimal(last.size)}."
    )
    table = Table(
        caption="Largest micro-batch of samples up to a size",
        head=lengths_head(unit),
        rows=[
            [decimal(one.size), count(one.micro_batch), decimal(one.size * one.micro_batch, 6)]
            for one in lengths
        ],
    )
    svg = draw("lengths", title, words, partial(_paint_lengths, list(lengths)), heights=(240, 220))
    legend = [Mark(role="accent", label="largest micro-batch")]
    return Picture(slug="lengths", title=title, description=words, svg=svg, legend=legend, table=table)


def lengths_head(unit: Literal["tokens"] | None) -> list[str]:
    """Return the headings of a table of limits by size."""
    if unit == "tokens":
        return ["Tokens", "Micro-batch", "Tokens per micro-batch"]
    return ["Size", "Micro-batch", "Size × micro-batch"]


def _paint_padding(rows: list[tuple[str, float]], figure: Figure, narrow: bool) -> None:
    del narrow
    axes = plain_axes(figure, xlabel="elements computed for each real one")
    axes.grid(visible=False)
    for row, (_, ratio) in enumerate(rows):
        axes.barh(row, 1.0, height=0.6, color=color("accent"))
        axes.barh(row, ratio - 1, left=1.0, height=0.6, color=color("muted"))
        axes.text(ratio, row, f" {ratio:.2f}", va="center")
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.12 * max(ratio for _, ratio in rows))
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])


def _paint_lengths(lengths: list[LengthLimit], figure: Figure, narrow: bool) -> None:
    del narrow
    axes = plain_axes(figure, xlabel="size of the samples", title="micro-batch")
    sizes, limits = [one.size for one in lengths], [one.micro_batch for one in lengths]
    # Each limit holds for all sizes down to the one before.
    axes.step(sizes, limits, where="pre", color=color("accent"))
    axes.plot(sizes, limits, linestyle="none", marker="o", markersize=4, color=color("accent"))
    axes.set_ylim(bottom=0)
