"""The figure of the learning rate."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from autobatch.records import RateTrial, RateTuning
from autobatch.report.picture import Mark, Picture, Table
from autobatch.report.svg import color, draw, plain_axes
from autobatch.report.verdict import decimal, many


def rates_figure(found: RateTuning) -> Picture | None:
    """Draw the loss after a short run against the learning rate; ``None`` where nothing was tried."""
    if not found.history:
        return None
    trained = [
        (one.learning_rate, one.loss) for one in found.history if one.feasible and one.loss is not None
    ]
    tried = [one.learning_rate for one in found.history]
    refused = [one.learning_rate for one in found.history if not one.feasible]
    chosen = [point for point in trained if point[0] == found.best]

    def paint(figure: Figure, narrow: bool) -> None:
        axes = plain_axes(figure, xlabel="learning rate", title=f"loss at the end of {found.steps} steps")
        axes.set_xscale("log")
        axes.set_xlim(0.8 * min(*tried, found.default / 4), 1.25 * max(*tried, found.default * 4))
        axes.axvline(found.default, color=color("muted"), linestyle=":", linewidth=1.6)
        axes.plot(*_points(sorted(trained)), "-", color=color("soft"), linewidth=2)
        axes.plot(*_points(trained), "o", color=color("accent"), markersize=6)
        axes.plot(
            *_points(chosen), "o", color=color("accent"), markersize=14, markerfacecolor="none",
            markeredgewidth=1.8,
        )  # fmt: skip
        axes.plot(
            refused, [0.96] * len(refused), "x", color=color("bad"), markersize=8, markeredgewidth=2,
            transform=axes.get_xaxis_transform(),
        )  # fmt: skip
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if narrow else (1.0, 3.0)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:.3g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.margins(y=0.2)

    title = "Loss by learning rate"
    words = f"{many(len(trained), 'learning rate')} trained to the end, {len(refused)} did not."
    legend = [Mark(role="accent", label="a run", shape="dot")] if trained else []
    legend += [Mark(role="accent", label=f"taken, {decimal(found.best)}", shape="ring")] if chosen else []
    legend.append(Mark(role="muted", label=f"the plan's own, {decimal(found.default)}", shape="dash"))
    legend += [Mark(role="bad", label="diverged, or ended early", shape="cross")] if refused else []
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


def pairs_table(found: RateTuning) -> Table:
    """Put what decided into a table."""
    return Table(
        caption="The best of the trials beside the plan's own learning rate, on the same data",
        head=["Seed of the data", "Loss, the plan's own", "Loss, the best", "Gain, of the fall of the loss"],
        rows=[
            [str(pair.seed), _loss(pair.default_loss), _loss(pair.other_loss), f"{pair.gain:+.1%}"]
            for pair in found.pairs
        ],
    )


def _row(one: RateTrial) -> list[str]:
    return [str(one.number), decimal(one.learning_rate), _loss(one.loss), one.note or ""]


def _loss(figure: float | None) -> str:
    return "not finite" if figure is None else decimal(figure)


def _points(pairs: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [rate for rate, _ in pairs], [loss for _, loss in pairs]
