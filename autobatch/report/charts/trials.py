"""The charts of the search for the fastest configuration."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from autobatch.core.records import Trial, TrialComparison
from autobatch.report.charts.drawing import (
    Mark,
    Picture,
    Table,
    color,
    draw,
    evenly_spaced,
    plain_axes,
)
from autobatch.report.words import count, decimal, knobs_in_words, plural, ratio_in_words

TABLE_ROWS = 200


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
    later = _later_searches(trials)

    def paint(figure: Figure, narrow: bool) -> None:
        title = "speed ÷ speed of the default" if is_relative else "samples/s"
        axes = plain_axes(figure, xlabel="trial", title=title)
        x = [number for number, _ in measured]
        best = list(itertools.accumulate((speed for _, speed in measured), max))
        if is_relative:
            axes.axhline(1, color=color("muted"), linestyle=":", linewidth=1.6)
        if len(x) > 1:
            axes.step(x, best, where="post", color=color("soft"), linewidth=3)
        axes.plot(x, [speed for _, speed in measured], "o", color=color("accent"), markersize=6)
        axes.plot(
            infeasible, [0.04] * len(infeasible), "x", color=color("bad"), markersize=8, markeredgewidth=2,
            transform=axes.get_xaxis_transform(),
        )  # fmt: skip
        for number in later:
            axes.axvline(number - 0.5, color=color("rule"), linewidth=1.4)
        axes.xaxis.set_major_locator(MaxNLocator(4 if narrow else 8, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.margins(x=0.04, y=0.2)

    title = "Speed by trial"
    words = f"{plural(len(measured), 'trial')} measured, {len(infeasible)} infeasible."
    if later:
        words += f" The study was continued {plural(len(later), 'time')}."
    legend = [Mark(role="accent", label="trial", shape="dot"), Mark(role="soft", label="best so far")]
    legend += [Mark(role="muted", label="default", shape="dash")] if is_relative else []
    legend += [Mark(role="bad", label="infeasible", shape="cross")] if infeasible else []
    legend += [Mark(role="rule", label="continued later")] if later else []
    svg = draw("trials", title, words, paint, heights=(280, 240))
    return Picture(
        slug="trials",
        title=title,
        description=words,
        svg=svg,
        legend=legend,
        table=_trials_table(trials),
        note=words,
    )


def _later_searches(trials: Sequence[Trial]) -> list[int]:
    """Return the numbers, from 1, of the first trial of each search but the first."""
    pairs = itertools.pairwise(trials)
    return [new.number + 1 for old, new in pairs if new.started is not None and new.started != old.started]


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
            role = "accent" if one.chosen else "series-2"
            if one.low is not None and one.high is not None:
                axes.plot([one.low, one.high], [place, place], color=color(role), linewidth=2.4)
            axes.plot([one.ratio], [place], "o", color=color(role), markersize=8)
            axes.annotate(
                f"{names[place]}  {ratio_in_words(one.ratio)}", (0, place),
                xycoords=axes.get_yaxis_transform(), xytext=(0, 9), textcoords="offset points",
            )  # fmt: skip
        axes.set_yticks([])
        axes.set_ylim(len(comparisons) - 0.6, -0.8)
        known = [end for one in comparisons for end in (one.low, one.high, one.ratio) if end is not None]
        margin = 0.08 * (max(*known, 1.0) - min(*known, 1.0)) or 0.05
        axes.set_xlim(min(*known, 1.0) - margin, max(*known, 1.0) + margin)
        axes.xaxis.set_major_locator(MaxNLocator(4 if narrow else 7))

    title = "The best configurations beside the default"
    words = "Each ran in turn with the default. A line is the 95 % interval of the ratio of their speeds."
    chosen = any(one.chosen for one in comparisons)
    tall = 70 + 44 * len(comparisons)
    return Picture(
        slug="comparison",
        title=title,
        description=words,
        svg=draw("comparison", title, words, paint, heights=(tall, tall)),
        legend=[Mark(role="accent", label="chosen", shape="dot")] if chosen else [],
        table=Table(
            caption=title,
            head=["Configuration", "Speed ÷ default", "95 % interval", "Rounds", "Chosen"],
            rows=[
                [name, f"{one.ratio:.3f}", _interval(one), str(one.rounds), "yes" if one.chosen else ""]
                for name, one in zip(names, comparisons, strict=True)
            ],
        ),
        note=words,
    )


def _interval(one: TrialComparison) -> str:
    return "unknown" if one.low is None or one.high is None else f"{one.low:.3f} to {one.high:.3f}"


def _trials_table(trials: Sequence[Trial]) -> Table:
    knobs = sorted({name for trial in trials for name in trial.parameters})
    chosen = evenly_spaced(len(trials), TABLE_ROWS)
    rows = [
        [
            str(trial.number + 1),
            decimal(trial.samples_per_s) if trial.samples_per_s is not None else "",
            "" if trial.relative is None else f"{trial.relative:.3f}",
            "yes" if trial.feasible else "no",
            *(str(trial.parameters.get(knob, "")) for knob in knobs),
            trial.note or "",
        ]
        for trial in (trials[at] for at in chosen)
    ]
    return Table(
        caption="Every trial"
        if len(chosen) == len(trials)
        else f"{count(len(chosen))} of {count(len(trials))} trials",
        head=["Trial", "Samples/s", "÷ default", "Feasible", *knobs, "Note"],
        rows=rows,
    )
