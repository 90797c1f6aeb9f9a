"""Writers of step records: a file of JSON lines always, and TensorBoard if it is installed.

``metrics.jsonl`` has one line per batch, with the fields of `StepRecord`: ``step`` is ``batches_seen`` after
the batch, and ``applied`` is false for ``skipped_steps``. A resume and the report read it, so a failed write
is an error. TensorBoard is only for viewing and never stops a run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import msgspec

from autobatch.core.errors import CheckpointError
from autobatch.core.files import UNREADABLE, write_atomic
from autobatch.core.progress import Progress
from autobatch.core.records import StepRecord, Training
from autobatch.core.text import error_text

TENSORBOARD = "tensorboard"
"""Folder of a run that ``tensorboard --logdir`` reads."""
WRITE_INTERVAL_S = 0.2
"""Least time between two writes of lines: one costs more than all else that a record takes."""
TENSORBOARD_INTERVAL_S = 0.2
"""Least time between two events: one costs a quarter of a millisecond, and a curve shows a thousand."""


class MetricsWriter(Protocol):
    """Writer of the records of a run."""

    def step(self, record: StepRecord) -> None:
        """Write the record of a batch."""

    def flush(self) -> None:
        """Hand what is buffered to the system, if a resume reads it; called before each checkpoint."""

    def end(self, training: Training) -> None:
        """Write the summary of a finished run."""

    def close(self) -> None:
        """Write what is buffered; called once, whether the run finished or failed."""


class JsonLines:
    """Metrics file with one JSON object per line.

    A line waits for the lines of the next `WRITE_INTERVAL_S`, unless the last write is longer ago.

    Args:
        path: the file; existing lines stay.
        clock: returns seconds.

    Raises:
        CheckpointError: it cannot be opened.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._encoder = msgspec.json.Encoder()
        self._lines = bytearray()
        self._written_at = -math.inf
        try:
            # Unbuffered, because lines are gathered here.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise _unwritable(path, error) from error

    def step(self, record: StepRecord) -> None:
        """Append a line.

        Raises:
            CheckpointError: the file cannot be written.
        """
        self._encoder.encode_into(record, self._lines, -1)
        self._lines += b"\n"
        now = self._clock()
        if now - self._written_at >= WRITE_INTERVAL_S:
            self._written_at = now
            self.flush()

    def flush(self) -> None:
        """Hand all lines to the system.

        Raises:
            CheckpointError: the file cannot be written.
        """
        # Lines that cannot be written are dropped, because writing them would fail again on closing.
        rest, self._lines = memoryview(self._lines), bytearray()
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise _unwritable(self._path, error) from error

    def end(self, training: Training) -> None:
        """Write nothing: the summary is in ``result.json``."""

    def close(self) -> None:
        """Write the last lines, and close the file."""
        try:
            self.flush()
        finally:
            self._close()

    def _close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            raise _unwritable(self._path, error) from error


def _unwritable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path} cannot be written: {error.strerror or error}")


class _Row(msgspec.Struct):
    """The fields of a line that a resumed run adds up."""

    step: int
    loss: float | None = None
    applied: bool = True
    samples: int = 0


def rewind_metrics(path: Path, *, batches_seen: int, on_kept: Callable[[Mapping[str, Any]], None]) -> None:
    """Drop the lines of batches that a resumed run trains again.

    Args:
        path: the metrics file, which need not exist.
        batches_seen: batches that the resumed run has trained already.
        on_kept: called with each remaining line, in order.
    """
    if not path.is_file():
        return
    kept: list[bytes] = []
    with path.open("rb") as file:
        for line in file:
            try:
                step = msgspec.json.decode(line, type=_Row).step
            except UNREADABLE:
                # The last line of a run that was killed while it wrote, or a line of something else.
                continue
            if step <= batches_seen:
                on_kept(msgspec.json.decode(line))
                kept.append(line.rstrip(b"\n") + b"\n")
    write_atomic(path, b"".join(kept))


