"""The metrics file, read back, and sinks, which never stop a run."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from autobatch import CheckpointError, Progress, StepRecord, Training, fit
from autobatch.training.metrics import Metrics
from autobatch.training.run import train
from tests.support.runs import keep_only, open_loop, resume, settings
from tests.support.sample_run import a_step
from tests.support.training import make_workload, points

INTERVAL_S = 0.2
"""Least time between two writes."""


def ticking(step: float):
    times = iter(range(10**6))
    return lambda: next(times) * step


def written(path: Path) -> list[StepRecord]:
    """Return the steps that a file of metrics has."""
    return [msgspec.json.decode(line, type=StepRecord) for line in path.read_bytes().splitlines()]


@pytest.mark.parametrize(("interval", "seen"), [(1.5, [1, 2, 3, 4, 5, 6]), (1 / 3, [1, 1, 1, 4, 4, 4])])
@pytest.mark.parametrize("last", ["flush", "close"])
def test_lines_are_appended_and_those_of_quick_steps_are_written_together(
    tmp_path: Path, interval: float, seen: list[int], last: str
) -> None:
    path, steps = tmp_path / "metrics.jsonl", [a_step(number) for number in range(1, 8)]
    metrics = Metrics(path, clock=ticking(interval * INTERVAL_S))
    found = []
    for step in steps[:6]:
        metrics.step(step)
        found.append(len(written(path)))
    assert found == seen
    getattr(metrics, last)()
    assert written(path) == steps[:6]
    metrics.close()
    again = Metrics(path)
    again.step(steps[6])
    again.close()
    assert written(path) == steps


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be written: Is a directory"):
        Metrics(tmp_path)


@pytest.mark.parametrize("seconds", [0.0, INTERVAL_S])
def test_a_full_disk_is_named(seconds: float) -> None:
    metrics = Metrics(Path("/dev/full"), clock=ticking(seconds))
    with pytest.raises(CheckpointError, match="No space left on device"):
        [metrics.step(a_step(number)) for number in (1, 2)] and metrics.flush()
    metrics.close()


def test_lines_after_the_resume_and_broken_lines_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    train(open_loop(), settings(tmp_path, checkpoint_every=2), Progress(), None)
    keep_only(tmp_path, 4)
    lines = path.read_bytes().splitlines()
    broken = [
        b"broken {", b'["step", 1]', b'{"loss": 1}', lines[0].replace(b"1", b'"low"'), b"[" * 100_000,
        b'{"x": ' * 100_000, b'{"step": ' + b"9" * 5000 + b"}", b"\xff", b"",
    ]  # fmt: skip
    path.write_bytes(b"\n".join([lines[0], *broken, *lines[1:], lines[5][:-9]]))
    _, done = resume(tmp_path)
    assert path.read_bytes().splitlines()[:4] == lines[:4]
    steps = written(path)
    assert [step.step for step in steps] == [1, 2, 3, 4, 5, 6]
    assert (done.first_loss, done.final_loss) == (steps[0].loss, steps[-1].loss)
    assert done.seconds == pytest.approx(sum(step.seconds for step in steps))
    assert (done.samples, done.skipped_steps) == (42, 0)


class Kept:
    """A sink that keeps what it receives, and raises at a step."""

    def __init__(self, fails_at: int = 0) -> None:
        self.seen: list[object] = []
        self.fails_at = fails_at

    def step(self, record: StepRecord) -> None:
        self.seen.append(record.step)
        if record.step == self.fails_at:
            raise ConnectionError("the tracker is gone")

    def end(self, training: Training) -> None:
        self.seen.append(training)

    def close(self) -> None:
        self.seen.append("closed")


@pytest.mark.filterwarnings("default")
def test_a_run_hands_its_records_to_every_sink_and_leaves_out_one_that_raises(tmp_path: Path) -> None:
    kept, broken = Kept(), Kept(fails_at=1)
    workload = make_workload(train_data=points(24), validation_data=points(8))
    options = {"target_batch": 8, "steps": 3, "trials": 0, "device": "cpu", "memory_budget": "1GiB"}
    result = fit(workload, **options, out=tmp_path / "run", sinks=[broken, kept], progress=False)
    assert kept.seen == [1, 2, 3, result.training, "closed"]
    assert result.training.validation
    assert broken.seen == [1]
