"""The figures of the search and of the plan."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation

from autobatch.planning import micro_batches, rank_share
from autobatch.records import Attempt, DeviceRecord, Plan, Probe
from autobatch.report.data import PredictedPoint
from autobatch.report.picture import Mark, Picture, Table
from autobatch.report.svg import bytes_unit, color, draw, plain_axes
from autobatch.report.verdict import count, decimal, many
from autobatch.units import format_bytes

SHOWN_RANKS = 8
THINNEST = 3.0
"""Micro-batches narrower than this, in CSS pixels, are drawn as one block."""


def memory_figure(
    device: DeviceRecord, probe: Probe, predicted: list[PredictedPoint] | None = None
) -> Picture | None:
    """Draw peak memory against the micro-batch: what was predicted, what ran, and the budget.

    Returns:
        The picture; ``None`` where no size ran.
    """
    if not probe.attempts:
        return None
    line = sorted((point.micro_batch, point.peak_reserved_bytes) for point in predicted or [])
    kind = "allocated" if all(a.peak_reserved_bytes is None for a in probe.attempts) else "reserved"
    ran = [(attempt, held_bytes(attempt)) for attempt in probe.attempts]
    fits = [(attempt.micro_batch, peak) for attempt, peak in ran if attempt.fits and peak is not None]
    fails = sorted({attempt.micro_batch for attempt, _ in ran if not attempt.fits})
    unit, name = bytes_unit(max([device.budget_bytes, *(peak for _, peak in [*fits, *line])]))

    def paint(figure: Figure, narrow: bool) -> None:
        axes = plain_axes(figure, xlabel="micro-batch, samples", title=f"peak {kind} memory, {name}")
        budget = device.budget_bytes / unit
        axes.axhline(budget, color=color("bad"), linestyle=(0, (5, 3)), linewidth=1.4)
        axes.annotate(
            f"budget {format_bytes(device.budget_bytes)}",
            (0, budget), xycoords=axes.get_yaxis_transform(), xytext=(4, -5), textcoords="offset points",
            va="top", color=color("bad"),
        )  # fmt: skip
        if line:
            axes.plot([x for x, _ in line], [y / unit for _, y in line], color=color("muted"), linewidth=1.4)
        axes.plot([x for x, _ in fits], [y / unit for _, y in fits], "o", color=color("accent"), markersize=7)
        above = axes.transData + ScaledTranslation(0, 10 / 72, figure.dpi_scale_trans)
        axes.plot(
            fails, [budget] * len(fails), "x", color=color("bad"), markersize=8, markeredgewidth=2,
            transform=above,
        )  # fmt: skip
        best = [(x, y) for x, y in fits if x == probe.micro_batch]
        if best:
            _ring(axes, best[0][0], best[0][1] / unit)
        axes.set_ylim(0, 1.12 * max([budget, *(y / unit for _, y in [*fits, *line])]))
        widest = max([*fails, *(x for x, _ in [*fits, *line])])
        axes.set_xlim(-0.02 * widest, 1.06 * widest)
        axes.xaxis.set_major_locator(MaxNLocator(4 if narrow else 8, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5))

    title = "Peak memory by micro-batch"
    tried = (
        f"{many(len(fits), 'size')} fitted, {len(fails)} did not; {count(probe.micro_batch)} is the answer."
    )
    words = f"{tried} The budget is {format_bytes(device.budget_bytes)}."
    legend = []
    if fits:
        legend.append(Mark(role="accent", label="ran and fits", shape="dot"))
        legend.append(Mark(role="accent", label=f"the answer, {count(probe.micro_batch)}", shape="ring"))
    legend += (
        [Mark(role="bad", label="did not fit (what it needs is not known)", shape="cross")] if fails else []
    )
    legend += [Mark(role="muted", label="predicted")] if line else []
    svg = draw("memory", title, words, paint, heights=(320, 260))
    return Picture(
        slug="memory", title=title, description=words, svg=svg, legend=legend, table=attempts_table(probe)
    )


def attempts_table(probe: Probe) -> Table:
    """Put every size that ran into a table, in the order in which they ran."""
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
    head = ["Micro-batch", "Verdict", "Peak allocated", "Peak reserved", "Seconds", "Reason"]
    return Table(caption="Every size that ran, in order", head=head, rows=rows)


def plan_figure(plan: Plan) -> Picture:
    """Draw one optimizer step: a row a rank, a block a micro-batch, as wide as its samples."""
    shown = min(plan.world_size, SHOWN_RANKS)
    split = [
        micro_batches(rank_share(plan.target_batch, plan.world_size, rank), plan.micro_batch)
        for rank in range(shown)
    ]
    split[0] = plan.micro_batches or split[0]

    def paint(figure: Figure, narrow: bool) -> None:
        axes = plain_axes(figure, xlabel="samples of one optimizer step" + (", by rank" if shown > 1 else ""))
        axes.grid(visible=False)
        for row, sizes in enumerate(split):
            _blocks(axes, row, sizes, 300 if narrow else 650)
        axes.set_xlim(0, sum(split[0]))
        axes.set_ylim(shown - 0.5, -0.5)
        axes.set_yticks(range(shown), [f"rank {rank}" for rank in range(shown)] if shown > 1 else [""])
        ticks = sorted({round(sum(split[0]) * quarter / 4) for quarter in range(5)})
        axes.set_xticks(ticks, [count(tick) for tick in ticks])

    title = "One optimizer step"
    words = (
        f"{many(plan.target_batch, 'sample')} in "
        f"{many(plan.accumulation_steps, 'micro-batch', 'micro-batches')} of at most "
        f"{count(plan.micro_batch)} on {many(plan.world_size, 'rank')}."
    )
    apart = 300 / len(split[0]) > THINNEST
    label = "one micro-batch" if apart else "micro-batches, too many to be drawn apart"
    note = f"The first {shown} ranks; the others take the same, or one sample less."
    table = Table(
        caption="Samples of each micro-batch, in order"
        + ("" if shown == plan.world_size else f", first {shown} ranks"),
        head=["Rank", "Samples", "Micro-batches"],
        rows=[[str(rank), count(sum(sizes)), _runs(sizes)] for rank, sizes in enumerate(split)],
    )
    svg = draw("plan", title, words, paint, heights=(70 + 42 * shown, 70 + 34 * shown))
    return Picture(
        slug="plan", title=title, description=words, svg=svg, table=table,
        legend=[Mark(role="accent", label=label, shape="block")],
        note=note if shown < plan.world_size else "",
    )  # fmt: skip


def held_bytes(attempt: Attempt) -> int | None:
    """What is held against the budget: reserved bytes; allocated ones where no allocator reserves."""
    return (
        attempt.peak_allocated_bytes if attempt.peak_reserved_bytes is None else attempt.peak_reserved_bytes
    )


def _ring(axes: Axes, x: float, y: float) -> None:
    axes.plot(
        [x], [y], "o", color=color("accent"), markersize=14, markerfacecolor="none", markeredgewidth=1.8
    )


def _blocks(axes: Axes, row: int, sizes: list[int], pixels: int) -> None:
    """Lay the micro-batches of a rank side by side; numbers and gaps only where there is room."""
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
    """Write equal neighbours once: ``4 × 86, 8 × 85``."""
    parts: list[list[int]] = []
    for size in sizes:
        if parts and parts[-1][1] == size:
            parts[-1][0] += 1
        else:
            parts.append([1, size])
    return ", ".join(f"{times} × {count(size)}" for times, size in parts)
