"""The metrics file and TensorBoard, read back; TensorBoard never stops a run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import msgspec
import pytest

import autobatch
from autobatch import CheckpointError, StepRecord, Training
from autobatch.training.metrics import (
    TENSORBOARD_INTERVAL_S,
    WRITE_INTERVAL_S,
    Metrics,
    RunTotals,
    open_tensorboard,
    rewind_metrics,
    scalars,
)
from tests.support.sample_run import a_run, a_step
from tests.support.training import make_workload, points


class Writer:
    """Stand-in for ``SummaryWriter`` that keeps the events."""

    opened: ClassVar[list[Writer]] = []

    def __init__(self, folder: str, purge_step: int | None = None) -> None:
        self.folder, self.purge_step, self.closed = folder, purge_step, False
        self.events: list[tuple[int, dict[str, float]]] = []
        self.file_writer = self
        Writer.opened.append(self)

    def add_summary(self, summary, step: int) -> None:
        self.events.append((step, {one.tag: one.simple_value for one in summary.value}))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def installed(monkeypatch):
    """Install as much of TensorBoard as a writer needs."""
    Writer.opened.clear()

    class Summary(SimpleNamespace):
        Value = SimpleNamespace

    parts = "tensorboard", "tensorboard.compat", "tensorboard.compat.proto"
    for name in parts:
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, f"{parts[-1]}.summary_pb2", SimpleNamespace(Summary=Summary))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))


def ticking(step: float):
    times = iter(range(10**6))
    return lambda: next(times) * step


def written(path: Path) -> list[int]:
    """Return the steps that a file of metrics has."""
    return [msgspec.json.decode(line, type=StepRecord).step for line in path.read_bytes().splitlines()]


@pytest.mark.parametrize(("interval", "seen"), [(1.5, [1, 2, 3, 4, 5, 6]), (1 / 3, [1, 1, 1, 4, 4, 4])])
@pytest.mark.parametrize("last", ["flush", "close"])
def test_lines_are_appended_and_those_of_quick_steps_are_written_together(
    tmp_path: Path, interval: float, seen: list[int], last: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path, clock=ticking(interval * WRITE_INTERVAL_S))
    found = []
    for number in range(1, 7):
        metrics.step(a_step(number))
        found.append(len(written(path)))
    assert found == seen
    getattr(metrics, last)()
    assert written(path) == [1, 2, 3, 4, 5, 6]
    metrics.close()
    again = Metrics(path)
    again.step(a_step(7))
    again.close()
    assert written(path)[-1] == 7
    assert msgspec.json.decode(path.read_bytes().splitlines()[1], type=StepRecord) == a_step(2)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl cannot be written: Is a directory"):
        Metrics(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize("seconds", [0.0, WRITE_INTERVAL_S])
def test_a_full_disk_is_named(seconds: float) -> None:
    def write() -> None:
        metrics.step(a_step(1))
        metrics.step(a_step(2))
        metrics.flush()

    metrics = Metrics(Path("/dev/full"), clock=ticking(seconds))
    with pytest.raises(CheckpointError, match="No space left on device"):
        write()
    metrics.close()


def test_scalars_of_a_record() -> None:
    found = scalars(a_step(2, samples_per_s=30.0, items_per_s=80.0, loss=None))
    assert found["speed/samples_per_s"] == 30.0
    assert found["speed/items_per_s"] == 80.0
    assert found["training/gradient_norm"] == 1.5
    assert found["memory/oom_recoveries"] == 0
    assert "training/loss" not in found
    assert not [name for name in scalars(a_step(7)) if name.startswith("speed/")], "an old row has none"
    assert (scalars(a_step(3, validation={"loss": 0.25})))["validation/loss"] == 0.25


def test_tensorboard_gets_every_scalar_and_hides_steps_that_run_again(installed, tmp_path) -> None:
    (board,) = open_tensorboard(tmp_path, batches_seen=7, clock=ticking(TENSORBOARD_INTERVAL_S))
    for step in (8, 9):
        board.step(a_step(step))
    board.end(a_run().training)
    board.close()
    (writer,) = Writer.opened
    assert (writer.folder, writer.purge_step, writer.closed) == (str(tmp_path), 8, True)
    assert [step for step, _ in writer.events] == [8, 9, 9]
    assert writer.events[1][1] == scalars(a_step(9))
    assert writer.events[2][1] == {"validation/accuracy": 0.9312}


def test_quick_steps_are_thinned_out_except_notable_ones(installed, tmp_path) -> None:
    (board,) = open_tensorboard(tmp_path, clock=ticking(0.15 * TENSORBOARD_INTERVAL_S))
    changes = {
        10: {"recovered": "out of memory"},
        12: {"validation": {"loss": 0.5}},
        13: {"applied": False},
    }
    for step in range(1, 31):
        board.step(a_step(step, **{"recovered": None, **changes.get(step, {})}))
    assert [step for step, _ in Writer.opened[0].events] == [1, 8, 10, 12, 13, 20, 27]


@pytest.mark.parametrize("missing", ["tensorboard.compat.proto.summary_pb2", "torch.utils.tensorboard"])
def test_without_a_working_tensorboard_there_is_no_writer(installed, monkeypatch, tmp_path, missing) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert open_tensorboard(tmp_path) == []
    monkeypatch.setitem(sys.modules, missing, SimpleNamespace())  # broken
    assert open_tensorboard(tmp_path) == []


def test_tensorboard_reads_what_was_written(tmp_path) -> None:
    """The events of two processes, of which the second resumed after step 2."""
    pytest.importorskip("tensorboard", exc_type=ImportError)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for seen, last in ((0, 4), (2, 5)):
        (writer,) = open_tensorboard(tmp_path, batches_seen=seen, clock=ticking(1.0))
        for step in range(seen + 1, last + 1):
            writer.step(a_step(step, loss=float(seen + step)))
        writer.end(Training(
            optimizer_steps=last, samples=1, samples_per_s=1.0, first_loss=None, final_loss=None,
            oom_recoveries=0, resumed_from=None, checkpoint=None, validation={"accuracy": 0.5},
        ))  # fmt: skip
        writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("training/loss")] == [
        (1, 1.0), (2, 2.0), (3, 5.0), (4, 6.0), (5, 7.0),
    ]  # fmt: skip
    assert events.Scalars("validation/accuracy")[-1].value == 0.5


def test_lines_after_the_resume_and_broken_lines_are_dropped(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [b'{"step": 1, "loss": 3.0}', b'{"step": 2}', b'{"step": 3}', b'["step", 1]', b'{"loss": 1}']
    foreign = [
        b'{"step": "2"}', b'{"step": null}', b'{"step": [1]}', b'{"step": 1, "loss": "low"}',
        b'{"step": 1, "samples": []}', b'{"step": ' + b"9" * 5000 + b"}", b"[" * 100_000,
        b'{"x": ' * 100_000, b"\xff", b"",
    ]  # fmt: skip
    broken = [*lines[:1], b"broken {", *foreign, *lines[1:], b'{"step": 2, "lo']
    path.write_bytes(b"\n".join(broken))
    kept: list[tuple[int, float | None]] = []
    rewind_metrics(path, batches_seen=2, on_kept=lambda line: kept.append((line.step, line.loss)))
    assert kept == [(1, 3.0), (2, None)]
    assert path.read_bytes() == b'{"step": 1, "loss": 3.0}\n{"step": 2}\n'
    rewind_metrics(tmp_path / "none.jsonl", batches_seen=2, on_kept=pytest.fail)
    assert not (tmp_path / "none.jsonl").exists()


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


def test_a_sink_that_raises_is_left_out_with_a_note_and_the_others_go_on() -> None:
    notes: list[str] = []
    kept, broken = Kept(), Broken()
    metrics = Metrics(None, [broken, kept], note=notes.append)
    for step in (1, 2):
        metrics.step(a_step(step))
    metrics.end(a_run().training)
    metrics.close()
    assert (kept.steps, kept.closed, broken.steps, broken.closed) == ([1, 2], 1, [1], 0)
    assert notes == [
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


def test_totals_are_those_of_the_whole_run_wherever_it_was_resumed(tmp_path: Path) -> None:
    losses = [None, 3.0, 2.0, 1.0, None]
    steps = [
        a_step(number, loss=loss, applied=number > 1, seconds=2.0, samples=10 * number)
        for number, loss in enumerate(losses, 1)
    ]
    for resumed_after in range(6):
        path = tmp_path / f"{resumed_after}.jsonl"
        path.write_bytes(b"".join(msgspec.json.encode(step) + b"\n" for step in steps))
        totals = RunTotals()
        rewind_metrics(path, batches_seen=resumed_after, on_kept=totals.add)
        for step in steps[resumed_after:]:
            totals.add(step)
        assert (totals.first_loss, totals.final_loss, totals.skipped_steps) == (3.0, 1.0, 1)
        assert (totals.samples, totals.seconds) == (50, 10.0)
