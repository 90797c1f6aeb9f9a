"""The charts of the report. Each is drawn from records, and has its data in a table."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation

from autobatch.core.records import (
    DeviceRecord,
    MemoryCurve,
    PredictedPoint,
    Probe,
    RunRecord,
    StepRecord,
    Trial,
)
from autobatch.core.units import format_bytes
from autobatch.report.drawing import (
    Picture,
    bytes_unit,
    color,
    draw,
    evenly_spaced,
    layer,
    plain_axes,
    series,
)
from autobatch.report.facts import peak_bytes
from autobatch.report.tables import Table
from autobatch.report.words import (
    count,
    decimal,
    metrics_in_words,
    percent,
    plural,
)

TABLE_ROWS = 200
"""Rows of a table that belongs to a picture, and so places that the pointer finds."""
CACHED = "cached"
"""Category of memory that the allocator holds and no tensor uses; drawn in grey."""
SMOOTHED_FROM = 300
"""Steps from which a noisy curve gets a smoothed line."""
DASHES = ("-", "--", ":", "-.")
NOISY = ("loss", "samples/s")
FROM_ZERO = ("learning rate", "micro-batch")
"""Panels whose axis starts at 0."""


def memory_figure(
    device: DeviceRecord, probe: Probe, predicted: Sequence[PredictedPoint] = (), note: str = ""
) -> Picture | None:
    """Draw peak memory against the micro-batch: the prediction, the runs and the budget, with a note below.

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
        label = f"budget {format_bytes(device.budget_bytes)}"
        axes.axhline(budget, color=color("bad"), linestyle=(0, (5, 3)), linewidth=1.4, label=label)
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
    places = [one.micro_batch for one in probe.attempts]
    title = "Peak memory by micro-batch"
    return draw("memory", title, words, paint, table, heights=(320, 260), note=note, x=places)


def memory_curve_figure(curve: MemoryCurve, budget_bytes: int, setting: str = "") -> Picture | None:
    """Draw live memory over one optimizer step: activations by module, the rest by category, and the budget.

    Phases are equally wide, because events are no measure of time.

    Args:
        curve: the memory; the picture is None if it is empty.
        budget_bytes: the budget; it is drawn unless it is far above the peak.
        setting: configuration that the memory is of, for example ``" in bf16"``.
    """
    if not curve.positions or not curve.categories:
        return None
    layers: dict[str, tuple[str, Sequence[int]]] = {}
    for number, (kind, sizes) in enumerate(curve.categories.items()):
        if kind == "activations" and curve.modules:
            layers |= {name: (layer(at), of) for at, (name, of) in enumerate(curve.modules.items())}
        else:
            layers[kind] = (color("rule") if kind == CACHED else series(number), sizes)
    totals = [sum(sizes) for sizes in zip(*curve.categories.values(), strict=True)]
    # A caching allocator may hold the peak for the whole step: the moment with the most in use explains it.
    unused = curve.categories.get(CACHED, [0] * len(totals))
    peak_at = max(range(len(totals)), key=lambda at: (totals[at], -unused[at]))
    peak = totals[peak_at]
    unit, name = bytes_unit(peak)
    phases, at_phase, places = _in_phases(curve)

    def paint(figure: Figure, narrow: bool) -> None:
        axes = plain_axes(figure, xlabel="phases of one optimizer step", title=f"live memory, {name}")
        heights = [[size / unit for size in [*sizes, sizes[-1]]] for _, sizes in layers.values()]
        axes.stackplot(
            [*places, len(phases)], heights, colors=[hue for hue, _ in layers.values()], labels=list(layers),
            linewidth=0, step="post",
        )  # fmt: skip
        top = 1.12 * max(peak, 1) / unit
        if budget_bytes < 3 * peak:
            top = max(top, 1.06 * budget_bytes / unit)
            label = f"budget {format_bytes(budget_bytes)}"
            axes.axhline(budget_bytes / unit, color=color("bad"), linestyle=(0, (5, 3)), label=label)
        label = f"peak {format_bytes(peak)}"
        axes.plot(
            [places[peak_at]], [peak / unit], "o", color=color("ink"), markersize=5, label=label, zorder=3
        )
        axes.set_xlim(0, len(phases))
        axes.set_ylim(0, top)
        for start in range(1, len(phases)):
            axes.axvline(start, color=color("paper"), linewidth=1.5, zorder=1.5)
        named = [phase.replace(" ", "\n") if narrow else phase for phase in phases]
        axes.set_xticks([at + 0.5 for at in range(len(phases))], named)

    chosen = sorted({*evenly_spaced(len(places), TABLE_ROWS), peak_at})
    table = Table(
        f"Live memory over one step, {count(len(chosen))} of {count(len(places))} points",
        ["Phase", *layers, "All"],
        [
            [
                f"{phases[at_phase[at]]}, {percent(places[at] - at_phase[at])}",
                *(format_bytes(sizes[at]) for _, sizes in layers.values()),
                format_bytes(totals[at]),
            ]
            for at in chosen
        ],
    )
    where = "" if curve.micro_batch is None else f" at micro-batch {count(curve.micro_batch)}"
    note = (
        f"Predicted{where}{setting}. The peak is {format_bytes(peak)} of {format_bytes(budget_bytes)}, in "
        f"{phases[at_phase[peak_at]]}."
    )
    if curve.modules:
        note += " Activations, in green, are shown by the part of the model that made them."
    return draw(
        "memory-over-time",
        "Memory over one optimizer step",
        f"Live memory over the phases of a step. {note}",
        paint,
        table,
        heights=(380, 340),
        note=note,
        x=[places[at] for at in chosen],
    )


