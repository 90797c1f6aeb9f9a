"""The live line: the current act, and as many figures of a step as there is room for."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from autobatch.report.live import LiveLine
from tests.support.sample_run import a_step


def line_of(width: int, encoding: str = "utf-8") -> tuple[LiveLine, Console]:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=stream, force_terminal=True, width=width, highlight=False)
    return LiveLine(console), console


def plain(line: LiveLine, console: Console) -> str:
    text = "".join(segment.text for segment in console.render(line._bar.get_renderable()))
    return text.rstrip("\n").rstrip()


def test_an_act_is_shown_with_the_time_since_it_began() -> None:
    line, console = line_of(80)
    line.act("trial 2 of 8", "best so far 31 % faster")
    text = plain(line, console)
    assert "trial 2 of 8" in text
    assert "best so far 31 % faster" in text
    assert text.endswith("0:00:00")
    assert "0/" not in text


@pytest.mark.parametrize(
    ("width", "figures"),
    [
        (60, ["loss"]),
        (80, ["loss", "1,824 samples/s"]),
        (120, ["loss", "1,824 samples/s", "1 recovery", "GiB"]),
        (200, ["loss", "samples/s", "1 recovery", "GiB", "held-out accuracy 91.00 %", "saved 40"]),
    ],
)
def test_the_bar_shows_what_there_is_room_for_in_one_line(width: int, figures: list[str]) -> None:
    line, console = line_of(width)
    line.save(40)
    line.train(
        a_step(40, samples_per_s=1824.0, oom_recoveries=0, validation={"loss": 0.5, "accuracy": 0.91}), 120
    )
    line.train(a_step(50, samples_per_s=1824.0), 120)
    text = plain(line, console)
    for figure in ["training", "50/120", *figures]:
        assert figure in text
    assert "\n" not in text
    assert len(text) <= width


def test_a_long_act_is_cut_before_the_time_and_its_figures_go_first() -> None:
    line, console = line_of(60)
    line.act("comparing the best 3 with the default, round 2 of at most 8", "best so far 31 % faster")
    text = plain(line, console)
    assert text.endswith("0:00:00")
    assert "comparing the best 3 with the default" in text
    assert "best so far" not in text
    assert len(text) <= 60


def test_an_act_during_the_training_keeps_the_bar() -> None:
    line, console = line_of(100)
    line.train(a_step(50), 120)
    line.act("saving a checkpoint")
    assert "saving a checkpoint" in plain(line, console)
    assert "50/120" in plain(line, console)


def test_an_ascii_terminal_gets_ascii() -> None:
    line, console = line_of(80, "ascii")
    line.act("running 342 × 3 samples …")
    text = plain(line, console)
    assert text.isascii()
    assert "running 342" in text
