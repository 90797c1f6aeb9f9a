"""The charts of the report. Each is drawn from records, and has its data in a table."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation

from autobatch.core.records import (
    DeviceRecord,
    MemoryCurve,
    Plan,
    PredictedPoint,
    Probe,
    RunRecord,
    StepRecord,
    Trial,
    TrialComparison,
)
from autobatch.core.units import format_bytes
from autobatch.planning import micro_batches, samples_of_rank
from autobatch.report.drawing import (
    Picture,
    bytes_unit,
    color,
    draw,
    evenly_spaced,
    plain_axes,
    series,
)
from autobatch.report.facts import peak_bytes
from autobatch.report.tables import Table
from autobatch.report.words import count, decimal, knobs_in_words, plural, ratio_in_words

TABLE_ROWS = 50
"""Rows of a table that belongs to a picture."""
CACHED = "cached"
"""Category of memory that the allocator holds and no tensor uses; drawn in grey."""
SHOWN_RANKS = 8
MOST_BLOCKS = 100
"""Micro-batches of a rank above which they are drawn as one block."""
SMOOTHED_FROM = 300
"""Steps from which a noisy curve gets a smoothed line."""
NOISY = ("loss", "samples/s")


def memory_figure(
    device: DeviceRecord, probe: Probe, predicted: Sequence[PredictedPoint] = ()
) -> Picture | None:
    """Draw peak memory against the micro-batch: the prediction, the runs and the budget.

    Returns:
        The picture; None if there are fewer than two points to draw.
    """
    if len(probe.attempts) + len(predicted) < 2:
        return None
    kind = "allocated" if all(one.peak_reserved_bytes is None for one in probe.attempts) else "reserved"
    peaks = [(one.micro_batch, peak_bytes(one)) for one in probe.attempts if one.fits]
    fits = [(size, peak) for size, peak in peaks if peak is not None]
    fails = sorted({one.micro_batch for one in probe.attempts if not one.fits})
    line = sorted((point.micro_batch, point.peak_reserved_bytes) for point in predicted)
    highest = max([device.budget_bytes, *(peak for _, peak in [*fits, *line])])
    widest = max([1, *fails, *(size for size, _ in [*fits, *line])])
    unit, name = bytes_unit(highest)

    def paint(figure: Figure, narrow: bool) -> None:
        axes = plain_axes(figure, xlabel="micro-batch, samples", title=f"peak {kind} memory, {name}")

        def plot(points: Sequence[tuple[int, int]], style: str, label: str, **look: Any) -> None:
            if points:
                sizes, heights = [size for size, _ in points], [peak / unit for _, peak in points]
                axes.plot(sizes, heights, style, label=label, **look)

        budget = device.budget_bytes / unit
        axes.axhline(budget, color=color("bad"), linestyle=(0, (5, 3)), linewidth=1.4)
        axes.annotate(
            f"budget {format_bytes(device.budget_bytes)}", (0, budget), xycoords=axes.get_yaxis_transform(),
            xytext=(4, -5), textcoords="offset points", va="top", color=color("bad"),
        )  # fmt: skip
        plot(line, "-", "predicted", color=color("muted"), linewidth=1.4)
        plot(fits, "o", "ran and fits", color=color("accent"), markersize=7)
        answer = [point for point in fits if point[0] == probe.micro_batch][-1:]
        plot(
            answer, "o", f"result, {count(probe.micro_batch)}", color=color("accent"), markersize=14,
            markerfacecolor="none", markeredgewidth=1.8,
        )  # fmt: skip
        above = axes.transData + ScaledTranslation(0, 10 / 72, figure.dpi_scale_trans)
        plot(
            [(size, device.budget_bytes) for size in fails], "x", "did not fit (its peak is unknown)",
            color=color("bad"), markersize=8, markeredgewidth=2, transform=above,
        )  # fmt: skip
        axes.set_ylim(0, 1.12 * highest / unit)
        axes.set_xlim(-0.02 * widest, 1.06 * widest)
        axes.xaxis.set_major_locator(MaxNLocator(4 if narrow else 8, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5))

    words = (
        f"{plural(sum(one.fits for one in probe.attempts), 'size')} fitted, {len(fails)} did not. "
        f"The result is {count(probe.micro_batch)}. The budget is {format_bytes(device.budget_bytes)}."
    )
    rows = [
        [
            count(one.micro_batch),
            "fits" if one.fits else "does not fit",
            format_bytes(one.peak_allocated_bytes),
            format_bytes(one.peak_reserved_bytes),
            decimal(one.seconds, 3),
            " in ".join(filter(None, (one.reason, one.phase))),
        ]
        for one in probe.attempts
    ]
    head = ["Micro-batch", "Result", "Peak allocated", "Peak reserved", "Seconds", "Reason"]
    table = Table("Every size that ran, in order", head, rows)
    return draw("memory", "Peak memory by micro-batch", words, paint, table, heights=(320, 260))


def memory_curve_figure(curve: MemoryCurve, budget_bytes: int) -> Picture | None:
    """Draw live memory over one optimizer step, stacked by category. Return None if it is empty."""
    if not curve.positions or not curve.categories:
        return None
    peak = max(map(sum, zip(*curve.categories.values(), strict=True)))
    unit, name = bytes_unit(peak)
    # Near the right edge, the name of a phase is left of its start.
    late = curve.positions[0] + 0.85 * (curve.positions[-1] - curve.positions[0])

    def paint(figure: Figure, narrow: bool) -> None:
        axes = plain_axes(figure, xlabel=curve.axis, title=f"live memory, {name}")
        layers = [[size / unit for size in sizes] for sizes in curve.categories.values()]
        colors = [color("rule") if it == CACHED else series(n) for n, it in enumerate(curve.categories)]
        axes.stackplot(
            curve.positions, layers, colors=colors, linewidth=0, step="post", labels=list(curve.categories)
        )
        top = 1.25 * max(peak, 1) / unit
        axes.margins(x=0)
        axes.set_ylim(0, top)
        if budget_bytes / unit < top:
            axes.axhline(budget_bytes / unit, color=color("bad"), linestyle=(0, (5, 3)), label="budget")
        axes.xaxis.set_major_locator(MaxNLocator(4 if narrow else 8, integer=True))
        for number, (phase, start) in enumerate(curve.phases.items()):
            # The names of short phases would overlap, so every second one is lowered.
            drop = 13 * (number % 2)
            axes.axvline(start, color=color("rule"), linewidth=1)
            axes.annotate(
                phase, (start, 1), xycoords=axes.get_xaxis_transform(), textcoords="offset points",
                xytext=(-3 if start > late else 3, -2 - drop), ha="right" if start > late else "left",
                va="top", color=color("muted"),
            )  # fmt: skip

    chosen = evenly_spaced(len(curve.positions), TABLE_ROWS)
    table = Table(
        f"Live memory by category, {count(len(chosen))} of {count(len(curve.positions))} points",
        [curve.axis.capitalize(), *curve.categories],
        [
            [decimal(curve.positions[at], 6), *(format_bytes(of[at]) for of in curve.categories.values())]
            for at in chosen
        ],
    )
    note = f"The peak is {format_bytes(peak)}."
    words = f"Live memory by category over the {curve.axis}s of a step. {note}"
    return draw(
        "memory-over-time",
        "Memory over one optimizer step",
        words,
        paint,
        table,
        heights=(320, 260),
        note=note,
    )


def plan_figure(plan: Plan) -> Picture:
    """Draw one optimizer step: one row per rank, and one block per micro-batch, as wide as its samples."""
    shown = min(plan.world_size, SHOWN_RANKS)
    split = [one.micro_batches for one in plan.ranks[:shown]] or [
        micro_batches(
            samples_of_rank(plan.target_batch, plan.world_size, rank, plan.multiple),
            plan.micro_batch,
            plan.multiple,
        )
        for rank in range(shown)
    ]
    split[0] = plan.micro_batches or split[0]
    most = max(map(sum, split))
    is_apart = max(map(len, split)) <= MOST_BLOCKS

    def paint(figure: Figure, narrow: bool) -> None:
        ranks = ", by rank" if shown > 1 else ""
        axes = plain_axes(figure, xlabel=f"samples of one optimizer step{ranks}")
        axes.grid(visible=False)
        room = (300 if narrow else 650) / most
        for row, sizes in enumerate(split):
            blocks = sizes if is_apart else [sum(sizes)]
            starts = [0, *itertools.accumulate(blocks)][: len(blocks)]
            gap = min(1.0, room * min(blocks, default=0) / 8) / room
            bars = axes.barh(
                [row] * len(blocks), [size - gap for size in blocks], 0.72, starts, color=color("accent"),
                label="" if is_apart else "all micro-batches (too many to draw one by one)",
            )  # fmt: skip
            fits = [is_apart and room * size > 8 + 7 * len(count(size)) for size in blocks]
            labels = [count(size) if fit else "" for size, fit in zip(blocks, fits, strict=True)]
            axes.bar_label(bars, labels, label_type="center", color=color("on-accent"))
        axes.set_xlim(0, most)
        axes.set_ylim(shown - 0.5, -0.5)
        axes.set_yticks(range(shown), [f"rank {rank}" for rank in range(shown)] if shown > 1 else [""])
        ticks = sorted({round(most * quarter / 4) for quarter in range(5)})
        axes.set_xticks(ticks, [count(tick) for tick in ticks])

    few = "" if shown == plan.world_size else f"The first {shown} of {plan.world_size} ranks are shown."
    words = (
        f"{plural(plan.target_batch, 'sample')} in "
        f"{plural(plan.accumulation_steps, 'micro-batch', 'micro-batches')} of at most "
        f"{count(plan.micro_batch)} on {plural(plan.world_size, 'rank')}."
    )
    table = Table(
        f"Samples of each micro-batch, in order{f', first {shown} ranks' if few else ''}",
        ["Rank", "Samples", "Micro-batches"],
        [
            [
                str(rank),
                count(sum(sizes)),
                ", ".join(f"{len(list(same))} × {count(size)}" for size, same in itertools.groupby(sizes)),
            ]
            for rank, sizes in enumerate(split)
        ],
    )
    heights = (70 + 42 * shown, 70 + 34 * shown)
    return draw("plan", "One optimizer step", words, paint, table, heights=heights, note=few)


def trials_figure(trials: Sequence[Trial]) -> Picture | None:
    """Draw the speed of each trial relative to the default, and the best so far. None for fewer than two.

    The default is measured again every few trials, so that a machine that slows down bends no curve. Trials
    count from 1 here, as on the terminal. Their records count from 0, as in Optuna.
    """
    if len(trials) < 2:
        return None
    is_relative = any(trial.relative is not None for trial in trials)
    measured = [
        (trial.number + 1, speed)
        for trial in trials
        if trial.feasible and (speed := trial.relative if is_relative else trial.samples_per_s) is not None
    ]
    infeasible = [trial.number + 1 for trial in trials if not trial.feasible]
    # The first trials of later searches in the same study.
    later = [
        new.number + 1
        for old, new in itertools.pairwise(trials)
        if new.started is not None and new.started != old.started
    ]

    def paint(figure: Figure, narrow: bool) -> None:
        title = "speed ÷ speed of the default" if is_relative else "samples/s"
        axes = plain_axes(figure, xlabel="trial", title=title)
        x, speeds = [number for number, _ in measured], [speed for _, speed in measured]
        axes.plot(x, speeds, "o", color=color("accent"), markersize=6, label="trial")
        best = list(itertools.accumulate(speeds, max))
        axes.step(x, best, where="post", color=color("soft"), linewidth=3, zorder=1, label="best so far")
        if is_relative:
            axes.axhline(1, color=color("muted"), linestyle=":", linewidth=1.6, label="default")
        if infeasible:
            axes.plot(
                infeasible, [0.04] * len(infeasible), "x", color=color("bad"), markersize=8,
                markeredgewidth=2, transform=axes.get_xaxis_transform(), label="infeasible",
            )  # fmt: skip
        for number in later:
            axes.axvline(number - 0.5, color=color("rule"), linewidth=1.4, label="continued later")
        axes.xaxis.set_major_locator(MaxNLocator(4 if narrow else 8, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.margins(x=0.04, y=0.2)

    words = f"{plural(len(measured), 'trial')} measured, {len(infeasible)} infeasible."
    if later:
        words += f" The study was continued {plural(len(later), 'time')}."
    knobs = sorted({name for trial in trials for name in trial.parameters})
    rows = [
        [
            str(trial.number + 1),
            decimal(trial.samples_per_s) if trial.samples_per_s is not None else "",
            "" if trial.relative is None else f"{trial.relative:.3f}",
            "yes" if trial.feasible else "no",
            *(str(trial.parameters.get(knob, "")) for knob in knobs),
            trial.note or "",
        ]
        for trial in trials
    ]
    table = Table("Every trial", ["Trial", "Samples/s", "÷ default", "Feasible", *knobs, "Note"], rows)
    return draw("trials", "Speed by trial", words, paint, table, heights=(280, 240), note=words)


def comparison_figure(comparisons: Sequence[TrialComparison]) -> Picture | None:
    """Draw the ratio of each compared configuration to the default, with its interval. None without any."""
    if not comparisons:
        return None
    names = [knobs_in_words(one.changes) for one in comparisons]

    def paint(figure: Figure, narrow: bool) -> None:
        axes = plain_axes(figure, title="speed ÷ speed of the default, side by side")
        axes.grid(visible=False)
        axes.axvline(1, color=color("muted"), linestyle=":", linewidth=1.6)
        for place, one in enumerate(comparisons):
            role = color("accent" if one.chosen else "series-2")
            if one.low is not None and one.high is not None:
                axes.plot([one.low, one.high], [place, place], color=role, linewidth=2.4)
            label = "chosen" if one.chosen else ""
            axes.plot([one.ratio], [place], "o", color=role, markersize=8, label=label)
            axes.annotate(
                f"{names[place]}  {ratio_in_words(one.ratio)}", (0, place),
                xycoords=axes.get_yaxis_transform(), xytext=(0, 9), textcoords="offset points",
            )  # fmt: skip
        axes.set_yticks([])
        axes.set_ylim(len(comparisons) - 0.6, -0.8)
        axes.margins(x=0.08)
        axes.xaxis.set_major_locator(MaxNLocator(4 if narrow else 7))

    title = "The best configurations beside the default"
    words = "Each ran in turn with the default. A line is the 95 % interval of the ratio of their speeds."
    rows = [
        [
            name,
            f"{one.ratio:.3f}",
            "unknown" if one.low is None or one.high is None else f"{one.low:.3f} to {one.high:.3f}",
            str(one.rounds),
            "yes" if one.chosen else "",
        ]
        for name, one in zip(names, comparisons, strict=True)
    ]
    table = Table(title, ["Configuration", "Speed ÷ default", "95 % interval", "Rounds", "Chosen"], rows)
    tall = 70 + 44 * len(comparisons)
    return draw("comparison", title, words, paint, table, heights=(tall, tall), note=words)


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
    speeds = dict(_speeds(records))
    curves = [curve for curve in _curves(records, speeds) if curve.steps]
    if not curves:
        return None
    recoveries = [record.step for record in records if record.recovered is not None]

    def paint(figure: Figure, narrow: bool) -> None:
        tall = [2.2 if curve.label == "loss" else 1.0 for curve in curves]
        grid = figure.subplots(len(curves), sharex=True, squeeze=False, gridspec_kw={"height_ratios": tall})
        for axes, curve in zip(grid[:, 0], curves, strict=True):
            axes.set_title(curve.label)
            axes.margins(x=0.02)
            axes.yaxis.set_major_locator(MaxNLocator(5 if curve.label == "loss" else 3))
            smooth = smoothed(curve.values) if curve.label in NOISY else []
            marker = "o" if len(curve.steps) == 1 or curve.label.startswith("held-out") else ""
            axes.plot(curve.steps, curve.values, color=color("soft" if smooth else "accent"), marker=marker)
            if smooth:
                axes.plot(curve.steps, smooth, color=color("accent"), label="running mean")
            if curve.label == "learning rate":
                axes.set_ylim(bottom=0)
            for step in checkpoints:
                style = {"color": color("muted"), "linestyle": (0, (1, 3)), "linewidth": 1.1}
                axes.axvline(step, zorder=1, label="checkpoint", **style)
            for step in recoveries:
                label = "recovery from out of memory"
                axes.axvline(step, zorder=1, color=color("warn"), linewidth=1.1, label=label)
        seen = {step for curve in curves for step in curve.steps}
        if len(seen) == 1:
            axes.set_xlim(min(seen) - 1, min(seen) + 1)
        axes.set_xlabel("optimizer step")
        axes.xaxis.set_major_locator(MaxNLocator(4 if narrow else 8, integer=True))

    words = (
        f"{', '.join(curve.label for curve in curves)} over {plural(len(records), 'optimizer step')}, with "
        f"{plural(len(recoveries), 'recovery', 'recoveries')} and {plural(len(checkpoints), 'checkpoint')}."
    )
    chosen = [records[at] for at in evenly_spaced(len(records), TABLE_ROWS)]
    few = f"Optimizer steps: {count(len(chosen))} of {count(len(records))}, evenly spaced"
    table = Table(
        "Every optimizer step" if len(chosen) == len(records) else few,
        ["Step", "Loss", "Learning rate", "Samples/s", "Micro-batch", "Event"],
        [_cells(record, speeds.get(record.step)) for record in chosen],
    )
    tall = 130 + 100 * len(curves)
    return draw("training", "Training", words, paint, table, heights=(tall, tall))


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the centred running mean over a fiftieth of the values; nothing if there are too few."""
    if len(values) < SMOOTHED_FROM:
        return []
    half = len(values) // 100
    sums = [0.0, *itertools.accumulate(values)]
    ends = [(max(0, at - half), min(len(values), at + half + 1)) for at in range(len(values))]
    return [(sums[end] - sums[start]) / (end - start) for start, end in ends]


