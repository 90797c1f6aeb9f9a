"""Records of the steps of a run: ``metrics.jsonl``, sinks, and the trackers of ``--log``.

``metrics.jsonl`` has one line per batch, with the fields of `StepRecord`: ``step`` is ``batches_seen`` after
the batch, and ``applied`` is false for ``skipped_steps``. A resume and the report read it, so a failed write
is an error. All else is only for viewing, and never stops a run.

The library of a tracker is imported only if it was asked for: TensorBoard, Weights & Biases or MLflow.
Settings that autobatch has no option for, such as accounts and servers, are those of the library's own
environment variables.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgspec

from autobatch.core.errors import CheckpointError, InputError
from autobatch.core.files import UNREADABLE, read_steps, write_atomic
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

    A line waits for the lines of the next `FLUSH_INTERVAL_S`, unless the last one was written longer ago.

    Raises:
        CheckpointError: the file cannot be written, by any method.
    """

    def __init__(
        self,
        path: Path | None,
        sinks: Sequence[Sink] = (),
        *,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._path, self._sinks, self._note = path, list(sinks), note
        self._lines, self._written_at = bytearray(), -math.inf
        self._write()

    def step(self, record: StepRecord) -> None:
        """Add the record of a batch."""
        self._lines += msgspec.json.encode(record) + b"\n"
        # Before a sink has a step, the file has it: a resume tells sinks by the file what they have.
        if self._sinks or time.monotonic() - self._written_at >= FLUSH_INTERVAL_S:
            self._written_at = time.monotonic()
            self._write()
        self._each("step", record)

    def sync(self) -> None:
        """Write all lines to the disk, as before each checkpoint."""
        self._write(syncs=True)

    def end(self, training: Training) -> None:
        """Hand the summary of a finished run to the sinks."""
        self._each("end", training)

    def close(self) -> None:
        """Finish every sink, and write the last lines."""
        self._each("close")
        self._write()

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

    def _write(self, *, syncs: bool = False) -> None:
        """Append the lines that wait to the file, and forget them, also if it fails."""
        lines, self._lines = self._lines, bytearray()
        if self._path is None:
            return
        try:
            with self._path.open("ab") as file:
                file.write(lines)
                file.flush()
                if syncs:
                    os.fsync(file.fileno())
        except OSError as error:
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


TRACKERS = "trackers.json"
"""File in the folder of a run, with the identifier that each tracker gave it, for a resume."""
TENSORBOARD = "tensorboard"
"""Folder of a run that ``tensorboard --logdir`` reads."""
CURVES = {
    "training/loss": "loss",
    "training/learning_rate": "learning_rate",
    "training/gradient_norm": "grad_norm",
    "speed/samples_per_s": "samples_per_s",
    "speed/items_per_s": "items_per_s",
    "memory/peak_allocated_bytes": "peak_allocated_bytes",
    "memory/peak_reserved_bytes": "peak_reserved_bytes",
    "memory/micro_batch": "micro_batch",
    "memory/oom_recoveries": "oom_recoveries",
}
"""Curves, and the fields of a `StepRecord` that they show."""


Opened: TypeAlias = tuple[str, Callable[[dict[str, float], int], object], Callable[[bool], object]]
"""A run in the library of a tracker: its identifier there, by which a later process continues it, what logs
the figures of a step by the names of their curves, and what ends it, told whether it reached its end."""


def _tensorboard(
    folder: Path, project: str, settings: dict[str, Any], known: str | None, begun_at: int
) -> Opened:
    # The events of steps that run again are hidden: a run that was killed has not written all of them.
    make = import_module("torch.utils.tensorboard").SummaryWriter
    writer = make(str(folder / TENSORBOARD), purge_step=begun_at + 1)

    def log(values: dict[str, float], step: int) -> None:
        for tag, value in values.items():
            writer.add_scalar(tag, value, step)

    return TENSORBOARD, log, lambda _: writer.close()


def _wandb(folder: Path, project: str, settings: dict[str, Any], known: str | None, begun_at: int) -> Opened:
    identifier = known or secrets.token_hex(4)
    run = import_module("wandb").init(
        project=os.environ.get("WANDB_PROJECT", project),
        name=folder.name,
        id=identifier,
        resume="allow",
        config=settings,
        dir=str(folder),
    )
    return (
        identifier,
        lambda values, step: run.log(values, step=step),
        lambda is_done: run.finish(exit_code=0 if is_done else 1),
    )


def _mlflow(folder: Path, project: str, settings: dict[str, Any], known: str | None, begun_at: int) -> Opened:
    mlflow = import_module("mlflow")
    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", project))
    run = mlflow.start_run(run_id=known, run_name=folder.name)
    if known is None:
        mlflow.log_params(settings)
    return (
        run.info.run_id,
        lambda values, step: mlflow.log_metrics(values, step=step, synchronous=False),
        lambda is_done: mlflow.end_run("FINISHED" if is_done else "FAILED"),
    )


_OPEN = {TENSORBOARD: _tensorboard, "wandb": _wandb, "mlflow": _mlflow}


class Tracker:
    """Sink that logs the figures of a run, and no step up to the last one that was ``logged`` before."""

    def __init__(self, name: str, opened: Opened, logged: int) -> None:
        self.name, self._logged, self._is_done = name, logged, False
        _, self._log_figures, self._end = opened

    def step(self, record: StepRecord) -> None:
        """Log a step."""
        if record.step > self._logged:
            self._logged = record.step
            values = {curve: getattr(record, name) for curve, name in CURVES.items()}
            values |= {f"training/loss/{name}": value for name, value in record.terms.items()}
            self._log(values, record.validation)

    def end(self, training: Training) -> None:
        """Log the final validation."""
        self._log({}, training.validation)
        self._is_done = True

    def close(self) -> None:
        """End the run in the library."""
        self._end(self._is_done)

    def _log(self, values: dict[str, float | None], validation: dict[str, float | None]) -> None:
        values = values | {f"validation/{name}": value for name, value in validation.items()}
        known = {curve: float(value) for curve, value in values.items() if value is not None}
        if known:
            self._log_figures(known, self._logged)


def check_trackers(names: Sequence[str]) -> None:
    """Import the libraries of trackers.

    Raises:
        InputError: a library is not installed, or its installation is broken.
    """
    for name in names:
        try:
            import_module("torch.utils.tensorboard" if name == TENSORBOARD else name)
        except Exception as error:  # a broken installation fails in many ways
            raise InputError(
                f"--log {name} needs the package {name}, which cannot be imported ({error_text(error)}): "
                f"pip install {name}"
            ) from error


def open_trackers(
    names: Sequence[str],
    folder: Path,
    *,
    project: str,
    settings: dict[str, Any],
    begun_at: int,
    logged: int,
) -> list[Sink]:
    """Open the trackers of a run, or continue those that it has had before.

    ``begun_at`` and ``logged`` are the steps of the checkpoint and of the last line before a resume; those
    between them run again.

    Raises:
        InputError: a library refuses the run, for example because nobody is logged in.
    """
    path = folder / TRACKERS
    try:
        known = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except (OSError, *UNREADABLE):
        known = {}
    sinks: list[Sink] = []
    for name in dict.fromkeys(names):
        try:
            opened = _OPEN[name](folder, project, settings, known.get(name), begun_at)
        except Exception as error:
            for sink in sinks:
                sink.close()
            reason = f"{type(error).__name__}: {error_text(error)}"
            raise InputError(
                f"--log {name} cannot open the run ({reason}): mend it, or leave it out"
            ) from error
        has_steps = name in known and name != TENSORBOARD
        sinks.append(Tracker(name, opened, logged if has_steps else begun_at))
        known[name] = opened[0]
    if names:
        write_atomic(path, msgspec.json.encode(known))
    return sinks