def _in_phases(curve: MemoryCurve) -> tuple[list[str], list[int], list[float]]:
    """Return the phases of a step, and the phase and the place of each position, a phase being 1 wide."""
    phases = list(curve.phases) or ["step"]
    starts = [*curve.phases.values()] or [curve.positions[0]]
    ends = [*starts[1:], max(curve.positions[-1], starts[-1]) + 1]
    at_phase = [max(0, bisect_right(starts, position) - 1) for position in curve.positions]
    places = [
        at + (position - starts[at]) / (ends[at] - starts[at])
        for position, at in zip(curve.positions, at_phase, strict=True)
    ]
    return phases, at_phase, places


def trials_figure(trials: Sequence[Trial]) -> Picture | None:
    """Draw the speed of each trial as a ratio to that of the default. Return None for fewer than two.

    Trials count from 1 here, as on the terminal. Their records count from 0, as in Optuna.
    """
    if len(trials) < 2:
        return None
    measured = [(trial.number + 1, trial.relative) for trial in trials if trial.relative is not None]
    faster = [(trial.number + 1, trial.relative) for trial in trials if trial.is_faster]
    infeasible = [trial.number + 1 for trial in trials if trial.relative is None]

    def paint(figure: Figure, narrow: bool) -> None:
        axes = plain_axes(figure, xlabel="trial", title="speed ÷ speed of the default")
        axes.plot(*zip(*measured, strict=True), "o", color=color("soft"), markersize=6, label="trial")
        if faster:
            label = "faster beyond the noise"
            axes.plot(*zip(*faster, strict=True), "o", color=color("accent"), markersize=8, label=label)
        axes.axhline(1, color=color("muted"), linestyle=":", linewidth=1.6, label="default")
        if infeasible:
            axes.plot(
                infeasible, [0.04] * len(infeasible), "x", color=color("bad"), markersize=8,
                markeredgewidth=2, transform=axes.get_xaxis_transform(), label="infeasible",
            )  # fmt: skip
        axes.margins(x=0.04, y=0.2)

    words = f"{plural(len(measured), 'trial')} measured, {len(infeasible)} infeasible."
    knobs = sorted({name for trial in trials for name in trial.parameters})
    rows = [
        [
            str(trial.number + 1),
            "" if trial.samples_per_s is None else decimal(trial.samples_per_s),
            "" if trial.relative is None else f"{trial.relative:.3f}",
            *(str(trial.parameters.get(knob, "")) for knob in knobs),
            trial.note or "",
        ]
        for trial in trials
    ]
    table = Table("Every trial", ["Trial", "Samples/s", "÷ default", *knobs, "Note"], rows)
    numbers = [trial.number + 1 for trial in trials]
    return draw("trials", "Speed by trial", words, paint, table, heights=(280, 240), note=words, x=numbers)


