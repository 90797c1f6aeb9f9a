"""Trackers of ``--log``: TensorBoard, Weights & Biases and MLflow.

The library of a tracker is imported only if it was asked for. Settings that autobatch has no option for, such
as accounts and servers, are those of the library's own environment variables.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from autobatch.core.errors import InputError
from autobatch.core.files import UNREADABLE, write_atomic
from autobatch.core.records import StepRecord, Training
from autobatch.core.text import error_text
from autobatch.training.metrics import Sink

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
