"""The report of a run, one HTML file that loads nothing, and its charts.

The page begins with the main facts, as the terminal does. A section shows the other facts of one stage, its
chart, its table and its remarks; `templates/` lays them out.

Each chart is drawn once, in colours that are readable on light and dark. The page sets the colour of the
text. So one drawing serves both themes, wide and narrow pages, and notebooks.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Sequence
from html import escape
from itertools import cycle
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from jinja2 import Environment, PackageLoader
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from autobatch.core.records import MemoryCurve, RunRecord, StepRecord
from autobatch.core.text import printable_lines
from autobatch.core.units import GiB, KiB, MiB, TiB, format_bytes
from autobatch.report.facts import Fact, facts_of, is_probed_configuration, moment
from autobatch.report.tables import Table, attempts_table, trials_table

TITLES = {
    "memory": "Where the memory goes",
    "fits": "What fits",
    "plan": "Plan",
    "tuning": "Tuning",
    "training": "Training",
    "device": "Device and budget",
    "repeat": "Repeat this run",
}
"""The sections in reading order, by the stage that they show."""
PAGES = Environment(
    loader=PackageLoader("autobatch.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True
)
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
"""Steps from which a noisy curve gets a running mean."""
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
Curves = dict[str, list[tuple[float, float]]]
"""The points of each curve of a panel, by its label."""


def render(run: RunRecord) -> str:
    """Build the page. The same records always give the same text."""
    tuning, training = run.tuning, run.training
    facts: dict[str, list[Fact]] = {}
    for fact in facts_of(run):
        facts.setdefault("answers" if fact.kind == "main" else fact.part, []).append(fact)
    facts["repeat"] = [Fact("files", label, text) for label, text in sorted(run.versions.items())]
    tables = {"fits": attempts_table(run.probe.attempts)}
    if tuning is not None and tuning.history:
        tables["tuning"] = trials_table(tuning.history)
    if run.options:
        options = [[name, "" if value is None else str(value)] for name, value in sorted(run.options.items())]
        tables["repeat"] = Table("Every option of this run", ["Option", "Value"], options)
    rate = tuning.learning_rate if tuning else None
    notes = {
        "tuning": [*(tuning.notes if tuning else []), *(rate.notes if rate else [])],
        "training": training.notes if training else [],
        "device": run.device.notes,
        "repeat": run.notes,
    }
    commands = {"repeat": run.command}
    pictures = pictures_of(run)
    parts = (facts, pictures, tables, notes, commands)
    text = PAGES.get_template("page.html.j2").render(
        heading=run.title or "autobatch",
        created=moment(run.created),
        titles={slug: title for slug, title in TITLES.items() if any(part.get(slug) for part in parts)},
        facts=facts,
        pictures=pictures,
        tables=tables,
        notes=notes,
        commands=commands,
    )
    # Escaped for HTML by the template, and here for terminals, where a page may be printed.
    return printable_lines(text, limit=None)


class Picture(NamedTuple):
    """A chart."""

    svg: str
    note: str
    """Text below the chart."""


def pictures_of(run: RunRecord) -> dict[str, Picture]:
    """Draw the charts of a run, by the section of the page that they belong to; none without its records."""
    pictures = {}
    if run.memory_curve is not None and run.memory_curve.positions and run.memory_curve.categories:
        is_other = run.plan and not is_probed_configuration(run.probe, run.plan)
        whose = " Of the default configuration, before tuning." if is_other else ""
        pictures["memory"] = memory_figure(run.memory_curve, run.device.budget_bytes, whose)
    if run.metrics:
        pictures["training"] = training_figure(run.metrics, run.checkpoints)
    return pictures


def memory_figure(curve: MemoryCurve, budget_bytes: int, whose: str = "") -> Picture:
    """Draw live memory over one optimizer step: activations by module, the rest by category, and the budget.

    Phases are equally wide, because events are no measure of time. The budget is left out if it is far above.

    Args:
        curve: the memory.
        budget_bytes: the budget.
        whose: a sentence about whose memory it is, if it is not that of the plan.
    """
    layers: dict[str, Sequence[int]] = {}
    for kind, sizes in curve.categories.items():
        layers |= curve.modules if kind == "activations" and curve.modules else {kind: sizes}
    greens, others = cycle(LAYERS), cycle(SERIES)
    colors = [
        RULE if name == CACHED else next(greens if name in curve.modules else others) for name in layers
    ]
    totals = [sum(sizes) for sizes in zip(*curve.categories.values(), strict=True)]
    # A caching allocator may hold the peak for the whole step: the moment with the most in use explains it.
    unused = curve.categories.get(CACHED, [0] * len(totals))
    peak_at = max(range(len(totals)), key=lambda at: (totals[at], -unused[at]))
    peak = max(1, totals[peak_at])
    phases = list(curve.phases) or ["step"]
    starts = list(curve.phases.values()) or [curve.positions[0]]
    end = max(curve.positions[-1], starts[-1]) + 1
    places = [*np.interp(curve.positions, [*starts, end], range(len(starts) + 1)), len(starts)]
    unit, name = next(
        (size, name)
        for size, name in ((TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB"), (1, "B"))
        if peak >= size
    )

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel="phases of one optimizer step", title=f"live memory, {name}")
        heights = [[size / unit for size in [*sizes, sizes[-1]]] for sizes in layers.values()]
        axes.stackplot(places, heights, colors=colors, labels=list(layers), linewidth=0, step="post")
        top = 1.12 * peak
        if budget_bytes < 3 * peak:
            top = max(top, 1.08 * budget_bytes)
            label = f"budget {format_bytes(budget_bytes)}"
            axes.axhline(budget_bytes / unit, color=BAD, linestyle=(0, (5, 3)), label=label)
        label = f"peak {format_bytes(peak)}"
        axes.plot([places[peak_at]], [peak / unit], "o", color=GREY, markersize=5, label=label, zorder=3)
        axes.set(xlim=(0, len(phases)), ylim=(0, top / unit))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        for start in range(1, len(phases)):
            axes.axvline(start, color=RULE, linewidth=1, zorder=3)
        middles = [at + 0.5 for at in range(len(phases))]
        axes.set_xticks(middles, [phase.replace(" ", "\n") for phase in phases])

    share = f"{format_bytes(peak)} of {format_bytes(budget_bytes)}"
    words = [f"The peak at micro-batch {curve.micro_batch:,} is {share}, in {phases[int(places[peak_at])]}."]
    if "forward 2" in phases:
        words.append("Forward 2 and backward 2 are a further micro-batch, beside the gradients of the first.")
    if curve.modules:
        words.append("Activations, in green, are shown by the part of the model that made them.")
    note = " ".join(words) + whose
    return Picture(draw(f"Memory over one optimizer step. {note}", paint, height=300), note)


def training_figure(records: Sequence[StepRecord], checkpoints: Sequence[int] = ()) -> Picture:
    """Draw losses, held-out figures, learning rate and throughput over the optimizer steps.

    Recoveries from out of memory are vertical lines. If there were any, the micro-batch is drawn, too.

    Args:
        records: one for each optimizer step.
        checkpoints: optimizer steps after which a checkpoint was written.
    """
    panels = _panels(records)
    recoveries = [record.step for record in records if record.recovered is not None]

    def paint(figure: Figure) -> None:
        tall = [2.2 if title == "loss" else 1.0 for title in panels]
        grid = figure.subplots(len(panels), sharex=True, squeeze=False, gridspec_kw={"height_ratios": tall})
        for axes, (title, curves) in zip(grid[:, 0], panels.items(), strict=True):
            axes.set_title(title)
            axes.margins(x=0.02)
            axes.yaxis.set_major_locator(MaxNLocator(5 if title == "loss" else 3))
            _plot(axes, curves)
            for step in recoveries:
                axes.axvline(step, zorder=1, color=WARN, linewidth=1.1, label="recovery from out of memory")
        if len(records) == 1:
            axes.set_xlim(records[0].step - 1, records[0].step + 1)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.set_xlabel("optimizer step")

    saved = f"Checkpoints after step {', '.join(f'{step:,}' for step in checkpoints)}." if checkpoints else ""
    return Picture(draw(f"Training. {saved}", paint, height=100 + 85 * len(panels)), saved)


def _panels(records: Sequence[StepRecord]) -> dict[str, Curves]:
    """Return the curves of each panel, by its title. A held-out figure of one step is no curve."""

    def points(field: str) -> list[tuple[float, float]]:
        return [(record.step, at) for record in records if (at := getattr(record, field)) is not None]

    def by_name(field: str) -> Curves:
        curves: Curves = {}
        for record in records:
            for name, value in getattr(record, field).items():
                curves.setdefault(name, []).extend([] if value is None else [(record.step, value)])
        return curves

    held_out = {name: curve for name, curve in by_name("validation").items() if len(curve) > 1}
    panels: dict[str, Curves] = {"loss": {"loss": points("loss")}}
    if "loss" in held_out:
        panels["loss"]["held-out loss"] = held_out.pop("loss")
    panels |= {f"held-out {name}": {name: curve} for name, curve in held_out.items()}
    panels |= {f"loss: {name}": {name: curve} for name, curve in by_name("terms").items()}
    panels["learning rate"] = {"": points("learning_rate")}
    panels["samples/s"] = {"samples/s": points("samples_per_s")}
    if any(record.oom_recoveries for record in records):
        panels["micro-batch"] = {"": points("micro_batch")}
    return {title: curves for title, curves in panels.items() if any(curves.values())}


def _plot(axes: Axes, curves: Curves) -> None:
    """Draw the curves of a panel; one that is long and noisy is faint, with its running mean."""
    for (label, points), color in zip(curves.items(), (ACCENT, SERIES[-2]), strict=False):
        steps, values = zip(*points, strict=True) if points else ((), ())
        is_noisy = label in ("loss", "samples/s") and len(points) >= SMOOTHED_FROM
        axes.plot(
            steps,
            values,
            color=RULE if is_noisy else color,
            marker="o" if len(points) == 1 or label.startswith("held-out") else "",
            markersize=5,
            label=label if len(curves) > 1 else "",
        )
        if is_noisy:
            width = len(points) // 50
            mean = np.convolve(values, np.ones(width) / width, mode="valid")
            axes.plot(steps[width // 2 :][: len(mean)], mean, color=color, label="running mean")


def draw(label: str, paint: Callable[[Figure], None], *, height: int) -> str:
    """Return a drawing as SVG, without ids that nothing refers to; the others depend on the label.

    Args:
        label: what is drawn, for screen readers.
        paint: draws on a figure. What it labels is in the legend.
        height: pixels without the legend.
    """
    with mpl.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph .* missing|.*[Ff]ont family")  # the browser has the font
        mpl.rcdefaults()  # the user's matplotlibrc must not change the report
        mpl.rcParams.update(STYLE | {"svg.hashsalt": label})
        figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
        paint(figure)
        legend: dict[str, Any] = {}
        for axes in figure.axes:
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
    body = re.sub(r' id="[A-Za-z]+[\w.]*_\d+"', "", body)
    return f'<svg role="img" aria-label="{escape(label)}" style="max-width:100%;height:auto"{body}'
