"""The chart of the training run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from autobatch.core.records import StepRecord
from autobatch.report.charts.drawing import Mark, Picture, Table, color, downsample, draw, evenly_spaced
from autobatch.report.words import count, decimal, plural

TABLE_ROWS = 50
DRAWN_POINTS = 600
MARKED_EVENTS = 100
SMOOTHED_FROM = 300
"""Steps from which a noisy curve gets a smoothed line."""
NOISY = ("loss", "samples/s")


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the centred running mean over a fiftieth of the values; nothing if there are too few."""
    if len(values) < SMOOTHED_FROM:
        return []
    half = len(values) // 100
    sums = [0.0, *itertools.accumulate(values)]
    ends = [(max(0, at - half), min(len(values), at + half + 1)) for at in range(len(values))]
    return [(sums[end] - sums[start]) / (end - start) for start, end in ends]


class Curve(NamedTuple):
    """One quantity over the optimizer steps of a run."""

    label: str
    steps: list[int]
    values: list[float]


def training_figure(metrics: Sequence[StepRecord], checkpoints: Sequence[int] = ()) -> Picture | None:
    """Draw loss, learning rate and throughput over the optimizer steps, with recoveries and checkpoints.

    Args:
        metrics: one record per optimizer step; if a step ran again, its last record counts.
        checkpoints: optimizer steps after which a checkpoint was written.

    Returns:
        The picture; None if there are no records.
    """
    records = [record for _, record in sorted({record.step: record for record in metrics}.items())]
    curves = [curve for curve in _curves(records) if curve.steps]
    if not curves:
        return None
    recoveries = [record.step for record in records if record.recovered is not None]

    title = "Training"
    words = (
        f"{', '.join(curve.label for curve in curves)} over {plural(len(records), 'optimizer step')}, with "
        f"{plural(len(recoveries), 'recovery', 'recoveries')} and {plural(len(checkpoints), 'checkpoint')}."
    )
    legend = _legend(recoveries=bool(recoveries), checkpoints=bool(checkpoints))
    tall = 130 + 100 * len(curves)
    painter = partial(_paint, curves, recoveries, checkpoints)
    svg = draw("training", title, words, painter, heights=(tall, tall))
    return Picture(
        slug="training", title=title, description=words, svg=svg, legend=legend, table=_table(records)
    )


def _paint(
    curves: Sequence[Curve],
    recoveries: Sequence[int],
    checkpoints: Sequence[int],
    figure: Figure,
    narrow: bool,
) -> None:
    rows = _axes(figure, curves)
    for axes, curve in zip(rows, curves, strict=True):
        drawn = downsample(curve.values, DRAWN_POINTS)
        steps, values = [curve.steps[at] for at in drawn], [curve.values[at] for at in drawn]
        smooth = smoothed(curve.values) if curve.label in NOISY else []
        raw = color("soft") if smooth else color("accent")
        axes.plot(
            steps,
            values,
            color=raw,
            marker="o" if len(steps) == 1 or curve.label.startswith("held-out") else "",
        )
        if smooth:
            axes.plot([curve.steps[at] for at in drawn], [smooth[at] for at in drawn], color=color("accent"))
        if curve.label == "learning rate":
            axes.set_ylim(bottom=0)
        _mark(axes, checkpoints, "muted", (0, (1, 3)))
        _mark(axes, recoveries, "warn", "solid")
    if recoveries:  # the layout needs an extent, which an empty unclipped line does not have
        x = _marked(recoveries)
        rows[0].plot(
            x, [0] * len(x), "^", color=color("warn"), markersize=8, clip_on=False,
            transform=rows[0].get_xaxis_transform(),
        )  # fmt: skip
    seen = {step for curve in curves for step in curve.steps}
    if len(seen) == 1:
        rows[-1].set_xlim(min(seen) - 1, min(seen) + 1)
    rows[-1].set_xlabel("optimizer step")
    rows[-1].xaxis.set_major_locator(MaxNLocator(4 if narrow else 8, integer=True))


