"""The metrics file and TensorBoard, read back; TensorBoard never stops a run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

import autobatch
from autobatch import StepRecord, Training
from autobatch.core.errors import CheckpointError
from autobatch.core.progress import Progress
from autobatch.training.metrics import (
    TENSORBOARD_INTERVAL_S,
    WRITE_INTERVAL_S,
    JsonLines,
    MetricsWriter,
    UserSinks,
    open_tensorboard,
    rewind_metrics,
    scalars,
)
from tests.support.sample_run import a_run, a_step
from tests.support.training import make_workload, points


class Writer:
    """Stand-in for ``SummaryWriter`` that keeps the events."""

    def __init__(self, folder: str, purge_step: int | None = None) -> None:
        self.folder, self.purge_step, self.closed = folder, purge_step, False
        self.events: list[tuple[int, dict[str, float]]] = []
        self.file_writer = self

    def add_summary(self, summary, step: int) -> None:
        self.events.append((step, {one.tag: one.simple_value for one in summary.value}))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def installed(monkeypatch):
    """Install as much of TensorBoard as a writer needs."""

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


def test_lines_are_the_records_and_written_at_once_in_slow_steps(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"before\n")
    writer: MetricsWriter = JsonLines(path, clock=ticking(WRITE_INTERVAL_S))
    records = [a_step(1), a_step(2)]
    for number, record in enumerate(records, 1):
        writer.step(record)
        lines = path.read_bytes().splitlines()
        assert len(lines) == 1 + number
    assert [msgspec.json.decode(line, type=StepRecord) for line in lines[1:]] == records
    writer.end(a_run().training)
    writer.close()
    assert len(path.read_bytes().splitlines()) == 3


def test_a_file_that_cannot_be_written_is_named(tmp_path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl cannot be written: Is a directory"):
        JsonLines(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize("last", ["flush", "close"])
def test_lines_of_quick_steps_are_written_together(tmp_path, last: str) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonLines(path, clock=ticking(WRITE_INTERVAL_S / 3))
    seen = []
    for number in range(1, 7):
        writer.step(a_step(number))
        seen.append(len(path.read_bytes().splitlines()))
    assert seen == [1, 1, 1, 4, 4, 4]
    getattr(writer, last)()
    lines = path.read_bytes().splitlines()
    writer.close()
    assert [msgspec.json.decode(line, type=StepRecord).step for line in lines] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("seconds", [0.0, WRITE_INTERVAL_S])
def test_a_full_disk_is_named(seconds: float) -> None:
    from pathlib import Path

    def write() -> None:
        writer.step(a_step(1))
        writer.step(a_step(2))
        writer.flush()

    writer = JsonLines(Path("/dev/full"), clock=ticking(seconds))
    with pytest.raises(CheckpointError, match="No space left on device"):
        write()
    writer.close()


def test_scalars_of_a_record() -> None:
    found = dict(scalars(a_step(2, samples_per_s=30.0, items_per_s=80.0, loss=None)))
    assert found["speed/samples_per_s"] == 30.0
    assert found["speed/items_per_s"] == 80.0
    assert found["training/gradient_norm"] == 1.5
    assert found["memory/oom_recoveries"] == 0
    assert "training/loss" not in found
    assert not [name for name in dict(scalars(a_step(7))) if name.startswith("speed/")], "an old row has none"
    assert dict(scalars(a_step(3, validation={"loss": 0.25})))["validation/loss"] == 0.25


def test_tensorboard_gets_every_scalar(installed, tmp_path) -> None:
    writer = open_tensorboard(tmp_path, clock=ticking(TENSORBOARD_INTERVAL_S))
    for step in (1, 2):
        writer.step(a_step(step))
    writer.end(a_run().training)
    writer.close()
    writer = writer._writer
    assert writer.folder == str(tmp_path)
    assert [step for step, _ in writer.events] == [1, 2, 2]
    assert writer.events[1][1] == dict(scalars(a_step(2)))
    assert writer.events[2][1] == {"validation/accuracy": 0.9312}
    assert writer.closed


def test_quick_steps_are_thinned_out_except_notable_ones(installed, tmp_path) -> None:
    writer = open_tensorboard(tmp_path, clock=ticking(0.15 * TENSORBOARD_INTERVAL_S))
    changes = {
        10: {"recovered": "out of memory"},
        12: {"validation": {"loss": 0.5}},
        13: {"applied": False},
    }
    for step in range(1, 31):
        fields = {"recovered": None, "samples_per_s": 1800.0, **changes.get(step, {})}
        writer.step(a_step(step, **fields))
    assert [step for step, _ in writer._writer.events] == [1, 8, 10, 12, 13, 20, 27]
    assert writer._writer.events[1][1]["speed/samples_per_s"] == 1800.0


@pytest.mark.parametrize(("seen", "purged"), [(0, 1), (7, 8)])
def test_a_resumed_run_hides_the_steps_that_run_again(installed, tmp_path, seen, purged) -> None:
    assert open_tensorboard(tmp_path, batches_seen=seen)._writer.purge_step == purged


def test_an_error_of_tensorboard_does_not_stop_the_run(installed, tmp_path) -> None:
    writer = open_tensorboard(tmp_path, clock=ticking(1.0))

    def fail(*_):
        raise OSError(28, "No space left on device")

    writer._writer.add_summary = fail
    writer.step(a_step(1))
    writer._writer.add_summary = None
    writer.step(a_step(2))
    writer._writer.close = fail
    writer.close()
    assert writer.error == "TensorBoard stopped at step 1: OSError: [Errno 28] No space left on device"


@pytest.mark.parametrize("missing", ["tensorboard", "torch.utils.tensorboard"])
def test_without_tensorboard_there_is_no_writer(installed, monkeypatch, tmp_path, missing) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    if missing == "tensorboard":
        for name in [name for name in sys.modules if name.startswith("tensorboard.")]:
            monkeypatch.delitem(sys.modules, name)
    assert open_tensorboard(tmp_path) is None


def test_a_broken_installation_gives_no_writer(installed, monkeypatch, tmp_path) -> None:
    def broken(*_, **__):
        raise TypeError("Descriptors cannot be created directly")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=broken))
    assert open_tensorboard(tmp_path) is None


def test_tensorboard_reads_what_was_written(tmp_path) -> None:
    """The events of two processes, of which the second resumed after step 2."""
    pytest.importorskip("tensorboard", exc_type=ImportError)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for seen, last in ((0, 4), (2, 5)):
        writer = open_tensorboard(tmp_path, batches_seen=seen, clock=ticking(1.0))
        for step in range(seen + 1, last + 1):
            writer.step(a_step(step, loss=float(seen + step)))
        writer.end(Training(
            optimizer_steps=last, samples=1, samples_per_s=1.0, first_loss=None, final_loss=None,
            oom_recoveries=0, resumed_from=None, checkpoint=None, validation={"accuracy": 0.5},
        ))  # fmt: skip
        writer.close()
        assert writer.error is None
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
    kept: list[object] = []
    rewind_metrics(path, batches_seen=2, on_kept=kept.append)
    assert kept == [{"step": 1, "loss": 3.0}, {"step": 2}]
    assert path.read_bytes() == b'{"step": 1, "loss": 3.0}\n{"step": 2}\n'


def test_a_run_without_metrics_has_nothing_to_drop(tmp_path) -> None:
    rewind_metrics(tmp_path / "metrics.jsonl", batches_seen=2, on_kept=pytest.fail)
    assert not (tmp_path / "metrics.jsonl").exists()


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
