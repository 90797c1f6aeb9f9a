"""The metrics file, read back, and the records that a sink receives."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from autobatch import CheckpointError, StepRecord
from autobatch.training.metrics import Metrics, totals_of
from tests.support.runs import fit, keep_only, open_loop, resume, settings, train
from tests.support.sample_run import a_step
from tests.support.training import make_workload, points


def written(path: Path) -> list[StepRecord]:
    """Return the steps that a file of metrics has."""
    return [msgspec.json.decode(line, type=StepRecord) for line in path.read_bytes().splitlines()]


@pytest.mark.parametrize(("interval_s", "seen"), [(0.0, [1, 2, 3]), (3600.0, [1, 1, 1])])
def test_lines_are_appended_and_those_of_quick_steps_are_written_together(
    tmp_path: Path, interval_s: float, seen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autobatch.training.metrics.FLUSH_INTERVAL_S", interval_s)
    steps = [a_step(number, peak_reserved_bytes=9 - number) for number in range(1, 5)]
    path = tmp_path / "metrics.jsonl"
    metrics, counts = Metrics(path), []
    for step in steps[:3]:
        metrics.step(step)
        counts.append(len(written(path)))
    assert counts == seen
    metrics.close()
    again = Metrics(path)
    again.step(steps[3])
    again.close()
    assert written(path) == steps
    assert totals_of(path)["peak_reserved_bytes"] == 8


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be written: Is a directory"):
        Metrics(tmp_path)
    metrics = Metrics(Path("/dev/full"))
    with pytest.raises(CheckpointError, match="No space left on device"):
        metrics.step(a_step(1))
    metrics.close()  # does not hide the error


def test_lines_after_the_resume_and_broken_lines_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    train(open_loop(), settings(tmp_path, checkpoint_every=2))
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


def test_a_run_hands_its_records_to_a_sink(tmp_path: Path) -> None:
    seen: list[object] = []
    sink = SimpleNamespace(
        step=lambda record: seen.append(record.step), end=seen.append, close=lambda: seen.append("closed")
    )
    workload = make_workload(train_data=points(24), validation_data=points(8))
    result, _ = fit(workload, tmp_path, target_batch=8, steps=3, sinks=[sink])
    assert seen == [1, 2, 3, result.training, "closed"]
    assert result.training.validation
