"""The terminal: the lines of each event, what stays if it is quiet, and the live line."""

from __future__ import annotations

import inspect
import io
import re
from typing import Any

import pytest

from autobatch import Estimates, Progress, Result
from autobatch.core.records import LrTrial, MemoryHolder, Remedy, Trial
from autobatch.report.facts import final_facts
from autobatch.report.terminal import Terminal
from tests.support.commandline import ATerminal
from tests.support.planted import PLANTED
from tests.support.sample_run import a_device, a_probe, a_run, a_step, an_estimate

SILENT = ("doing", "saved")
"""Events that only a live line shows."""
EVENTS = [name for name, event in vars(Progress).items() if inspect.isfunction(event) and name not in SILENT]
TRIAL = Trial(number=1, samples_per_s=1234.5, relative=1.234, parameters={"precision": "bf16"})
RATE = LrTrial(number=0, learning_rate=0.004, note="diverged")
CALLS: dict[str, tuple[tuple[Any, ...], str]] = {
    "note": (("one line",), "note: one line"),
    "opened": ((a_device(),), "process 4312 /usr/bin/python3 -m notebook: 3.00 GiB"),
    "attempted": ((a_probe().attempts[0],), "probe         1  fits          peak  1.22 GiB    0.20 s"),
    "measured": ((TRIAL, 8, TRIAL.parameters), "trial   2/8  bf16: 1.23 × the default"),
    "tried_rate": ((RATE, 10), "rate    1/10  0.004  left out, diverged"),
    "stepped": ((a_step(12), 120), "step        12/120  loss 1."),
}


@pytest.fixture(autouse=True)
def a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"COLUMNS": "80", "TERM": "xterm", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)


def shown(*calls: tuple[Any, ...], quiet: bool = False, stream: io.StringIO | None = None) -> str:
    """Return what some events print, without the codes of styles."""
    stream = stream or io.StringIO()
    with Terminal(stream, quiet=quiet) as terminal:
        for event, *arguments in calls:
            getattr(terminal, event)(*arguments)
    return re.sub(r"\x1b\[\d+m", "", stream.getvalue())


@pytest.mark.parametrize("event", EVENTS)
def test_every_event_is_shown_with_the_arguments_of_the_base_class(event: str) -> None:
    own, base = getattr(Terminal, event), getattr(Progress, event)
    assert own is not base
    assert list(inspect.signature(own).parameters) == list(inspect.signature(base).parameters)
    arguments, line = CALLS[event]
    assert line in shown((event, *arguments))
    assert shown((event, *arguments), quiet=True) == ""


def test_the_facts_are_printed_once_at_the_end_also_in_a_terminal_and_if_quiet() -> None:
    known = a_run()
    names = ("device", "probe", "plan", "tuning", "training", "command")
    run = Result(**{name: getattr(known, name) for name in names})
    piped = shown(("finish", run), quiet=True)
    for fact in final_facts(run):
        assert piped.count(f"{fact.label:<11}{fact.text}\n") == 1
    folded = shown(("finish", run), quiet=True, stream=ATerminal())
    assert folded.split() == piped.split()
    assert f"{run.command}\n" in folded, "a command is copied whole"
    assert max(len(line) for line in folded.splitlines() if "fit " not in line) <= 80


def test_a_run_without_a_terminal_prints_few_steps_and_every_incident() -> None:
    steps = [("stepped", a_step(step, loss=None), 120) for step in range(1, 121)]
    assert shown(*steps).count("step ") == 10
    assert "skipped, the loss or" in shown(("stepped", a_step(7, applied=False), 120))
    assert shown(("stepped", a_step(7, applied=False, count=0.0), 120)) == "", "nothing was counted"


@pytest.mark.parametrize("kind", [io.StringIO, ATerminal])
def test_foreign_names_are_shown_and_never_obeyed(kind: type[io.StringIO]) -> None:
    holders = [MemoryHolder(pid=7, name=name, used_bytes=1 << 30) for name in (PLANTED, "x" * 100_000)]
    device = a_device(holders=holders)
    one = an_estimate(memory={"activations": 1}, modules={PLANTED: 1 << 30}, profile=PLANTED)
    estimates = Estimates(estimates=[one], notes=[PLANTED, "[/x] [bold]:smile:"])
    result = Result(device=device, probe=a_probe(), command=f"autobatch fit {PLANTED}")
    for event in (("opened", device), ("note", PLANTED), ("estimated", estimates), ("finish", result)):
        text = shown(event, stream=kind())
        assert "<script>alert(1)" in "".join(text.split())
        assert all(line.isprintable() for line in re.sub(r"\r|\x1b\[[\d;?]*[A-Za-z]", "", text).split("\n"))
        assert len(text) < 6000
        assert ("[/x] [bold]:smile:" in text) == (event[0] == "estimated")


def test_an_estimate_has_what_would_help_and_where_memory_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remedy = Remedy(name="bf16", advice="--precision bf16", micro_batch=128, peak_bytes=1 << 30)
    none = an_estimate(profile="old", fits=False, micro_batch=0, plan=None)
    both = Estimates(estimates=[an_estimate(profile="new"), none])
    rows = [line.split() for line in shown(("estimated", both), quiet=True).splitlines()]
    assert any(row[:6] == ["new", "22.0", "GiB", "90", "86", "to"] for row in rows)
    assert any(row[:6] == ["old", "22.0", "GiB", "does", "not", "fit"] for row in rows)
    monkeypatch.setenv("COLUMNS", "40")
    narrow = shown(("estimated", both), stream=ATerminal())
    assert max(map(len, narrow.splitlines())) <= 40
    assert {"GPU", *narrow.split()} == {word for row in rows for word in row}, "nothing is cut"
    alone = Estimates(
        estimates=[an_estimate(memory={"weights": 3, "activations": 9}, modules={"0": 9}, remedies=[remedy])]
    )
    text = " ".join(shown(("estimated", alone)).split())
    assert "weights 3 B 25% activations 9 B 75% model[0] 9 B 75%" in text
    assert text.endswith("with a change: 128 --precision bf16 (peak 1.00 GiB)")


def last_line(width: int, *events: tuple[Any, ...]) -> str:
    """Return the live line of a terminal after some events."""
    stream = ATerminal()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("COLUMNS", str(width))
        with Terminal(stream) as terminal:
            for event, *arguments in events:
                getattr(terminal, event)(*arguments)
            assert terminal._line is not None
            terminal._line._bar.refresh()
            text = stream.getvalue()
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", text).replace("\r", "\n").rstrip().splitlines()[-1]


def test_the_live_line_shows_the_act_its_time_and_the_figures_there_is_room_for() -> None:
    held_out = a_step(40, samples_per_s=1824.0, oom_recoveries=0, validation={"loss": 0.5, "accuracy": 0.91})
    steps = (("saved", 40), ("stepped", held_out, 120), ("stepped", a_step(50, samples_per_s=1824.0), 120))
    figures = ["samples/s", "1 recovery", "GiB", "held-out accuracy 91.00 %", "saved 40"]
    for width, known in ((60, 0), (80, 1), (200, 5)):
        text = last_line(width, *steps)
        assert len(text) <= width
        assert all(figure in text for figure in ("training", "50/120", "loss"))
        assert [figure for figure in figures if figure in text] == figures[:known]
    text = last_line(60, ("doing", "comparing the best with the default, round 2 of at most 9"))
    assert "comparing the best" in text
    assert text.endswith("0:00:00")
    assert "saving a checkpoint" in last_line(100, *steps, ("doing", "saving a checkpoint"))
