"""The terminal: the lines of each event, what stays if it is quiet, and the live line."""

from __future__ import annotations

import inspect
import io
import re
from typing import Any

import msgspec
import pytest

from autobatch import Estimates, Progress, Result
from autobatch.core.records import MemoryHolder, RankEstimate, Trial
from autobatch.report.facts import final_facts
from autobatch.report.terminal import Terminal
from tests.support.sample_run import a_device, a_probe, a_run, a_step, an_estimate

SILENT = ("doing", "saved", "probed", "planned", "tuned")
"""Events that only a live line shows, and those whose facts are printed once, at the end."""
RUN = a_run()
TRIAL = Trial(
    number=1, samples_per_s=1234.5, relative=1.234, is_faster=True, parameters={"compile": "default"}
)
EVENTS = [name for name, one in vars(Progress).items() if inspect.isfunction(one) and name not in SILENT]
CALLS: dict[str, tuple[tuple[Any, ...], str]] = {
    "note": (("one line",), "note: one line"),
    "opened": (
        (a_device(),),
        "budget  6.00 GiB (set by --memory-budget 6GiB, without headroom)\nothers  3.30 GiB\n"
        "        process 4312 /usr/bin/python3 -m notebook: 3.00 GiB\n        a process: 311 MiB",
    ),
    "attempted": ((a_probe().attempts[0],), "probe         1  fits          peak  1.22 GiB    0.20 s"),
    "measured": (
        (TRIAL, 8, {"compile": "default"}),
        "trial   2/8  compiled: 1,234 samples/s (23 % faster)",
    ),
    "tried_rate": ((1, 10, 0.004, None, "diverged"), "rate    1/10  0.004  left out, diverged"),
    "stepped": ((a_step(12), 120), "step        12/120  loss 1."),
}


def shown(event: str, *arguments: object, quiet: bool = False) -> str:
    stream = io.StringIO()
    with Terminal(stream, quiet=quiet) as terminal:
        getattr(terminal, event)(*arguments)
    return stream.getvalue()


@pytest.mark.parametrize("event", EVENTS)
def test_every_event_is_shown_with_the_arguments_of_the_base_class(event: str) -> None:
    own, base = getattr(Terminal, event), getattr(Progress, event)
    assert own is not base
    assert list(inspect.signature(own).parameters) == list(inspect.signature(base).parameters)
    arguments, line = CALLS[event]
    assert line in shown(event, *arguments)
    assert shown(event, *arguments, quiet=True) == ""


def test_what_fits_the_plan_and_the_choice_of_the_tuner_are_printed_once_at_the_end() -> None:
    stream = io.StringIO()
    run = Result(device=RUN.device, probe=RUN.probe, plan=RUN.plan, tuning=RUN.tuning, training=RUN.training)
    with Terminal(stream) as terminal:
        terminal.probed(RUN.probe)
        terminal.planned(RUN.plan)
        terminal.tuned(RUN.tuning)
        assert stream.getvalue() == ""
        terminal.finish(run)
    for fact in final_facts(run):
        assert stream.getvalue().count(f"{fact.label:<11}{fact.text}\n") == 1


def test_a_run_without_a_terminal_prints_few_steps_and_every_incident() -> None:
    stream = io.StringIO()
    with Terminal(stream) as terminal:
        for step in range(1, 121):
            terminal.stepped(a_step(step, recovered=None, loss=None), 120)
    assert stream.getvalue().count("step ") == 10
    assert "skipped, the loss or the gradient is not finite" in shown(
        "stepped", a_step(7, applied=False), 120
    )
    assert shown("stepped", a_step(7, applied=False, count=0.0), 120) == "", "nothing was counted"


@pytest.mark.parametrize("workload", ["train.py:workload", None])
def test_the_first_line_names_the_workload(workload: str | None) -> None:
    text = shown("begin", workload)
    assert text.startswith("autobatch 0.")
    assert ("train.py:workload\n" in text.splitlines(keepends=True)[0]) == (workload is not None)
    assert ("--memory-budget" in text) == (workload is None)
    assert max(map(len, text.splitlines())) <= 80


def test_the_result_is_printed_even_if_quiet() -> None:
    result = Result(device=a_device(), probe=a_probe(), command="autobatch probe")
    assert shown("finish", result, quiet=True) == (
        "fits       93 samples at a time in 6.00 GiB; 94 ran and do not\nrun again  autobatch probe\n"
    )


