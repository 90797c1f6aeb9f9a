"""Two or more runs side by side: a table of what differs, and their losses over each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from autobatch.core.files import write_atomic
from autobatch.core.records import RunRecord, Training
from autobatch.core.units import format_bytes
from autobatch.report.charts.curves import smoothed
from autobatch.report.charts.drawing import Mark, Picture, Table, downsample, draw, plain_axes, series
from autobatch.report.facts import describe_split
from autobatch.report.page import Section, drawn, page_of
from autobatch.report.words import count, decimal, knobs_in_words, metric_in_words, moment

DRAWN_POINTS = 600


def comparison_table(runs: Sequence[RunRecord], names: Sequence[str]) -> Table:
    """Build a table with a row for each figure and a column for each run, without figures that none has.

    Args:
        runs: the runs.
        names: what they are called, for example their folders.
    """
    rows = [[label, *values] for label, values in _rows(runs) if any(values)]
    return Table(caption="What each run planned and reached", head=["", *names], rows=rows)


def _rows(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    plans = [run.plan for run in runs]
    trained = [run.training for run in runs]
    figures = list(dict.fromkeys(name for one in trained if one for name in one.validation))
    return [
        ("device", [run.device.name for run in runs]),
        ("budget", [format_bytes(run.device.budget_bytes) for run in runs]),
        ("batch", ["" if plan is None else count(plan.target_batch) for plan in plans]),
        ("split", ["" if plan is None else describe_split(plan) for plan in plans]),
        ("precision", ["" if plan is None else plan.precision for plan in plans]),
        ("tuned", ["" if plan is None else knobs_in_words(plan.knobs) for plan in plans]),
        ("learning rate", ["" if plan is None else f"{plan.learning_rate:.3g}" for plan in plans]),
        *(
            (f"held-out {name}", ["" if one is None else _held_out(one, name) for one in trained])
            for name in figures
        ),
        ("training loss", ["" if one is None else decimal(one.final_loss) for one in trained]),
        ("steps", ["" if one is None else count(one.optimizer_steps) for one in trained]),
        ("samples/s", ["" if one is None else decimal(one.samples_per_s) for one in trained]),
        ("time, s", ["" if one is None else decimal(one.seconds, 3) for one in trained]),
        ("peak memory", ["" if one is None else _peak(one) for one in trained]),
        ("recoveries", ["" if one is None else count(one.oom_recoveries) for one in trained]),
        *(
            (name, [run.versions.get(name, "") for run in runs])
            for name in sorted({name for run in runs for name in run.versions})
        ),
        ("date", [moment(run.created) if run.created else "" for run in runs]),
    ]


def _held_out(training: Training, name: str) -> str:
    if name not in training.validation:
        return ""
    return metric_in_words(name, training.validation[name]).removeprefix(f"{name} ")


def _peak(training: Training) -> str:
    peak = training.peak_reserved_bytes or training.peak_allocated_bytes
    return "" if peak is None else format_bytes(peak)


def losses_figure(runs: Sequence[RunRecord], names: Sequence[str]) -> Picture | None:
    """Draw the training losses over the samples seen. Return None if no run has any."""
    curves = []
    for run, name in zip(runs, names, strict=True):
        points = [(row.samples, row.loss) for row in run.metrics if row.loss is not None]
        if points:
            samples, losses = [sample for sample, _ in points], [loss for _, loss in points]
            curves.append((name, samples, smoothed(losses) or losses))
    if not curves:
        return None

    def paint(drawing: Figure, narrow: bool) -> None:
        axes = plain_axes(drawing, xlabel="samples seen", title="training loss")
        for number, (_, samples, losses) in enumerate(curves):
            drawn = downsample(losses, DRAWN_POINTS)
            style = ["-", "--", ":", "-."][number % 4]
            axes.plot(
                [samples[at] for at in drawn], [losses[at] for at in drawn], style, color=series(2 * number)
            )
        axes.xaxis.set_major_locator(MaxNLocator(4 if narrow else 8, integer=True))
        axes.margins(x=0.02)

    title = "Training loss by samples"
    words = f"The losses of {len(curves)} runs over the samples that they have seen."
    shapes = cycle(["line", "dash"])
    return Picture(
        slug="losses",
        title=title,
        description=words,
        svg=draw("losses", title, words, paint, heights=(320, 260)),
        legend=[
            Mark(role=f"series-{2 * number % 7 + 1}", label=name, shape=next(shapes))
            for number, (name, _, _) in enumerate(curves)
        ],
        table=Table(
            caption="Last losses",
            head=["Run", "Samples", "Loss"],
            rows=[[name, count(samples[-1]), decimal(losses[-1])] for name, samples, losses in curves],
        ),
    )


def comparison_page(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    """Build the page: the table, and the losses over each other."""
    compared = Section("runs", "Runs", tables=[comparison_table(runs, names)])
    losses = Section("losses", "Training loss", pictures=drawn(losses_figure(runs, names)))
    title = "Runs side by side"
    return page_of(f"autobatch: {title}", [compared, losses], eyebrow="autobatch", heading=title)


def write_comparison(path: Path, runs: Sequence[RunRecord], names: Sequence[str]) -> Path:
    """Write the page atomically, and return its path.

    Raises:
        OSError: the file cannot be written.
    """
    return write_atomic(path, comparison_page(runs, names).encode())
