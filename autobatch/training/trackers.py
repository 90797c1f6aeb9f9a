"""Trackers of ``--log``: TensorBoard, Weights & Biases and MLflow.

The library of a tracker is imported only if it was asked for. Settings that autobatch has no option for, such
as accounts and servers, are those of the library's own environment variables.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import msgspec

from autobatch.core.errors import InputError
from autobatch.core.files import UNREADABLE, write_atomic
from autobatch.core.records import StepRecord, Training
from autobatch.core.text import error_text
from autobatch.training.metrics import WRITE_INTERVAL_S, Sink

TRACKERS = "trackers.json"
"""File in the folder of a run, with the identifier that each tracker gave it, for a resume."""
TENSORBOARD = "tensorboard"
"""Folder of a run that ``tensorboard --logdir`` reads."""
_CURVES = {
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


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """A run, as its trackers know it."""

    folder: Path
    project: str
    """The name of the workload."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The options and the plan."""
    batches_seen: int = 0
    """Batches trained before a resume."""
    logged: int = 0
    """Last step that was logged before a resume, which may run again."""


class Writer(Protocol):
    """A run in the library of a tracker."""

    identifier: str
    """The name under which a later process continues it."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Log figures of a step by the names of their curves."""

    def close(self, summary: dict[str, Any] | None) -> None:
        """End the run with its summary; None if it failed."""


class TensorBoard:
    """Events for TensorBoard; those of steps that run again are hidden."""

    def __init__(self, run: LoggedRun, _: str | None) -> None:
        self.identifier = TENSORBOARD
        writer = import_module("torch.utils.tensorboard").SummaryWriter
        self._writer: Any = writer(str(run.folder / TENSORBOARD), purge_step=run.batches_seen + 1)

    def log(self, values: dict[str, float], step: int) -> None:
        """Write an event for each value."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def close(self, summary: dict[str, Any] | None) -> None:
        """Write what is buffered."""
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, in the project of the workload or of ``WANDB_PROJECT``."""

    def __init__(self, run: LoggedRun, known: str | None) -> None:
        self.identifier = known or secrets.token_hex(4)
        self._run: Any = import_module("wandb").init(
            project=os.environ.get("WANDB_PROJECT", run.project),
            name=run.folder.name,
            id=self.identifier,
            resume="allow" if known else None,
            config=run.settings,
            dir=str(run.folder),
        )

    def log(self, values: dict[str, float], step: int) -> None:
        """Queue a row of the history."""
        self._run.log(values, step=step)

    def close(self, summary: dict[str, Any] | None) -> None:
        """Send the rest."""
        self._run.summary.update(summary or {})
        self._run.finish(exit_code=1 if summary is None else 0)


class Mlflow:
    """A run of MLflow, in the experiment of the workload or of ``MLFLOW_EXPERIMENT_NAME``."""

    def __init__(self, run: LoggedRun, known: str | None) -> None:
        self._client: Any = import_module("mlflow").MlflowClient()
        self._entities: Any = import_module("mlflow.entities")
        self._sent: Any = None
        if known is not None:
            self.identifier = known
            self._client.update_run(known, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", run.project)
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        self.identifier = self._client.create_run(experiment, run_name=run.folder.name).info.run_id
        make = self._entities.Param
        self._client.log_batch(
            self.identifier, params=[make(name, str(value)) for name, value in run.settings.items()]
        )

    def log(self, values: dict[str, float], step: int) -> None:
        """Queue the figures, in order."""
        now_ms = int(time.time() * 1000)
        found = [self._entities.Metric(name, value, now_ms, step) for name, value in values.items()]
        self._sent = self._client.log_batch(self.identifier, metrics=found, synchronous=False)

    def close(self, summary: dict[str, Any] | None) -> None:
        """Wait for the last figures, and set the state of the run."""
        if self._sent is not None:
            self._sent.wait()
        if summary is not None:
            self._client.log_dict(self.identifier, summary, "training.json")
        self._client.set_terminated(self.identifier, "FAILED" if summary is None else "FINISHED")


_WRITERS: dict[str, Callable[[LoggedRun, str | None], Writer]] = {
    TENSORBOARD: TensorBoard,
    "wandb": Wandb,
    "mlflow": Mlflow,
}


class Tracker:
    """Sink that logs the figures of a run, and no step twice.

    It logs at most one step per `WRITE_INTERVAL_S`; the last one, recoveries, validations and skipped steps
    always.

    Args:
        name: the tracker, for notes.
        writer: the run in its library.
        logged: the last step that it has already.
    """

    def __init__(self, name: str, writer: Writer, *, logged: int = 0) -> None:
        self.name = name
        self._writer = writer
        self._logged = logged
        self._written_at = -math.inf
        self._step = logged
        self._waiting: StepRecord | None = None
        self._summary: dict[str, Any] | None = None

    def step(self, record: StepRecord) -> None:
        """Log a step, or keep it until the next one."""
        self._step, self._waiting = record.step, record
        now = time.monotonic()
        is_notable = record.recovered is not None or record.validation or not record.applied
        if is_notable or now - self._written_at >= WRITE_INTERVAL_S:
            self._written_at = now
            self._log_waiting()

    def end(self, training: Training) -> None:
        """Log the final validation, and keep the summary."""
        self._log_waiting()
        found = training.validation.items()
        values = {f"validation/{name}": value for name, value in found if value is not None}
        if values:
            self._writer.log(values, self._step)
        self._summary = msgspec.to_builtins(training)

    def close(self) -> None:
        """Log what is left, and end the run in the library."""
        self._log_waiting()
        self._writer.close(self._summary)

    def _log_waiting(self) -> None:
        record, self._waiting = self._waiting, None
        if record is not None and record.step > self._logged:
            self._writer.log(scalars(record), record.step)


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


def open_trackers(names: Sequence[str], run: LoggedRun) -> list[Sink]:
    """Open the trackers of a run, or continue those that it has had before.

    Raises:
        InputError: a library refuses the run, for example because nobody is logged in.
    """
    path = run.folder / TRACKERS
    try:
        known = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except (OSError, *UNREADABLE):
        known = {}
    sinks: list[Sink] = []
    for name in dict.fromkeys(names):
        try:
            writer = _WRITERS[name](run, known.get(name))
        except Exception as error:
            for sink in sinks:
                sink.close()
            reason = f"{type(error).__name__}: {error_text(error)}"
            raise InputError(
                f"--log {name} cannot open the run ({reason}): mend it, or leave it out"
            ) from error
        hides = name == TENSORBOARD  # steps that run again are written anew
        logged = run.logged if name in known and not hides else run.batches_seen
        sinks.append(Tracker(name, writer, logged=logged))
        known[name] = writer.identifier
    if names:
        write_atomic(path, msgspec.json.encode(known))
    return sinks


def scalars(record: StepRecord) -> dict[str, float]:
    """Return the known values of a step record by the tag of their curve."""
    values = {curve: getattr(record, name) for curve, name in _CURVES.items()}
    values |= {f"training/loss/{name}": value for name, value in record.terms.items()}
    values |= {f"validation/{name}": value for name, value in record.validation.items()}
    return {curve: float(value) for curve, value in values.items() if value is not None}
