"""The charts of the report: each is drawn once, from records.

Colours are readable on light and dark, and the page sets the colour of the text. So one drawing serves both
themes, wide and narrow pages, and notebooks.
"""

from __future__ import annotations

import io
import itertools
import re
import warnings
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import matplotlib as mpl
import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from autobatch.core.records import DeviceRecord, MemoryCurve, PredictedPoint, Probe, StepRecord
from autobatch.core.text import error_text
from autobatch.core.units import GiB, KiB, MiB, TiB, format_bytes
from autobatch.report.facts import peak_bytes
from autobatch.report.words import count

WIDTH = 400
"""Pixels across: a phone shows a drawing a little smaller, a wide page larger."""
LETTER, ROW = 6.6, 17
"""Pixels of a letter and of a row of the legend."""
ACCENT, BAD, WARN, GREY, RULE = "#0d8189", "#cf432a", "#aa700b", "#7d7d7d", "#80808059"
SERIES = (ACCENT, "#5b97a2", "#ad8236", "#5e7896", "#6d865e", "#9b606d", "#7a69a6")
"""Colours of categories; they repeat after the last."""
LAYERS = ("#2c7a55", "#7b9550", "#3f7f31", "#90904f", "#6c7d1c", "#4b8f46")
"""Colours of the parts of a model, all of them greens."""
CACHED = "cached"
"""Category of memory that the allocator holds and no tensor uses."""
SMOOTHED_FROM = 300
"""Steps from which a noisy curve gets a smoothed line."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["system-ui", "DejaVu Sans"],
    "font.size": 12,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    **dict.fromkeys(
        ("text.color", "axes.titlecolor", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), GREY
    ),
    **dict.fromkeys(("xtick.color", "ytick.color", "axes.edgecolor", "grid.color"), RULE),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.spines.left"), False),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size", "legend.borderpad"), 0),
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-7, 9),
    "legend.frameon": False,
    "legend.borderaxespad": 0,
    "legend.fontsize": 12,
    "legend.columnspacing": 1.5,
    "lines.linewidth": 1.8,
    "path.simplify_threshold": 1.0,  # in pixels: long runs have more points than that
}


Points = list[tuple[int, float]]
"""Optimizer steps, each with a figure."""


class Picture(NamedTuple):
    """A chart."""

    slug: str
    svg: str
    """The drawing; a sentence in its place if it cannot be drawn."""
    note: str
    """Text below the chart."""


def draw(slug: str, title: str, paint: Callable[[Figure], None], *, height: int, note: str = "") -> Picture:
    """Draw a picture.

    If matplotlib cannot draw it, for example because a loss is 1e308, a sentence is in its place.

    Args:
        slug: name of the picture, unique on its page.
        title: title for screen readers.
        paint: draws on a figure. What it labels is in the legend.
        height: pixels without the legend.
        note: text below the picture.
    """
    try:
        label = escape(f"{title}. {note}")
        head = f'<svg role="img" aria-label="{label}" style="max-width:100%;height:auto" '
        return Picture(slug, _svg(slug, paint, height).replace("<svg ", head, 1), note)
    except Exception as error:
        reason = escape(f"{type(error).__name__}: {error_text(error)}")
        words = f"<p>The figure of {escape(title)} is left out, it cannot be drawn ({reason}).</p>"
        return Picture(slug, words, note)


def _svg(slug: str, paint: Callable[[Figure], None], height: int) -> str:
    """Return what matplotlib draws, without ids that nothing refers to; the others depend on the slug."""
    with mpl.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph .* missing|.*[Ff]ont family")  # the browser has the font
        warnings.filterwarnings("ignore", category=RuntimeWarning)  # overflow in figures of 1e308
        mpl.rcdefaults()  # the user's matplotlibrc must not change the report
        mpl.rcParams.update(STYLE | {"svg.hashsalt": slug})
        figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
        paint(figure)
        legend: dict[str, Any] = {}
        for axes in figure.axes:
            for axis in (axes.xaxis, axes.yaxis):
                if max(axis.get_view_interval()) >= 1000:
                    axis.set_major_formatter("{x:,.0f}")
            handles, labels = axes.get_legend_handles_labels()
            legend |= dict(zip(labels, handles, strict=True))
        if legend:
            columns = min(len(legend), max(1, int(WIDTH // (40 + LETTER * max(map(len, legend))))))
            figure.set_figheight((height + ROW * -(-len(legend) // columns)) / 72)
            figure.legend(list(legend.values()), list(legend), loc="outside lower left", ncols=columns)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    body = buffer.getvalue().partition("<svg")[2]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    return "<svg" + re.sub(r' id="[A-Za-z]+[\w.]*_\d+"', "", body)


def _bytes_unit(size: int) -> tuple[int, str]:
    """Return the largest unit that ``size`` bytes fill, and its name."""
    steps = ((TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB"))
    return next(((unit, name) for unit, name in steps if size >= unit), (1, "B"))


def _one_axes(figure: Figure, xlabel: str, title: str) -> Axes:
    """Add one axes with whole numbers across."""
    axes = figure.add_subplot(xlabel=xlabel, title=title)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    return axes


def memory_figure(
    device: DeviceRecord, probe: Probe, predicted: Sequence[PredictedPoint] = (), note: str = ""
) -> Picture | None:
    """Draw peak memory against the micro-batch: the runs, the replay and the budget.

    Returns:
        The picture; None if there are fewer than two points to draw.
    """
    attempts = probe.attempts
    if len(attempts) + len(predicted) < 2:
        return None
    kind = "allocated" if all(attempt.peak_reserved_bytes is None for attempt in attempts) else "reserved"
    peaks = [(attempt, peak_bytes(attempt)) for attempt in attempts if attempt.fits]
    fits = [(attempt.micro_batch, peak) for attempt, peak in peaks if peak is not None]
    result = [point for point in fits if point[0] == probe.micro_batch][-1:]
    fails = sorted({attempt.micro_batch for attempt in attempts if not attempt.fits})
    above = [(size, int(1.06 * device.budget_bytes)) for size in fails]
    replayed = sorted((point.micro_batch, point.peak_reserved_bytes) for point in predicted)
    highest = max([device.budget_bytes, *(peak for _, peak in [*fits, *replayed])])
    unit, name = _bytes_unit(highest)

    def paint(figure: Figure) -> None:
        axes = _one_axes(figure, "micro-batch, samples", f"peak {kind} memory, {name}")

        def plot(points: Sequence[tuple[int, int]], style: str, label: str, **look: Any) -> None:
            if points:
                sizes, heights = [size for size, _ in points], [peak / unit for _, peak in points]
                axes.plot(sizes, heights, style, label=label, **look)

        label = f"budget {format_bytes(device.budget_bytes)}"
        budget = device.budget_bytes / unit
        axes.axhline(budget, color=BAD, linestyle=(0, (5, 3)), linewidth=1.4, label=label)
        plot(replayed, "-", "replayed", color=GREY, linewidth=1.4)
        plot(fits, "o", "ran and fits", color=ACCENT, markersize=6)
        ring = {"markersize": 13, "markerfacecolor": "none", "markeredgewidth": 1.8}
        plot(result, "o", f"result, {count(probe.micro_batch)}", color=ACCENT, **ring)
        plot(above, "x", "does not fit", color=BAD, markersize=7, markeredgewidth=2)
        axes.set_ylim(0, 1.14 * highest / unit)
        axes.margins(x=0.06)

    return draw("memory", "Peak memory by micro-batch", paint, height=270, note=note)


def memory_curve_figure(curve: MemoryCurve, budget_bytes: int, note: str = "") -> Picture | None:
    """Draw live memory over one optimizer step: activations by module, the rest by category, and the budget.

    Phases are equally wide, because events are no measure of time.

    Args:
        curve: the memory; the picture is None if it is empty.
        budget_bytes: the budget; it is drawn unless it is far above the peak.
        note: whose memory it is, if it is not that of the plan.
    """
    if not curve.positions or not curve.categories:
        return None
    layers: dict[str, tuple[str, Sequence[int]]] = {}
    for color, (kind, sizes) in zip(itertools.cycle(SERIES), curve.categories.items(), strict=False):
        if kind == "activations" and curve.modules:
            of_modules = zip(itertools.cycle(LAYERS), curve.modules.items(), strict=False)
            layers |= {module: (green, own) for green, (module, own) in of_modules}
        else:
            layers[kind] = (RULE if kind == CACHED else color, sizes)
    totals = [sum(sizes) for sizes in zip(*curve.categories.values(), strict=True)]
    # A caching allocator may hold the peak for the whole step: the moment with the most in use explains it.
    unused = curve.categories.get(CACHED, [0] * len(totals))
    peak_at = max(range(len(totals)), key=lambda at: (totals[at], -unused[at]))
    peak = totals[peak_at]
    unit, name = _bytes_unit(peak)
    phases, places = _in_phases(curve)

    def paint(figure: Figure) -> None:
        axes = _one_axes(figure, "phases of one optimizer step", f"live memory, {name}")
        heights = [[size / unit for size in [*sizes, sizes[-1]]] for _, sizes in layers.values()]
        colors = [color for color, _ in layers.values()]
        across = [*places, len(phases)]
        axes.stackplot(across, heights, colors=colors, labels=list(layers), linewidth=0, step="post")
        top = 1.12 * max(peak, 1) / unit
        if budget_bytes < 3 * peak:
            top = max(top, 1.08 * budget_bytes / unit)
            label = f"budget {format_bytes(budget_bytes)}"
            axes.axhline(budget_bytes / unit, color=BAD, linestyle=(0, (5, 3)), label=label)
        label = f"peak {format_bytes(peak)}"
        axes.plot([places[peak_at]], [peak / unit], "o", color=GREY, markersize=5, label=label, zorder=3)
        axes.set(xlim=(0, len(phases)), ylim=(0, top))
        for start in range(1, len(phases)):
            axes.axvline(start, color=RULE, linewidth=1, zorder=3)
        middles = [at + 0.5 for at in range(len(phases))]
        axes.set_xticks(middles, [phase.replace(" ", "\n") for phase in phases])

    where = "" if curve.micro_batch is None else f" at micro-batch {count(curve.micro_batch)}"
    of = f"{format_bytes(peak)} of {format_bytes(budget_bytes)}"
    words = [f"The peak{where} is {of}, in {phases[int(places[peak_at])]}."]
    if "forward 2" in phases:
        words.append(
            "Forward 1 and backward 1 are the first micro-batch of a step, forward 2 and backward 2 a "
            "further one, beside which the gradients of the first are held."
        )
    if curve.modules:
        words.append("Activations, in green, are shown by the part of the model that made them.")
    note = " ".join([*words, *filter(None, [note])])
    return draw("memory-over-time", "Memory over one optimizer step", paint, height=300, note=note)


def _in_phases(curve: MemoryCurve) -> tuple[list[str], list[float]]:
    """Return the phases of a step, and the place of each position: phase n reaches from n to n + 1."""
    starts = [*curve.phases.values()] or [curve.positions[0]]
    ends = [*starts[1:], max(curve.positions[-1], starts[-1]) + 1]
    places = []
    for position in curve.positions:
        at = max(0, bisect_right(starts, position) - 1)
        places.append(at + (position - starts[at]) / (ends[at] - starts[at]))
    return list(curve.phases) or ["step"], places


def training_figure(
    metrics: Sequence[StepRecord],
    checkpoints: Sequence[int] = (),
    held_out: Mapping[str, float | None] | None = None,
) -> Picture | None:
    """Draw losses, held-out figures, learning rate and throughput over the optimizer steps.

    Recoveries are vertical lines. If there were any, the micro-batch is drawn too.

    Args:
        metrics: one record per optimizer step; if a step ran again, its last record counts.
        checkpoints: optimizer steps after which a checkpoint was written.
        held_out: held-out figures after the last step.

    Returns:
        The picture; None if there are no records.
    """
    records = [record for _, record in sorted({record.step: record for record in metrics}.items())]
    if records and not records[-1].validation:
        records[-1] = msgspec.structs.replace(records[-1], validation=dict(held_out or {}))
    panels: dict[str, dict[str, Points]] = {}
    for panel, values in _panels(records).items():
        curves = {
            label: [(record.step, at) for record in records if (at := value(record)) is not None]
            for label, value in values.items()
        }
        least = 2 if panel.startswith("held-out") else 1  # one figure is no course
        if drawn := {label: points for label, points in curves.items() if len(points) >= least}:
            panels[panel] = drawn
    if not panels:
        return None
    recoveries = [record.step for record in records if record.recovered is not None]

    def paint(figure: Figure) -> None:
        tall = [2.2 if panel == "loss" else 1.0 for panel in panels]
        grid = figure.subplots(len(panels), sharex=True, squeeze=False, gridspec_kw={"height_ratios": tall})
        for axes, (panel, curves) in zip(grid[:, 0], panels.items(), strict=True):
            axes.set_title(panel)
            axes.margins(x=0.02)
            axes.yaxis.set_major_locator(MaxNLocator(5 if panel == "loss" else 3))
            for label, points in curves.items():
                _plot(axes, points, label, is_alone=label == panel)
            if panel in ("learning rate", "micro-batch"):
                axes.set_ylim(bottom=0)
            for step in recoveries:
                axes.axvline(step, zorder=1, color=WARN, linewidth=1.1, label="recovery from out of memory")
        if len(records) == 1:
            axes.set_xlim(records[0].step - 1, records[0].step + 1)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.set_xlabel("optimizer step")

    saved = f"Checkpoints after {', '.join(map(count, checkpoints))}." if checkpoints else ""
    return draw("training", "Training", paint, height=100 + 85 * len(panels), note=saved)


def _panels(records: Sequence[StepRecord]) -> dict[str, dict[str, Callable[[StepRecord], float | None]]]:
    """Return the panels by their titles, and the curves of each by their labels."""

    def named(field: str, name: str) -> Callable[[StepRecord], float | None]:
        return lambda record: getattr(record, field).get(name)

    panels: dict[str, dict[str, Callable[[StepRecord], float | None]]] = {
        "loss": {"loss": lambda record: record.loss}
    }
    for name in dict.fromkeys(name for record in records for name in record.validation):
        panel = panels.setdefault("loss" if name == "loss" else f"held-out {name}", {})
        panel[f"held-out {name}"] = named("validation", name)
    for name in dict.fromkeys(name for record in records for name in record.terms):
        panels[f"loss: {name}"] = {f"loss: {name}": named("terms", name)}
    panels["learning rate"] = {"learning rate": lambda record: record.learning_rate}
    panels["samples/s"] = {"samples/s": lambda record: record.samples_per_s}
    if any(record.oom_recoveries for record in records):
        panels["micro-batch"] = {"micro-batch": lambda record: record.micro_batch}
    return panels


def _plot(axes: Axes, points: Points, label: str, *, is_alone: bool) -> None:
    """Draw a curve, with a smoothed line over one that is long and noisy."""
    steps, values = zip(*points, strict=True)
    is_noisy = label in ("loss", "samples/s") and len(points) >= SMOOTHED_FROM
    color = ACCENT if is_alone else SERIES[-1]
    axes.plot(
        steps,
        values,
        color=RULE if is_noisy else color,
        markersize=5,
        marker="o" if len(points) == 1 or label.startswith("held-out") else "",
        label="" if is_alone else label,
        drawstyle="steps-mid" if label == "micro-batch" else "default",
    )
    if is_noisy:
        axes.plot(steps, smoothed(values), color=color, label="running mean")


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the centred running mean over a fiftieth of the values."""
    half, sums = len(values) // 100, [0.0, *itertools.accumulate(values)]
    ends = [(max(0, at - half), min(len(values), at + half + 1)) for at in range(len(values))]
    return [(sums[end] - sums[start]) / (end - start) for start, end in ends]