class Curve(NamedTuple):
    """One quantity over the optimizer steps of a run."""

    panel: str
    """Title of the axes; curves with the same one are drawn together."""
    label: str
    steps: list[int]
    values: list[float]


def training_figure(
    metrics: Sequence[StepRecord],
    checkpoints: Sequence[int] = (),
    held_out: Mapping[str, float | None] | None = None,
) -> Picture | None:
    """Draw losses, held-out figures, learning rate and throughput over the optimizer steps, with its events.

    Recoveries and checkpoints are vertical lines. If there were recoveries, the micro-batch is drawn too.

    Args:
        metrics: one record per optimizer step; if a step ran again, its last record counts.
        checkpoints: optimizer steps after which a checkpoint was written.
        held_out: held-out figures after the last step.

    Returns:
        The picture; None if there are no records.
    """
    records = _in_order(metrics, held_out or {})
    panels: dict[str, list[Curve]] = {}
    for curve in _curves(records):
        if len(curve.steps) > curve.panel.startswith("held-out"):  # one figure is no course
            panels.setdefault(curve.panel, []).append(curve)
    if not panels:
        return None
    recoveries = [record.step for record in records if record.recovered is not None]

    def paint(figure: Figure, narrow: bool) -> None:
        tall = [2.2 if panel == "loss" else 1.0 for panel in panels]
        grid = figure.subplots(len(panels), sharex=True, squeeze=False, gridspec_kw={"height_ratios": tall})
        for axes, (panel, curves) in zip(grid[:, 0], panels.items(), strict=True):
            axes.set_title(panel)
            axes.margins(x=0.02)
            if panel != "loss":
                axes.yaxis.set_major_locator(MaxNLocator(3))
            for curve in curves:
                _plot(axes, curve, "series-7" if curve.label != panel else "accent")
            if panel in FROM_ZERO:
                axes.set_ylim(bottom=0)
            for step in checkpoints:
                style = {"color": color("muted"), "linestyle": (0, (1, 3)), "linewidth": 1.1}
                axes.axvline(step, zorder=1, label="checkpoint", **style)
            for step in recoveries:
                label = "recovery from out of memory"
                axes.axvline(step, zorder=1, color=color("warn"), linewidth=1.1, label=label)
        if len(records) == 1:
            axes.set_xlim(records[0].step - 1, records[0].step + 1)
        axes.set_xlabel("optimizer step")

    words = (
        f"{', '.join(curve.label for curves in panels.values() for curve in curves)} over "
        f"{plural(len(records), 'optimizer step')}, with "
        f"{plural(len(recoveries), 'recovery', 'recoveries')} and {plural(len(checkpoints), 'checkpoint')}."
    )
    events = [at for at, record in enumerate(records) if record.recovered or record.validation]
    shown = {
        *evenly_spaced(len(records), TABLE_ROWS),
        *(events[at] for at in evenly_spaced(len(events), 100)),
    }
    chosen = [records[at] for at in sorted(shown)]
    few = f"Optimizer steps: {count(len(chosen))} of {count(len(records))}"
    table = Table(
        "Every optimizer step" if len(chosen) == len(records) else few,
        ["Step", "Loss", "Learning rate", "Samples/s", "Micro-batch", "Held-out", "Event"],
        [_cells(record) for record in chosen],
    )
    tall = 130 + 100 * len(panels)
    places = [record.step for record in chosen]
    return draw("training", "Training", words, paint, table, heights=(tall, tall), x=places)


def _in_order(metrics: Sequence[StepRecord], held_out: Mapping[str, float | None]) -> list[StepRecord]:
    """Return the last record of each step, in order, the last with the held-out figures at the end."""
    records = [record for _, record in sorted({record.step: record for record in metrics}.items())]
    if records and not records[-1].validation:
        records[-1] = msgspec.structs.replace(records[-1], validation=dict(held_out))
    return records


