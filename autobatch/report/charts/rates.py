"""The chart and the table of the search for a learning rate."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from autobatch.core.records.tuning import LrTrial, LrTuning
from autobatch.report.charts.drawing import Mark, Picture, Table, color, draw, plain_axes
from autobatch.report.words import decimal, plural


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
    # As on the terminal; records count from 0, as Optuna does.
    return [str(one.number + 1), decimal(one.learning_rate), _loss(one.loss), one.note or ""]


def _loss(figure: float | None) -> str:
    return "not finite" if figure is None else decimal(figure)


def _points(pairs: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [rate for rate, _ in pairs], [loss for _, loss in pairs]