def _curves(records: Sequence[StepRecord], speeds: Mapping[int, float]) -> Iterator[Curve]:
    known = [(record.step, record.loss) for record in records if record.loss is not None]
    yield Curve("loss", [step for step, _ in known], [loss for _, loss in known])
    for name in dict.fromkeys(name for record in records for name in record.terms):
        found = [(one.step, value) for one in records if (value := one.terms.get(name)) is not None]
        yield Curve(f"loss: {name}", [step for step, _ in found], [value for _, value in found])
    yield Curve("learning rate", [one.step for one in records], [one.learning_rate for one in records])
    yield Curve("samples/s", list(speeds), list(speeds.values()))
    for name in dict.fromkeys(name for record in records for name in record.validation):
        found = [(one.step, value) for one in records if (value := one.validation.get(name)) is not None]
        yield Curve(f"held-out {name}", [step for step, _ in found], [value for _, value in found])


def _speeds(records: Sequence[StepRecord]) -> Iterator[tuple[int, float]]:
    """Yield the throughput of each step whose previous step is known, as that gives its own samples."""
    before: StepRecord | None = None
    for record in records:
        is_known = record.step == 1 or (before is not None and before.step == record.step - 1)
        own = record.samples - (before.samples if before is not None else 0)
        if is_known and own > 0 and record.seconds > 0:
            yield record.step, own / record.seconds
        before = record


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