class TensorBoard:
    """Writer of TensorBoard events; see `open_tensorboard`."""

    def __init__(self, writer: Any, make_summary: Any, clock: Callable[[], float]) -> None:
        self.error: str | None = None
        """Why writing stopped; ``None`` if it did not."""
        self._writer = writer
        self._make_summary = make_summary
        self._clock = clock
        self._written_at = -math.inf
        self._step = 0

    def step(self, record: StepRecord) -> None:
        """Write a step, at most one per interval; recoveries, validations and skipped steps always."""
        self._step = record.step
        now = self._clock()
        is_notable = record.recovered is not None or record.validation or not record.applied
        if is_notable or now - self._written_at >= TENSORBOARD_INTERVAL_S:
            self._written_at = now
            self._write(dict(scalars(record)), record.step)

    def end(self, training: Training) -> None:
        """Write the final validation."""
        known = {name: value for name, value in training.validation.items() if value is not None}
        self._write({f"validation/{name}": value for name, value in known.items()}, self._step)

    def flush(self) -> None:
        """Do nothing: a resume does not read the events."""

    def close(self) -> None:
        """Write what is buffered."""
        with suppress(Exception):
            self._writer.close()

    def _write(self, values: dict[str, float], step: int) -> None:
        if not values or self.error is not None:
            return
        make = self._make_summary
        try:
            # One event for all values is five times as fast as SummaryWriter.add_scalar for each.
            events = [make.Value(tag=tag, simple_value=value) for tag, value in values.items()]
            self._writer.file_writer.add_summary(make(value=events), step)
        except Exception as error:
            self.error = f"TensorBoard stopped at step {step}: {type(error).__name__}: {error}"


def open_tensorboard(
    folder: Path, *, batches_seen: int = 0, clock: Callable[[], float] = time.monotonic
) -> TensorBoard | None:
    """Open a TensorBoard writer.

    Args:
        folder: the folder of its event files.
        batches_seen: batches trained before a resume; earlier events of later steps are hidden.
        clock: returns seconds.

    Returns:
        The writer; ``None`` if TensorBoard is not installed, or it or the folder cannot be used.
    """
    try:
        make_summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
        make_writer = import_module("torch.utils.tensorboard").SummaryWriter
        writer = make_writer(str(folder), purge_step=batches_seen + 1)
    except Exception:
        # Not installed, or a broken installation, which fails in many ways.
        return None
    return TensorBoard(writer, make_summary, clock)


def scalars(record: StepRecord) -> Iterator[tuple[str, float]]:
    """Yield the known values of a step record, each with the tag of its curve."""
    values = {
        "training/loss": record.loss,
        "training/learning_rate": record.learning_rate,
        "training/gradient_norm": record.grad_norm,
        "speed/samples_per_s": record.samples_per_s,
        "speed/items_per_s": record.items_per_s,
        "memory/peak_allocated_bytes": record.peak_allocated_bytes,
        "memory/peak_reserved_bytes": record.peak_reserved_bytes,
        "memory/micro_batch": record.micro_batch,
        "memory/oom_recoveries": record.oom_recoveries,
        **{f"validation/{name}": value for name, value in record.validation.items()},
    }
    yield from ((name, float(value)) for name, value in values.items() if value is not None)


class Sink(Protocol):
    """Receiver of the records of a run.

    A method that raises does not end the run: the sink is left out from then on, and a note has the reason.
    """

    def step(self, record: StepRecord) -> None:
        """Receive the record of a batch, after its validation if there was one."""

    def end(self, training: Training) -> None:
        """Receive the summary of a run that reached its end."""

    def close(self) -> None:
        """Finish; called once, whether the run reached its end or failed."""


class UserSinks:
    """The sinks of a run, as one writer of metrics.

    Args:
        sinks: the user's.
        progress: receives a note if one fails.
    """

    def __init__(self, sinks: Sequence[Sink], progress: Progress) -> None:
        self._sinks = list(sinks)
        self._progress = progress

    def step(self, record: StepRecord) -> None:
        """Hand the record of a batch to every sink."""
        if self._sinks:
            self._each("step", lambda sink: sink.step(record))

    def flush(self) -> None:
        """Do nothing: a resume reads no sink."""

    def end(self, training: Training) -> None:
        """Hand the summary to every sink."""
        self._each("end", lambda sink: sink.end(training))

    def close(self) -> None:
        """Finish every sink."""
        self._each("close", lambda sink: sink.close())

    def _each(self, method: str, call: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                call(sink)
            except Exception as error:  # whatever a tracker raises, the run continues
                self._sinks.remove(sink)
                self._progress.note(
                    f"{type(sink).__name__}.{method} raised {type(error).__name__}: {error_text(error)}. The "
                    "run continues without this sink"
                )
