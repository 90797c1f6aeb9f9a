"""Who hears of a library call: terminal, log or listener."""

from __future__ import annotations

import io
import logging
import sys
from typing import Any

import pytest

import autobatch
from autobatch.api.listeners import LoggedProgress, listening
from autobatch.core.errors import InputError
from autobatch.core.progress import Broadcast, Progress
from tests.support.sample_run import a_probe, a_run


class ATerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Heard(Progress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_without_a_terminal_a_remark_is_a_warning_and_all_else_is_information(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "autobatch"), listening("auto") as progress:
        progress.note("the saved limit is stale")
        progress.probed(a_probe())
        progress.planned(a_run().plan)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "the saved limit is stale"),
        ("INFO", "fits: 93 samples at a time; 94 ran and do not"),
        ("INFO", "plan: batch 1,024 in 12 micro-batches (4 × 86, 8 × 85) · bf16 · lr 0.0003"),
    ]


def test_a_terminal_shows_the_progress_unless_it_is_not_wanted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for wanted, is_shown in (("auto", True), (True, True), (False, False)):
        stream = ATerminal()
        monkeypatch.setattr(sys, "stderr", stream)
        with listening(wanted) as progress:  # type: ignore[arg-type]
            progress.note("one remark")
        assert ("one remark" in stream.getvalue()) == is_shown


def test_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = ATerminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("RANK", "1")
    with listening("auto") as progress:
        progress.note("one remark")
    assert stream.getvalue() == ""


def test_a_listener_of_the_user_hears_everything_and_the_log_too(caplog: pytest.LogCaptureFixture) -> None:
    heard = Heard()
    with caplog.at_level(logging.INFO, "autobatch"), listening(heard) as progress:
        progress.note("one remark")
    assert heard.notes == ["one remark"]
    assert caplog.messages == ["one remark"]


def test_something_else_is_refused() -> None:
    wrong = r'progress must be "auto", True, False or an autobatch.Progress'
    with pytest.raises(InputError, match=wrong), listening(print):  # type: ignore[arg-type]
        pass


def test_a_call_tells_its_listener(tmp_path: Any) -> None:
    acts: list[str] = []

    class Acts(Progress):
        def doing(self, act: str) -> None:
            acts.append(act)

    result = autobatch.probe(max_micro_batch=2, device="cpu", progress=Acts())
    assert acts[0] == "opening the workload"
    assert str(result).startswith("fits       2 samples at a time in ")
    assert str(result).partition("; ")[2].startswith("more is not allowed by --max-micro-batch")
    assert repr(result).startswith("<ProbeResult: fits 2 samples at a time")
    assert len(repr(result)) < 200


def test_every_event_is_broadcast() -> None:
    events = [name for name, one in vars(Progress).items() if callable(one) and not name.startswith("_")]
    heard: list[tuple[int, str]] = []

    class Noting(Progress):
        def __init__(self, number: int) -> None:
            for event in events:
                setattr(self, event, lambda *_, event=event: heard.append((number, event)))

    both = Broadcast([Noting(0), Noting(1)])
    for event in events:
        getattr(both, event)(None)
    assert heard == [(number, event) for event in events for number in (0, 1)]
    assert {name for name in vars(LoggedProgress) if not name.startswith("_")} <= {*events}