def times_figure(phase_seconds: Mapping[str, float]) -> Picture | None:
    """Draw the share of each phase of the training in its time. Return None if no time is known."""
    whole = sum(phase_seconds.values())
    shares = {name: seconds / whole for name, seconds in phase_seconds.items() if seconds}
    if not shares:
        return None

    def paint(figure: Figure, _: bool) -> None:
        axes = plain_axes(figure, title="where the time went")
        axes.set_axis_off()
        left = 0.0
        for number, (name, share) in enumerate(shares.items()):
            axes.barh([0], [share], left=[left], color=series(number), label=f"{name} {100 * share:.0f} %")
            left += share
        axes.set_xlim(0, 1)

    words = ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items())
    rows = [[name, decimal(phase_seconds[name], 3), f"{100 * share:.0f} %"] for name, share in shares.items()]
    table = Table("Where the time went", ["Phase", "Seconds", "Share"], rows)
    return draw("times", "Where the time went", words, paint, table, heights=(60, 60))


def losses_figure(runs: Sequence[RunRecord], names: Sequence[str]) -> Picture | None:
    """Draw the training losses of runs over the samples seen. Return None if no run has any."""
    curves = []
    for run, name in zip(runs, names, strict=True):
        points = [(row.samples, row.loss) for row in run.metrics if row.loss is not None]
        if points:
            losses = [loss for _, loss in points]
            curves.append((name, [samples for samples, _ in points], smoothed(losses) or losses))
    if not curves:
        return None

    def paint(figure: Figure, narrow: bool) -> None:
        axes = plain_axes(figure, xlabel="samples seen", title="training loss")
        for number, (name, samples, losses) in enumerate(curves):
            style = ("-", "--", ":", "-.")[number % 4]
            axes.plot(samples, losses, style, color=series(2 * number), label=name)
        axes.xaxis.set_major_locator(MaxNLocator(4 if narrow else 8, integer=True))
        axes.margins(x=0.02)

    words = f"The losses of {len(curves)} runs over the samples that they have seen."
    rows = [[name, count(samples[-1]), decimal(losses[-1])] for name, samples, losses in curves]
    table = Table("Last losses", ["Run", "Samples", "Loss"], rows)
    return draw("losses", "Training loss by samples", words, paint, table, heights=(320, 260))
