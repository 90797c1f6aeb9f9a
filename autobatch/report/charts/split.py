"""The chart of the plan: one optimizer step, split into micro-batches."""

from __future__ import annotations

from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from autobatch.core.records import Plan
from autobatch.planning import micro_batches, samples_of_rank
from autobatch.report.charts.drawing import Mark, Picture, Table, color, draw, plain_axes
from autobatch.report.words import count, plural

SHOWN_RANKS = 8

THINNEST = 3.0
"""Width in CSS pixels below which micro-batches are drawn as one block."""


def plan_figure(plan: Plan) -> Picture:
    """Draw one optimizer step: one row per rank, and one block per micro-batch, as wide as its samples."""
    shown = min(plan.world_size, SHOWN_RANKS)
    split = [
        micro_batches(
            samples_of_rank(plan.target_batch, plan.world_size, rank, plan.multiple),
            plan.micro_batch,
            plan.multiple,
        )
        for rank in range(shown)
    ]
    split[0] = plan.micro_batches or split[0]

    title = "One optimizer step"
    words = (
        f"{plural(plan.target_batch, 'sample')} in "
        f"{plural(plan.accumulation_steps, 'micro-batch', 'micro-batches')} of at most "
        f"{count(plan.micro_batch)} on {plural(plan.world_size, 'rank')}."
    )
    apart = 300 / len(split[0]) > THINNEST
    label = "micro-batch" if apart else "all micro-batches (too many to draw one by one)"
    few = "" if shown == plan.world_size else f", first {shown} ranks"
    note = f"The first {shown} ranks are shown. The others take as many samples, or one less."
    table = Table(
        caption=f"Samples of each micro-batch, in order{few}",
        head=["Rank", "Samples", "Micro-batches"],
        rows=[[str(rank), count(sum(sizes)), _runs(sizes)] for rank, sizes in enumerate(split)],
    )
    svg = draw("plan", title, words, partial(_paint, split), heights=(70 + 42 * shown, 70 + 34 * shown))
    return Picture(
        slug="plan", title=title, description=words, svg=svg, table=table,
        legend=[Mark(role="accent", label=label, shape="block")],
        note=note if few else "",
    )  # fmt: skip


def _paint(split: list[list[int]], figure: Figure, narrow: bool) -> None:
    ranks, samples = len(split), sum(split[0])
    axes = plain_axes(figure, xlabel="samples of one optimizer step" + (", by rank" if ranks > 1 else ""))
    axes.grid(visible=False)
    for row, sizes in enumerate(split):
        _blocks(axes, row, sizes, 300 if narrow else 650)
    axes.set_xlim(0, samples)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)] if ranks > 1 else [""])
    ticks = sorted({round(samples * quarter / 4) for quarter in range(5)})
    axes.set_xticks(ticks, [count(tick) for tick in ticks])


def _blocks(axes: Axes, row: int, sizes: list[int], pixels: int) -> None:
    """Draw the micro-batches of a rank side by side, with numbers and gaps if there is room."""
    total, left = sum(sizes), 0
    sizes = sizes if pixels / len(sizes) > THINNEST else [total]
    gap = total / pixels / (1 if pixels / len(sizes) > 8 else 3)
    for size in sizes:
        block = Rectangle((left, row - 0.36), size - 2 * gap, 0.72, facecolor=color("accent"), linewidth=0)
        axes.add_patch(block)
        if len(sizes) > 1 and pixels * size / total > 8 + 7 * len(count(size)):
            axes.text(
                left + size / 2 - gap, row, count(size), ha="center", va="center", color=color("on-accent")
            )
        left += size


def _runs(sizes: list[int]) -> str:
    """Write runs of equal sizes once: ``4 × 86, 8 × 85``."""
    parts: list[list[int]] = []
    for size in sizes:
        if parts and parts[-1][1] == size:
            parts[-1][0] += 1
        else:
            parts.append([1, size])
    return ", ".join(f"{times} × {count(size)}" for times, size in parts)