def _plot(axes: Axes, curve: Curve, role: str) -> None:
    """Draw a curve, with a smoothed line over one that is long and noisy."""
    smooth = smoothed(curve.values) if curve.label in NOISY else []
    is_sparse = len(curve.steps) == 1 or curve.label.startswith("held-out")
    axes.plot(
        curve.steps, curve.values, color=color("soft" if smooth else role), markersize=5,
        marker="o" if is_sparse else "", label="" if curve.label == curve.panel else curve.label,
        drawstyle="steps-mid" if curve.label == "micro-batch" else "default",
    )  # fmt: skip
    if smooth:
        axes.plot(curve.steps, smooth, color=color(role), label="running mean")


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the centred running mean over a fiftieth of the values; nothing if there are too few."""
    if len(values) < SMOOTHED_FROM:
        return []
    half = len(values) // 100
    sums = [0.0, *itertools.accumulate(values)]
    ends = [(max(0, at - half), min(len(values), at + half + 1)) for at in range(len(values))]
    return [(sums[end] - sums[start]) / (end - start) for start, end in ends]


def _curves(records: Sequence[StepRecord]) -> Iterator[Curve]:
    def curve(panel: str, label: str, value: Callable[[StepRecord], float | None]) -> Curve:
        known = [(record.step, found) for record in records if (found := value(record)) is not None]
        return Curve(panel, label, [step for step, _ in known], [found for _, found in known])

    yield curve("loss", "loss", lambda record: record.loss)
    for name in sorted({name for record in records for name in record.validation}, key="loss".__ne__):
        panel = "loss" if name == "loss" else f"held-out {name}"
        yield curve(panel, f"held-out {name}", lambda record, name=name: record.validation.get(name))  # type: ignore[misc]
    for name in dict.fromkeys(name for record in records for name in record.terms):
        yield curve(f"loss: {name}", f"loss: {name}", lambda record, name=name: record.terms.get(name))  # type: ignore[misc]
    yield curve("learning rate", "learning rate", lambda record: record.learning_rate)
    yield curve("samples/s", "samples/s", lambda record: record.samples_per_s)
    if any(record.oom_recoveries for record in records):
        yield curve("micro-batch", "micro-batch", lambda record: record.micro_batch)


def _cells(record: StepRecord) -> list[str]:
    skipped = "" if record.applied else "no optimizer step was taken"
    return [
        count(record.step),
        "" if record.loss is None else decimal(record.loss, 6),
        decimal(record.learning_rate, 6),
        "" if record.samples_per_s is None else decimal(record.samples_per_s),
        count(record.micro_batch),
        ", ".join(metrics_in_words(record.validation)),
        "; ".join(filter(None, (skipped, record.recovered))),
    ]


Overlay = dict[str, dict[str, dict[float, float]]]
"""Panels by title; in each the curves by the name of the run, as values by place."""


def curves_figure(runs: Sequence[RunRecord], names: Sequence[str]) -> Picture | None:
    """Draw loss, held-out figures, throughput and memory of runs over each other, by the samples seen.

    Returns:
        The picture; None if no run has any.
    """
    panels: Overlay = {}
    peaks: dict[str, dict[float, float]] = {}
    for run, name in zip(runs, names, strict=True):
        records = _in_order(run.metrics, run.training.validation if run.training else {})
        samples = {record.step: float(record.samples) for record in records}
        for curve in _curves(records):
            if curve.steps and (curve.label in NOISY or curve.label.startswith("held-out")):
                values = zip(curve.steps, curve.values, strict=True)
                panels.setdefault(curve.label, {})[name] = {samples[step]: value for step, value in values}
        peaks[name] = {samples[one.step]: peak for one in records if (peak := peak_bytes(one)) is not None}
    panels |= _in_units("peak memory of a step", peaks)
    title = "Loss, held-out figures, throughput and memory"
    return _draw_overlay("curves", title, panels, names, xlabel="samples seen")


def memory_curves_figure(runs: Sequence[RunRecord], names: Sequence[str]) -> Picture | None:
    """Draw the live memory of runs over one optimizer step, over each other. Return None if it is unknown."""
    totals: dict[str, dict[float, float]] = {}
    phases: list[str] = []
    for run, name in zip(runs, names, strict=True):
        if run.memory_curve is not None and run.memory_curve.categories:
            own, _, places = _in_phases(run.memory_curve)
            phases = phases or own
            live = map(sum, zip(*run.memory_curve.categories.values(), strict=True))
            if own == phases:
                totals[name] = dict(zip(places, live, strict=True))
    panels = _in_units("live memory", totals)
    title = "Memory over one optimizer step"
    xlabel = "phases of one optimizer step"
    return _draw_overlay("memory-of-runs", title, panels, names, xlabel=xlabel, phases=phases)


def _in_units(title: str, sizes: dict[str, dict[float, float]]) -> Overlay:
    """Return a panel of sizes in the unit of the largest; none if no size is known."""
    known = {name: values for name, values in sizes.items() if values}
    if not known:
        return {}
    unit, unit_name = bytes_unit(int(max(max(values.values()) for values in known.values())))
    scaled = {name: {at: size / unit for at, size in values.items()} for name, values in known.items()}
    return {f"{title}, {unit_name}": scaled}


def _draw_overlay(
    slug: str, title: str, panels: Overlay, names: Sequence[str], *, xlabel: str, phases: Sequence[str] = ()
) -> Picture | None:
    """Draw curves of runs over each other, in panels. Return None if there are none."""
    if not panels:
        return None
    drawn = [(panel, name, values) for panel, curves in panels.items() for name, values in curves.items()]

    def paint(figure: Figure, narrow: bool) -> None:
        tall = [2.0 if panel == "loss" else 1.0 for panel in panels]
        grid = figure.subplots(len(panels), sharex=True, squeeze=False, gridspec_kw={"height_ratios": tall})
        of_panel = dict(zip(panels, grid[:, 0], strict=True))
        for panel, axes in of_panel.items():
            axes.set_title(panel)
            axes.margins(x=0.02)
            axes.yaxis.set_major_locator(MaxNLocator(5 if panel == "loss" else 3))
        for panel, name, values in drawn:
            number, heights = names.index(name), list(values.values())
            if panel in NOISY:
                heights = smoothed(heights) or heights
            marker = "o" if len(values) == 1 or panel.startswith("held-out") else ""
            of_panel[panel].plot(
                list(values), heights, DASHES[number % 4], color=series(2 * number), marker=marker,
                markersize=4, label=name, drawstyle="steps-post" if phases else "default",
            )  # fmt: skip
        axes = grid[-1, 0]
        axes.set_xlabel(xlabel)
        axes.xaxis.set_major_locator(MaxNLocator(3 if narrow else 6, integer=True))
        if phases:
            named = [phase.replace(" ", "\n") if narrow else phase for phase in phases]
            axes.set_xticks([at + 0.5 for at in range(len(phases))], named)

    seen = sorted({place for *_, values in drawn for place in values})
    held_out = {at for panel, _, values in drawn if panel.startswith("held-out") for at in values}
    places = sorted({seen[at] for at in evenly_spaced(len(seen), TABLE_ROWS)} | held_out)
    table = Table(
        title,
        [xlabel.capitalize(), *(f"{name}, {panel}" for panel, name, _ in drawn)],
        [
            [
                phases[int(at)] if phases else count(int(at)),
                *(_as_of(at, values, is_exact=panel.startswith("held-out")) for panel, _, values in drawn),
            ]
            for at in places
        ],
    )
    words = f"{', '.join(panels)} of {plural(len(names), 'run')}."
    heights = (150 + 110 * len(panels), 130 + 110 * len(panels))
    return draw(slug, title, words, paint, table, heights=heights, x=places)


def _as_of(place: float, values: Mapping[float, float], *, is_exact: bool) -> str:
    """Write the last value up to a place, or only one that is there; empty outside of a curve."""
    known = sorted(values)
    at = bisect_right(known, place) - 1
    if at < 0 or place > known[-1] or (is_exact and known[at] != place):
        return ""
    return decimal(values[known[at]])
