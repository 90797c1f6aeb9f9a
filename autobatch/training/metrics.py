"""Where the records of a run go: a file of JSON lines always, TensorBoard where it is installed.

``metrics.jsonl`` holds every window and is what a resume and the report read, so that it cannot be written is
an error. TensorBoard is for looking: it never stops a run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import msgspec

from autobatch.core.errors import CheckpointError
from autobatch.core.records import StepRecord, Training

TENSORBOARD = "tensorboard"
"""Folder of a run that ``tensorboard --logdir`` is pointed at."""


TENSORBOARD_SECONDS = 0.2
"""Time between two rows: a row costs a quarter of a millisecond, and a curve shows a thousand of them."""


class MetricsWriter(Protocol):
    """Takes the records of a run."""

    def step(self, record: StepRecord) -> None:
        """Take the record of one window."""

    def end(self, training: Training) -> None:
        """Take the summary of a run that came to its end."""

    def close(self) -> None:
        """Write what is left; called once, however the run ended."""


class JsonLines:
    """A line of JSON a window, appended and handed to the system at once.

    Args:
        path: the file; what it holds stays.

    Raises:
        CheckpointError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with _named(self._path):
            # What stays in a buffer would fail again at closing.
            self._file = path.open("ab", buffering=0)

    def step(self, record: StepRecord) -> None:
        """Append a line.

        Raises:
            CheckpointError: the file cannot be written.
        """
        rest = memoryview(msgspec.json.encode(record) + b"\n")
        with _named(self._path):
            while rest:
                rest = rest[self._file.write(rest) :]

    def end(self, training: Training) -> None:
        """The summary stands in ``result.json``."""

    def close(self) -> None:
        """Close the file."""
        with _named(self._path):
            self._file.close()


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Let an error of the system name the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error


class TensorBoard:
    """Curves for TensorBoard; see `open_tensorboard`."""

    def __init__(self, writer: Any, make_summary: Any, clock: Callable[[], float]) -> None:
        self.trouble: str | None = None
        """Why nothing is written any more."""
        self._writer = writer
        self._make_summary = make_summary
        self._clock = clock
        self._written = -math.inf
        self._step = 0

    def step(self, record: StepRecord) -> None:
        """Write a window, unless one was written a moment ago; those in which something happened always."""
        self._step = record.step
        now = self._clock()
        happened = record.recovered is not None or record.validation or not record.applied
        if happened or now - self._written >= TENSORBOARD_SECONDS:
            self._written = now
            self._write(dict(figures(record)), record.step)

    def end(self, training: Training) -> None:
        """Write the validation at the end."""
        known = {name: value for name, value in training.validation.items() if value is not None}
        self._write({f"validation/{name}": value for name, value in known.items()}, self._step)

    def close(self) -> None:
        """Write what is left."""
        with suppress(Exception):
            self._writer.close()

    def _write(self, values: dict[str, float], step: int) -> None:
        if not values or self.trouble is not None:
            return
        make = self._make_summary
        try:
            # One event for all figures: five times as quick as SummaryWriter.add_scalar for each.
            scalars = [make.Value(tag=tag, simple_value=value) for tag, value in values.items()]
            self._writer.file_writer.add_summary(make(value=scalars), step)
        except Exception as error:
            self.trouble = f"TensorBoard stopped at step {step}: {type(error).__name__}: {error}"


def open_tensorboard(
    folder: Path, *, batches_seen: int = 0, clock: Callable[[], float] = time.monotonic
) -> TensorBoard | None:
    """Open a sink for TensorBoard.

    Args:
        folder: where its event files shall stand.
        batches_seen: of a run that is resumed; what was written here of later windows before is hidden.
        clock: seconds.

    Returns:
        The sink; ``None`` where TensorBoard is not installed, or where it or the folder cannot be used.
    """
    try:
        make_summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
        make_writer = import_module("torch.utils.tensorboard").SummaryWriter
        writer = make_writer(str(folder), purge_step=batches_seen + 1)
    except Exception:
        # Absent, or a broken installation, which fails in many ways.
        return None
    return TensorBoard(writer, make_summary, clock)


def figures(record: StepRecord) -> Iterator[tuple[str, float]]:
    """What the record of a window has to show, by the name of its curve."""
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