HOSTILE = "train[/x] [bold]:smile: \x1b[2J\x9b31m\nlast"
HARMLESS = r"train[/x] [bold]:smile: \x1b[2J\x9b31m\nlast"


class ATerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [io.StringIO, ATerminal])
def test_the_name_of_another_process_is_shown_and_never_obeyed(
    kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    stream = kind()
    holders = [
        MemoryHolder(pid=7, name=HOSTILE, used_bytes=1 << 30),
        MemoryHolder(pid=8, name="x" * 100_000, used_bytes=1 << 30),
    ]
    with Terminal(stream) as terminal:
        terminal.opened(a_device(holders=holders))
        terminal.note(HOSTILE)
    shown = stream.getvalue()
    assert f"process 7 {HARMLESS}: 1.00 GiB" in shown
    assert f"note: {HARMLESS}" in shown
    assert "\x1b[2J\x9b" not in shown
    assert len(shown) < 5000


def test_an_estimate_is_shown_whole_on_a_narrow_terminal_with_foreign_names_as_they_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    one = msgspec.structs.replace(
        an_estimate(), memory={"activations": 1}, modules={HOSTILE: 1 << 30}, profile=HOSTILE
    )
    for kind in (io.StringIO, ATerminal):
        stream = kind()
        with Terminal(stream) as terminal:
            ranks = [
                RankEstimate(
                    profile="a100", world_size=8, parallel="shard", budget_bytes=1, micro_batch=64,
                    peak_reserved_bytes=1,
                )
            ]  # fmt: skip
            terminal.estimated(Estimates(estimates=[one], notes=[HOSTILE], over_ranks=ranks))
            terminal.finish(Result(device=a_device(), command=f"autobatch fit {HOSTILE}"))
        shown = stream.getvalue()
        assert "\x1b[2J" not in shown
        lines = [re.sub(r"\x1b\[\d*m", "", line) for line in shown.splitlines()]
        assert any(line.split() == ["a100", "64"] for line in lines)
        if kind is ATerminal:
            assert "last: 90 samples at a time in 22.0 GiB" in " ".join(shown.split())
            assert all(len(line) <= 40 or HARMLESS in line for line in lines), "a line in place of a row"
        else:
            assert [HARMLESS, "22.0 GiB", "90", "86 to 93", "21.0 GiB", "bf16", "12"] in [
                line.split("\t") for line in lines
            ]


def last_line(width: int, *events: tuple[str, Any], encoding: str = "utf-8") -> str:
    """Return the live line of a terminal after some events."""

    class Encoded(ATerminal):
        @property
        def encoding(self) -> str:  # type: ignore[override]
            return encoding

    stream = Encoded()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("COLUMNS", str(width))
        patched.setenv("TERM", "xterm")
        patched.setenv("NO_COLOR", "1")
        with Terminal(stream) as terminal:
            for event, arguments in events:
                getattr(terminal, event)(*arguments)
            terminal._line._bar.refresh()
            text = stream.getvalue()
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", text).replace("\r", "\n").rstrip().splitlines()[-1]


A_STEP = a_step(40, samples_per_s=1824.0, oom_recoveries=0, validation={"loss": 0.5, "accuracy": 0.91})
STEPS = (("saved", (40,)), ("stepped", (A_STEP, 120)), ("stepped", (a_step(50, samples_per_s=1824.0), 120)))


@pytest.mark.parametrize(
    ("width", "figures"),
    [
        (60, ["loss"]),
        (80, ["loss", "1,824 samples/s"]),
        (120, ["loss", "1,824 samples/s", "1 recovery", "GiB"]),
        (200, ["loss", "samples/s", "1 recovery", "GiB", "held-out accuracy 91.00 %", "saved 40"]),
    ],
)
def test_the_bar_of_the_training_shows_what_there_is_room_for(width: int, figures: list[str]) -> None:
    text = last_line(width, *STEPS)
    for figure in ["training", "50/120", *figures]:
        assert figure in text
    assert len(text) <= width


def test_the_line_shows_the_act_and_the_time_since_it_began() -> None:
    long = "comparing the best with the default, round 2 of at most 9"
    text = last_line(60, ("doing", (long,)))
    assert "comparing the best" in text
    assert text.endswith("0:00:00")
    assert "saving a checkpoint" in last_line(100, *STEPS, ("doing", ("saving a checkpoint",)))
