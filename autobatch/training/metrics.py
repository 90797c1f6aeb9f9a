"""Records of the steps of a run: ``metrics.jsonl``, and sinks.

``metrics.jsonl`` has one line per batch, with the fields of `StepRecord`: ``step`` is ``batches_seen`` after
the batch, and ``applied`` is false for ``skipped_steps``. A resume and the report read it, so a failed write
is an error. All else is only for viewing, and never stops a run.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgspec

from autobatch.core.errors import CheckpointError
from autobatch.core.files import read_steps, write_atomic
from autobatch.core.records import StepRecord, Training
from autobatch.core.text import error_text

FLUSH_INTERVAL_S = 0.2
"""Least time between two writes of lines: one costs more than all else that a record takes."""

Until: TypeAlias = Callable[[StepRecord], object]
"""A rule of the user's: called with each record on rank 0, it returns whether the run ends after the step."""


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


class Metrics:
    """Writer of the records of a run, to a file unless its path is None, and to every sink.

    A line waits for the lines of the next `FLUSH_INTERVAL_S`, unless the last one was flushed longer ago.

    Raises:
        CheckpointError: the file cannot be opened, or written by any method.
    """

    def __init__(
        self,
        path: Path | None,
        sinks: Sequence[Sink] = (),
        *,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._path, self._sinks, self._note = path, list(sinks), note
        self._flushed_at, self._file = -math.inf, None
        with self._naming_the_file():
            self._file = None if path is None else path.open("ab")

    def step(self, record: StepRecord) -> None:
        """Add the record of a batch."""
        with self._naming_the_file():
            if self._file is not None:
                self._file.write(msgspec.json.encode(record) + b"\n")
                # Before a sink has a step, the file has it: a resume tells sinks by the file what they have.
                if self._sinks or time.monotonic() - self._flushed_at >= FLUSH_INTERVAL_S:
                    self._flushed_at = time.monotonic()
                    self._file.flush()
        self._each("step", record)

    def sync(self) -> None:
        """Write all lines to the disk, as before each checkpoint."""
        with self._naming_the_file():
            if self._file is not None:
                self._file.flush()
                os.fsync(self._file.fileno())

    def end(self, training: Training) -> None:
        """Hand the summary of a finished run to the sinks."""
        self._each("end", training)

    def close(self) -> None:
        """Finish every sink, and write the last lines."""
        self._each("close")
        with self._naming_the_file():
            if self._file is not None:
                self._file.close()

    def _each(self, method: str, *values: object) -> None:
        for sink in list(self._sinks):
            try:
                getattr(sink, method)(*values)
            except Exception as error:  # whatever a tracker raises, the run continues
                self._sinks.remove(sink)
                name = getattr(sink, "name", type(sink).__name__)
                self._note(
                    f"{name}.{method} raised {type(error).__name__}: {error_text(error)}. The "
                    "run continues without this sink"
                )

    @contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            file, self._file = self._file, None
            with suppress(OSError):  # it would write the same lines again
                if file is not None:
                    file.close()
            raise CheckpointError(f"{self._path} cannot be written: {error.strerror or error}") from error


def rewind_metrics(path: Path, *, batches_seen: int) -> int:
    """Drop the lines of batches that a resumed run trains again, and return the last step that had a line."""
    logged, kept = 0, bytearray()
    for line, record in read_steps(path):
        logged = max(logged, record.step)
        if record.step <= batches_seen:
            kept += line + b"\n"
    if path.is_file():
        write_atomic(path, bytes(kept))
    return logged


def totals_of(path: Path) -> dict[str, Any]:
    """Return what the lines of a run add up to, by the fields of `Training`."""
    totals: dict[str, Any] = {"first_loss": None, "final_loss": None, "skipped_steps": 0, "seconds": 0.0}
    for _, record in read_steps(path):
        totals["skipped_steps"] += not record.applied
        totals["seconds"] += record.seconds
        if record.loss is not None:
            first = record.loss if totals["first_loss"] is None else totals["first_loss"]
            totals |= {"first_loss": first, "final_loss": record.loss, "final_terms": record.terms}
        for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
            if (peak := getattr(record, name)) is not None:
                totals[name] = max(peak, totals.get(name, 0))
    return totals
