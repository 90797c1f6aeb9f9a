"""Runs on disk: loops of six small steps, whole fits with their remarks, and what they leave behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import autobatch
from autobatch import FitResult, Progress, StepRecord, Training, Workload
from autobatch.training.checkpoint import list_checkpoints, load_newest
from autobatch.training.loop import Loop
from autobatch.training.resume import restore_loop
from autobatch.training.run import TrainingRun
from tests.support.options import as_options
from tests.support.probes import Listener
from tests.support.training import make_loop, make_workload

STEPS = 6
HINT = "autobatch fit --resume"


class ActingAfter(Listener):
    """Listener that calls back after a step."""

    def __init__(self, step: int, action: Callable[[], object]) -> None:
        super().__init__()
        self._step, self._action = step, action

    def stepped(self, step: StepRecord, of: int) -> None:
        if step.step == self._step:
            self._action()


def settings(out: Path, *, until: Any = None, resumed: Any = None, **changes: Any) -> TrainingRun:
    options = as_options("fit", **{"target_batch": 7, **changes})
    return TrainingRun(out=out, options=options, until=until, resumed=resumed, resume_hint=HINT)


def train(loop: Loop, run: TrainingRun, progress: Progress | None = None) -> Training:
    """Train the rest of a run."""
    run.progress = progress or run.progress
    return run.train(loop)


def open_loop(workload: Workload | None = None, **options: Any) -> Loop:
    options = {"target_batch": 7, "micro_batch": 3, "steps": STEPS, **options}
    return make_loop(workload or make_workload(), **options)


def resume(out: Path, workload: Workload | None = None, **options: Any) -> tuple[Loop, Training]:
    """Resume a run on the same hardware and train it to its end."""
    loop = open_loop(workload, **options)
    resumed = load_newest(out / "checkpoints")
    restore_loop(loop, resumed, same_hardware=True)
    return loop, train(loop, settings(out, resumed=resumed))


def rows(out: Path) -> list[dict[str, Any]]:
    """Return the lines of ``metrics.jsonl``."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def keep_only(out: Path, step: int) -> None:
    """Delete all checkpoints but that of a step."""
    for path in list_checkpoints(out / "checkpoints"):
        if path.name != f"step-{step:08d}":
            shutil.rmtree(path)


def saved_steps(out: Path) -> list[int]:
    """Return the steps of the published checkpoints."""
    return [int(path.name.removeprefix("step-")) for path in list_checkpoints(out / "checkpoints")]


def fit(
    workload: Workload, out: Path, *, listener: Listener | None = None, **options: Any
) -> tuple[FitResult, list[str]]:
    """Train on the CPU, and return the result and the remarks."""
    listener = listener or Listener()
    options = {"device": "cpu", "memory_budget": "1GiB", "trials": 0, **options}
    return autobatch.fit(workload, out=out, progress=listener, **options), listener.notes


def fit_until(step: int, workload: Workload, out: Path, **options: Any) -> None:
    """Train, and stop after a step as a kill would, without a checkpoint."""
    with pytest.raises(KeyError):
        fit(workload, out, listener=ActingAfter(step, {}.popitem), **options)
