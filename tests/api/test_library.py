"""The library calls: keywords become options, and progress reaches the terminal, the log or a listener."""

from __future__ import annotations

import builtins
import logging
import sys
from typing import Any

import pytest

import autobatch
from autobatch import InputError, Result
from autobatch.api import library
from tests.support.commandline import ATerminal
from tests.support.options import as_options, required
from tests.support.probes import Listener, work
from tests.support.sample_run import a_device, a_probe, a_run, a_step

COMMANDS = ("fit", "plan", "probe", "tune", "estimate")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect workload and options of each call, which returns a sample run."""
    found: list[Any] = []

    def run(workload: Any, options: Any) -> Result:
        found.append((workload, options))
        return Result(device=a_device(), probe=a_probe(), plan=a_run().plan)

    monkeypatch.setattr(library, "run_command", lambda call: run(call.workload, call.options))
    monkeypatch.setattr(library, "run_estimate", run)
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_keywords_become_the_options_of_the_command_and_an_unknown_one_is_refused(
    command: str, calls: list[Any]
) -> None:
    keywords = {**required(command), "memory_budget": "123MiB", "max_micro_batch": "3", "seed": 7}
    getattr(autobatch, command)("train.py:workload", **keywords)
    assert calls == [("train.py:workload", as_options(command, **keywords))]
    assert calls[0][1].max_micro_batch == 3
    getattr(autobatch, command)(**required(command))
    assert calls[1:] == [(None, as_options(command, **required(command)))], "the demo"
    with pytest.raises(InputError, match="max_microbatch"):
        getattr(autobatch, command)(max_microbatch=3, **required(command))


def test_a_workload_beside_snapshots_is_refused() -> None:
    with pytest.raises(InputError, match="in place of a workload, found both"):
        autobatch.estimate("train.py", snapshot="8.pickle")


def test_a_rule_that_cannot_be_called_is_refused(calls: list[Any]) -> None:
    rule: Any = 5
    with pytest.raises(InputError, match="until must be a function of the record of a step, found an int"):
        autobatch.fit(target_batch=8, until=rule)
    assert not calls


def test_without_a_terminal_a_remark_is_a_warning(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, "autobatch"):
        autobatch.plan(work(), target_batch=90, base_batch=60, max_micro_batch=6, device="cpu")
    assert capfd.readouterr() == ("", "")
    [record] = [one for one in caplog.records if "tuned for a batch of 60" in one.getMessage()]
    assert record.levelname == "WARNING"


@pytest.mark.parametrize(
    ("wanted", "rank", "is_shown"),
    [("auto", "0", True), (True, "0", True), (False, "0", False), ("auto", "1", False)],
)
def test_a_terminal_shows_the_progress_of_rank_0_unless_it_is_not_wanted(
    wanted: Any, rank: str, is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = ATerminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("RANK", rank)
    with library.listening(wanted) as progress:
        progress.note("one remark")
    assert ("one remark" in stream.getvalue()) == is_shown


class ZMQInteractiveShell:
    """The shell of a notebook, by its name."""


def test_a_notebook_shows_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    with library.listening("auto") as progress:
        progress.note("one remark")
        progress.stepped(a_step(3, loss=0.5), 3)
    out = capsys.readouterr().out
    assert "one remark" in out
    assert "3/3  loss 0.5  " in out


def test_a_listener_of_the_user_hears_everything() -> None:
    heard = Listener()
    found = autobatch.probe(work(), max_micro_batch=2, device="cpu", progress=heard)
    assert heard.sizes == [one.micro_batch for one in found.attempts]
    with pytest.raises(InputError, match=r'progress must be "auto", True, False or an autobatch.Progress'):
        autobatch.probe(progress=print)  # type: ignore[arg-type]
