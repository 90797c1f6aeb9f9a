"""Sinks of the user: what they receive, and that none of them ends a run."""

from __future__ import annotations

from pathlib import Path

import pytest

import autobatch
from autobatch import StepRecord, Training
from autobatch.core.progress import Progress
from autobatch.training.sinks import UserSinks
from tests.support.sample_run import a_run, a_step
from tests.support.training import make_workload, points


class Kept:
    """A sink that keeps what it receives."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.ended: Training | None = None
        self.closed = 0

    def step(self, record: StepRecord) -> None:
        self.steps.append(record.step)

    def end(self, training: Training) -> None:
        self.ended = training

    def close(self) -> None:
        self.closed += 1


class Broken(Kept):
    def step(self, record: StepRecord) -> None:
        super().step(record)
        raise ConnectionError("the tracker is gone")


class Notes(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


def test_a_sink_that_raises_is_left_out_with_a_note_and_the_others_go_on() -> None:
    notes, kept, broken = Notes(), Kept(), Broken()
    sinks = UserSinks([broken, kept], notes)
    for step in (1, 2):
        sinks.step(a_step(step))
    sinks.end(a_run().training)
    sinks.close()
    assert (kept.steps, kept.closed, broken.steps, broken.closed) == ([1, 2], 1, [1], 0)
    assert notes.lines == [
        "Broken.step raised ConnectionError: the tracker is gone. The run continues without this sink"
    ]


@pytest.mark.filterwarnings("default")
def test_a_run_hands_every_step_and_its_summary_to_a_sink_and_closes_it(tmp_path: Path) -> None:
    kept = Kept()
    result = autobatch.fit(
        make_workload(train_data=points(24), validation_data=points(8)),
        target_batch=8,
        steps=3,
        trials=0,
        device="cpu",
        memory_budget="1GiB",
        out=tmp_path / "run",
        sinks=[kept],
        progress=False,
    )
    assert kept.steps == [1, 2, 3]
    assert kept.ended == result.training
    assert kept.ended is not None
    assert kept.ended.validation
    assert kept.closed == 1
