"""The stage that lowers a limit to one that real batches survive."""

from __future__ import annotations

import math

import pytest

from autobatch.core.progress import Progress
from autobatch.core.records import Attempt, Probe
from autobatch.search.one_probe import Limit
from autobatch.search.sizes import survive
from autobatch.search.sizes.real_batches import Order, Survivor
from autobatch.search.sizes.survive import survive_real_batches
from autobatch.setup.attempt import Outcome
from autobatch.setup.session import ThisProcess
from tests.support.ragged import ragged_workload
from tests.support.training import make_setup


class Listening(Progress):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def note(self, text: str) -> None:
        self.heard.append(text)

    def attempted(self, attempt: Attempt) -> None:
        self.heard.append(f"ran {attempt.micro_batch}")


def limit_of(micro_batch: int, **changes) -> Limit:
    fields = {"limited_by": "memory", "upper_bound_by": "run", "predicted_micro_batch": None, "oom_count": 0}
    return Limit(Probe(micro_batch=micro_batch, attempts=[], **{**fields, **changes}))


def outcome(process, micro_batch: int, *, fits: bool = True) -> Outcome:
    return Outcome(
        Attempt(
            micro_batch=micro_batch, fits=fits, peak_allocated_bytes=1, peak_reserved_bytes=1, seconds=0.0
        ),
        None,
    )


def survived(monkeypatch, found: Survivor | None, *, target: int | None = 256, fits: bool = True, **changes):
    monkeypatch.setattr(survive, "find_survivor", lambda *_: found)
    monkeypatch.setattr(
        survive.questions, "run_attempt", lambda process, size: outcome(process, size, fits=fits)
    )
    listener = Listening()
    process = ThisProcess(make_setup(ragged_workload()))
    limit = survive_real_batches(process, limit_of(30, **changes), Order(target, 0), progress=listener)
    return limit.probe, listener.heard


def test_a_lower_survivor_runs_once_and_becomes_the_answer(monkeypatch) -> None:
    probe, heard = survived(monkeypatch, Survivor(18, 300, True))
    assert (probe.micro_batch, probe.upper_bound_by) == (18, "replay")
    assert [one.micro_batch for one in probe.attempts] == [18]
    assert (probe.real_batches.micro_batch_alone, probe.real_batches.batches) == (30, 300)
    assert heard[0] == "ran 18"
    assert "30 fits on the most expensive samples alone" in heard[1]


def test_a_plan_of_as_many_steps_keeps_the_limit(monkeypatch) -> None:
    assert math.ceil(256 / 29) == math.ceil(256 / 30)
    probe, heard = survived(monkeypatch, Survivor(29, 300, True))
    assert probe.micro_batch == 30
    assert probe.real_batches.batches == 300
    assert heard == []
    assert survived(monkeypatch, Survivor(29, 300, True), target=None)[0].micro_batch == 29


@pytest.mark.parametrize("found", [None, Survivor(18, 300, True)])
def test_without_a_survivor_that_runs_the_limit_stays(monkeypatch, found) -> None:
    probe, _ = survived(monkeypatch, found, fits=False)
    assert probe.micro_batch == 30


def test_an_interrupted_probe_is_not_checked(monkeypatch) -> None:
    probe, _ = survived(monkeypatch, Survivor(18, 300, True), stopped_by="time limit")
    assert (probe.micro_batch, probe.real_batches) == (30, None)


def test_an_interrupt_keeps_the_limit_of_the_most_expensive_samples(monkeypatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(survive, "find_survivor", interrupted)
    process, listener = ThisProcess(make_setup(ragged_workload())), Listening()
    limit = survive_real_batches(process, limit_of(30), Order(256, 0), progress=listener)
    assert (limit.probe.micro_batch, limit.probe.stopped_by) == (30, "interrupt")
    assert "not checked" in listener.heard[0]
