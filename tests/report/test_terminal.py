"""The terminal: the lines of each event, and what stays if it is quiet."""

from __future__ import annotations

import inspect
import io
from typing import Any

import msgspec
import pytest

from autobatch import Estimates, Progress, Result
from autobatch.core.records import MemoryHolder, Trial
from autobatch.report.facts import final_facts
from autobatch.report.terminal import PLAIN_LINES, Terminal
from tests.support.sample_run import a_device, a_probe, a_run, a_step, an_estimate

SILENT = ("doing", "saved", "probed", "planned", "tuned")
"""Events that only a live line shows, and those whose facts are printed once, at the end."""
RUN = a_run()
TRIAL = Trial(number=1, samples_per_s=1234.5, relative=1.234, parameters={"compile": "default"})
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
    "tried_rate": ((1, 10, 0.004, 1.25, None), "rate    1/10  0.004  loss 1.25"),
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


def test_trials_that_failed_are_left_out_with_their_reason() -> None:
    failed = Trial(number=0, samples_per_s=None, feasible=False, note="too large")
    assert "default: left out, too large" in shown("measured", failed, 8, {})
    assert "left out, diverged" in shown("tried_rate", 1, 8, 0.1, None, "diverged")


def test_a_run_without_a_terminal_prints_few_steps_and_every_incident() -> None:
    stream = io.StringIO()
    with Terminal(stream) as terminal:
        for step in range(1, 121):
            terminal.stepped(a_step(step, recovered=None, loss=None), 120)
    assert stream.getvalue().count("step ") == PLAIN_LINES
    assert "repeated at micro-batch 64: CUDA out of memory" in shown("stepped", a_step(41), 120)
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


def test_foreign_names_of_an_estimate_and_a_result_are_shown_as_they_read() -> None:
    one = msgspec.structs.replace(
        an_estimate(), memory={"activations": 1}, modules={HOSTILE: 1 << 30}, profile=HOSTILE
    )
    stream = io.StringIO()
    with Terminal(stream) as terminal:
        terminal.estimated(Estimates(estimates=[one], notes=[HOSTILE]))
        terminal.finish(Result(device=a_device(), command=f"autobatch fit {HOSTILE}"))
    assert stream.getvalue().count(HARMLESS) == 4
    assert "\x1b" not in stream.getvalue()
