"""The charts of tuning."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from autobatch.core.records import LrTrial, LrTuning, Trial
from autobatch.report.charts.drawing import Mark, Picture, Table, color, draw, evenly_spaced, plain_axes
from autobatch.report.sentences import count, decimal, plural

TABLE_ROWS = 200


def trials_figure(trials: Sequence[Trial]) -> Picture | None:
    """Draw the throughput of each trial and the best so far. Return None if there are no trials.

    Trials count from 1 here, as on the terminal. Their records count from 0, as in Optuna.
    """
    if not trials:
        return None
    measured = [(t.number + 1, t.samples_per_s) for t in trials if t.feasible and t.samples_per_s is not None]
    infeasible = [trial.number + 1 for trial in trials if not trial.feasible]

    def paint(figure: Figure, narrow: bool) -> None:
        axes = plain_axes(figure, xlabel="trial", title="samples/s")
        x = [number for number, _ in measured]
        best = list(itertools.accumulate((speed for _, speed in measured), max))
        if len(x) > 1:
            axes.step(x, best, where="post", color=color("soft"), linewidth=3)
        axes.plot(x, [speed for _, speed in measured], "o", color=color("accent"), markersize=6)
        axes.plot(
            infeasible, [0.04] * len(infeasible), "x", color=color("bad"), markersize=8, markeredgewidth=2,
            transform=axes.get_xaxis_transform(),
        )  # fmt: skip
        axes.xaxis.set_major_locator(MaxNLocator(4 if narrow else 8, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.margins(x=0.04, y=0.2)

    title = "Throughput by trial"
    words = f"{plural(len(measured), 'trial')} measured, {len(infeasible)} infeasible."
    legend = [Mark(role="accent", label="trial", shape="dot"), Mark(role="soft", label="best so far")]
    legend += [Mark(role="bad", label="infeasible", shape="cross")] if infeasible else []
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


def importance_figure(importance: dict[str, float]) -> Picture | None:
    """Draw the importance of each knob, largest first. Return None if it is unknown."""
    if not importance:
        return None
    ranked = sorted(importance.items(), key=lambda item: (-item[1], item[0]))

    def paint(figure: Figure, narrow: bool) -> None:
        axes = plain_axes(figure, title="share of the variation in throughput")
        axes.grid(visible=False)
        places = range(len(ranked))
        axes.barh(places, [share for _, share in ranked], height=0.55, color=color("accent"), linewidth=0)
        axes.set_yticks(places, [name for name, _ in ranked])
        axes.set_ylim(len(ranked) - 0.5, -0.5)
        axes.set_xlim(0, 1.15 * max(share for _, share in ranked) or 1)
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        for place, (_, share) in enumerate(ranked):
            axes.annotate(
                f"{share:.0%}", (share, place), xytext=(6, 0), textcoords="offset points", va="center"
            )

    title = "Importance of each knob"
    words = f"{ranked[0][0]} explains the most, {ranked[0][1]:.0%} of the variation in throughput."
    table = Table(
        caption="Share of the variation in throughput that each knob explains",
        head=["Knob", "Share"],
        rows=[[name, f"{share:.1%}"] for name, share in ranked],
    )
    tall = 46 + 32 * len(ranked)
    svg = draw("importance", title, words, paint, heights=(tall, tall))
    return Picture(
        slug="importance", title=title, description=words, svg=svg, legend=[], table=table, note=words
    )


def _trials_table(trials: Sequence[Trial]) -> Table:
    knobs = sorted({name for trial in trials for name in trial.parameters})
    chosen = evenly_spaced(len(trials), TABLE_ROWS)
    rows = [
        [
            str(trial.number + 1),
            decimal(trial.samples_per_s) if trial.samples_per_s is not None else "",
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
        head=["Trial", "Samples/s", "Feasible", *knobs, "Note"],
        rows=rows,
    )


def rates_figure(found: LrTuning) -> Picture | None:
    """Draw the loss after a short run against the learning rate. Return None if there are no trials."""
    if not found.history:
        return None
    trained = [
        (one.learning_rate, one.loss) for one in found.history if one.feasible and one.loss is not None
    ]
    rates = [one.learning_rate for one in found.history]
    infeasible = [one.learning_rate for one in found.history if not one.feasible]
    chosen = [point for point in trained if point[0] == found.best]

    def paint(figure: Figure, narrow: bool) -> None:
        axes = plain_axes(figure, xlabel="learning rate", title=f"loss at the end of {found.steps} steps")
        axes.set_xscale("log")
        axes.set_xlim(0.8 * min(*rates, found.default / 4), 1.25 * max(*rates, found.default * 4))
        axes.axvline(found.default, color=color("muted"), linestyle=":", linewidth=1.6)
        axes.plot(*_points(sorted(trained)), "-", color=color("soft"), linewidth=2)
        axes.plot(*_points(trained), "o", color=color("accent"), markersize=6)
        axes.plot(
            *_points(chosen), "o", color=color("accent"), markersize=14, markerfacecolor="none",
            markeredgewidth=1.8,
        )  # fmt: skip
        axes.plot(
            infeasible, [0.96] * len(infeasible), "x", color=color("bad"), markersize=8, markeredgewidth=2,
            transform=axes.get_xaxis_transform(),
        )  # fmt: skip
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if narrow else (1.0, 3.0)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:.3g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.margins(y=0.2)

    title = "Loss by learning rate"
    words = f"{plural(len(trained), 'learning rate')} trained to the end, {len(infeasible)} did not."
    legend = [Mark(role="accent", label="run", shape="dot")] if trained else []
    legend += [Mark(role="accent", label=f"chosen, {decimal(found.best)}", shape="ring")] if chosen else []
    legend.append(Mark(role="muted", label=f"default, {decimal(found.default)}", shape="dash"))
    legend += [Mark(role="bad", label="diverged or stopped early", shape="cross")] if infeasible else []
    return Picture(
        slug="rates",
        title=title,
        description=words,
        svg=draw("rates", title, words, paint, heights=(280, 240)),
        legend=legend,
        table=Table(
            caption="Every learning rate",
            head=["Trial", "Learning rate", "Loss", "Note"],
            rows=[_row(one) for one in found.history],
        ),
        note=words,
    )


def pairs_table(found: LrTuning) -> Table:
    """Build the table of the runs that decided between the default and the best learning rate."""
    return Table(
        caption="The default and the best learning rate on the same data",
        head=["Data seed", "Default loss", "Best loss", "Gain, share of the loss reduction"],
        rows=[
            [str(pair.seed), _loss(pair.default_loss), _loss(pair.other_loss), f"{pair.gain:+.1%}"]
            for pair in found.pairs
        ],
    )


def _row(one: LrTrial) -> list[str]:
    return [str(one.number), decimal(one.learning_rate), _loss(one.loss), one.note or ""]


def _loss(figure: float | None) -> str:
    return "not finite" if figure is None else decimal(figure)


def _points(pairs: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [rate for rate, _ in pairs], [loss for _, loss in pairs]