def _legend(*, recoveries: bool, checkpoints: bool) -> list[Mark]:
    marks = [Mark(role="accent", label="value at each optimizer step")]
    if recoveries:
        marks.append(Mark(role="warn", label="recovery from out of memory", shape="triangle"))
    if checkpoints:
        marks.append(Mark(role="muted", label="checkpoint", shape="dash"))
    return marks


def _axes(figure: Figure, curves: Sequence[Curve]) -> list[Axes]:
    """Stack one axes per curve over a shared axis of steps; the loss is the tallest."""
    tall = [2.2 if curve.label == "loss" else 1.0 for curve in curves]
    grid = figure.subplots(len(curves), sharex=True, squeeze=False, gridspec_kw={"height_ratios": tall})
    rows: list[Axes] = grid[:, 0].tolist()
    for axes, curve in zip(rows, curves, strict=True):
        axes.set_title(curve.label)
        axes.margins(x=0.02)
        axes.yaxis.set_major_locator(MaxNLocator(5 if curve.label == "loss" else 3))
    return rows


def _curves(records: Sequence[StepRecord]) -> list[Curve]:
    loss = [(record.step, record.loss) for record in records if record.loss is not None]
    speed = list(_speeds(records))
    return [
        Curve("loss", [step for step, _ in loss], [value for _, value in loss]),
        Curve("learning rate", [r.step for r in records], [r.learning_rate for r in records]),
        Curve("samples/s", [step for step, _ in speed], [value for _, value in speed]),
        *_held_out(records),
    ]


def _held_out(records: Sequence[StepRecord]) -> Iterator[Curve]:
    """Yield the held-out metrics of the validations during a run."""
    for name in dict.fromkeys(name for record in records for name in record.validation):
        known = [(r.step, value) for r in records if (value := r.validation.get(name)) is not None]
        yield Curve(f"held-out {name}", [step for step, _ in known], [value for _, value in known])


def _speeds(records: Sequence[StepRecord]) -> Iterator[tuple[int, float]]:
    """Yield the throughput of each step whose previous step is known, as that gives its own samples."""
    before: StepRecord | None = None
    for record in records:
        known = record.step == 1 or (before is not None and before.step == record.step - 1)
        own = record.samples - (before.samples if before is not None else 0)
        if known and own > 0 and record.seconds > 0:
            yield record.step, own / record.seconds
        before = record


def _marked(steps: Sequence[int]) -> list[int]:
    """Return the events to draw: all of them, or an even selection if there are too many."""
    return [steps[at] for at in evenly_spaced(len(steps), MARKED_EVENTS)]


def _mark(axes: Axes, steps: Sequence[int], role: str, style: str | tuple[int, tuple[int, ...]]) -> None:
    for step in _marked(steps):
        axes.axvline(step, color=color(role), linestyle=style, linewidth=1.1, zorder=1)


def _table(records: Sequence[StepRecord]) -> Table:
    chosen = evenly_spaced(len(records), TABLE_ROWS)
    few = f"{count(len(chosen))} of {count(len(records))}, evenly spaced"
    speeds = dict(_speeds(records))
    return Table(
        caption="Every optimizer step" if len(chosen) == len(records) else f"Optimizer steps: {few}",
        head=["Step", "Loss", "Learning rate", "Samples/s", "Micro-batch", "Event"],
        rows=[_cells(records[at], speeds.get(records[at].step)) for at in chosen],
    )


def _cells(record: StepRecord, speed: float | None) -> list[str]:
    skipped = "" if record.applied else "no optimizer step was taken"
    return [
        count(record.step),
        "" if record.loss is None else decimal(record.loss, 6),
        decimal(record.learning_rate, 6),
        "" if speed is None else decimal(speed),
        count(record.micro_batch),
        "; ".join(filter(None, (skipped, record.recovered))),
    ]
