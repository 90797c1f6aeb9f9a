"""Tuning of a plan: the fastest configuration at its batch, then the learning rate."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from autobatch.core.knobs import (
    COMPILE,
    PRECISION,
    SPLIT,
    Configuration,
    SearchAxis,
    applicable,
    defaults,
    parse_knobs,
)
from autobatch.core.progress import Progress
from autobatch.core.records import LrTuning, Plan, Tuning
from autobatch.planning import micro_batches
from autobatch.probing.child import ChildCrashed, SetupProcess
from autobatch.probing.setup import SetupInfo
from autobatch.tuning.configuration import RUNS, Measurement, infeasible
from autobatch.tuning.find_fastest import Budget, StudyLocation, TuningResult, find_fastest
from autobatch.tuning.find_learning_rate import find_learning_rate
from autobatch.tuning.lr_trial import LrTrialSpec, ShortRuns
from autobatch.tuning.trial import TrialSpec, confirm_trial, look_at_workload, measure_trial

TRIAL_SECONDS = 0.5
"""Time that a trial measures for, about."""
LR_SUFFIX = "-learning-rate"
"""End of the name of a study of learning rates."""
_NOT_A_PURPOSE = ("budget_bytes", "total_bytes")
"""Fields of the key that do not belong to a study: free memory changes, and does not make a
configuration fast."""


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """Settings of the tuner: plain values."""

    trials: int
    planned_steps: int
    """Optimizer steps of the run that is tuned for."""
    cap: int
    """The largest micro-batch that any configuration may use."""
    run_samples: int | None = None
    """Samples of the run, to stop when tuning cannot pay back; None to run all trials."""
    seed: int = 0
    storage: str | None = None
    """Where the study is kept; None for a file of its own in the data directory."""
    study: str | None = None
    """Name of the study; None for one that is made from its purpose."""
    knobs: str | None = None
    """Names of the knobs to tune; None for all that apply."""
    is_precision_open: bool = True
    """No precision was asked for."""
    workers: int | None = None
    """Loader workers that were asked for; None if none were."""
    prefetch: int | None = None
    """Micro-batches per worker that were asked for; None if none were."""
    lr_trials: int = 0
    lr_steps: int = 0
    skips_nonfinite: bool = False
    """Whether a step that is not finite is skipped, as in the training that follows."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """What was asked for and changes the figures of a study, by name."""


def tune_plan(
    process: SetupProcess,
    plan: Plan,
    limit: int,
    settings: TuneSettings,
    *,
    home: Path,
    progress: Progress,
    expired: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Plan, Tuning]:
    """Find the fastest configuration of a plan, and put it into the plan.

    Args:
        process: holds the setup; trials run there.
        plan: the plan with every knob at its default.
        limit: the largest micro-batch that fits with every knob at its default.
        settings: settings of the tuner.
        home: data directory, in which studies are kept.
        progress: receives each trial and the choice.
        expired: is asked before every trial whether the time is over.
        clock: seconds.

    Raises:
        InputError: the storage is not usable, or the study was made for something else.
        AutobatchError: the workload does not run with every knob at its default.
    """
    task = TrialSpec(
        limit=limit,
        cap=settings.cap,
        samples=sum(plan.micro_batches),
        planned_steps=settings.planned_steps,
        seconds=TRIAL_SECONDS,
        is_precision_open=settings.is_precision_open,
        workers=settings.workers,
        prefetch=settings.prefetch,
    )
    context = process.call("looking at the workload", look_at_workload, task)
    asked = None if settings.knobs is None else parse_knobs(settings.knobs)
    axes, notes = applicable(context, asked)
    for line in notes:
        progress.note(line)
    trials = _Trials(process, replace(task, defaults=defaults(axes)))
    found = find_fastest(
        trials.measure,
        axes,
        budget=Budget(settings.trials, expired, settings.run_samples),
        seed=settings.seed,
        place=_location(process.info, settings, axes, home=home, progress=progress),
        confirm_fits=trials.confirm_fits,
        progress=lambda number, values, one: progress.measured(
            number, settings.trials, values, one.samples_per_s, one.failure
        ),
        clock=clock,
    )
    for line in found.tuning.notes:
        progress.note(line)
    progress.tuned(found.tuning)
    chosen = with_choice(plan, found, axes)
    if chosen != plan:
        progress.planned(chosen)
    return chosen, found.tuning


def tune_learning_rate(
    process: SetupProcess,
    plan: Plan,
    settings: TuneSettings,
    *,
    home: Path,
    progress: Progress,
    expired: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Plan, LrTuning]:
    """Try learning rates in short runs of a plan, and put one that is better into the plan.

    Args:
        process: holds the setup; runs train there.
        plan: the plan, with the tuner's choice if there is one.
        settings: settings of the tuner.
        home: data directory, in which studies are kept.
        progress: receives each learning rate and its loss.
        expired: is asked before every trial whether the time is over.
        clock: seconds.

    Raises:
        InputError: the storage is not usable, or the study was made for something else.
        AutobatchError: the workload does not train at its own learning rate.
    """
    task = LrTrialSpec(
        default=plan.learning_rate,
        target_batch=plan.target_batch,
        micro_batch=plan.micro_batch,
        precision=plan.precision,
        knobs=plan.knobs,
        steps=settings.lr_steps,
        skips=settings.skips_nonfinite,
    )
    found = find_learning_rate(
        ShortRuns(process, task),
        task,
        budget=Budget(settings.lr_trials, expired),
        seed=settings.seed,
        place=_lr_location(process.info, settings, task, home, progress),
        progress=lambda number, rate, loss, failure: progress.tried_rate(
            number, settings.lr_trials, rate, loss, failure
        ),
        clock=clock,
    )
    for line in found.notes:
        progress.note(line)
    chosen = with_learning_rate(plan, found, declared=process.info.learning_rate)
    if chosen != plan:
        progress.planned(chosen)
    return chosen, found


def with_choice(plan: Plan, found: TuningResult, axes: Sequence[SearchAxis]) -> Plan:
    """Put the tuner's choice into a plan. The effective batch stays."""
    base = defaults(axes)
    if found.winner is None or found.tuning.best == base:
        return plan
    sizes = micro_batches(sum(plan.micro_batches), found.winner.micro_batch)
    # Knobs at their default are left out, and the split is the plan itself.
    knobs = {
        name: value for name, value in found.tuning.best.items() if value != base[name] and name != SPLIT
    }
    return msgspec.structs.replace(
        plan,
        micro_batch=sizes[0],
        accumulation_steps=len(sizes),
        micro_batches=sizes,
        precision=knobs.pop(PRECISION, None) or plan.precision,
        knobs=knobs,
    )


def with_learning_rate(plan: Plan, found: LrTuning, *, declared: float) -> Plan:
    """Put the learning rate that was found into a plan; return the plan if the default stays."""
    if found.best == plan.learning_rate:
        return plan
    return msgspec.structs.replace(
        plan,
        learning_rate=found.best,
        learning_rate_rule="tuned",
        learning_rate_factor=found.best / declared,
        learning_rate_source=(
            f"found by the tuner: {found.trials} runs of {found.steps} optimizer steps at this batch"
        ),
    )


@dataclass(frozen=True)
class _Trials:
    """Trials in the process that holds the setup. One that crashes a child is infeasible."""

    process: SetupProcess
    task: TrialSpec

    def measure(self, values: Configuration) -> Measurement:
        """Run a trial."""
        try:
            return self.process.call("a trial", measure_trial, self.task, dict(values))
        except ChildCrashed as crash:
            failure = str(crash)
        self.process.restart()
        return infeasible(RUNS, failure)

    def confirm_fits(self, values: Configuration) -> str | None:
        """Run a configuration inside the enforced budget. Return why it does not fit, None if it fits."""
        try:
            return self.process.call("the check of the best trial", confirm_trial, self.task, dict(values))
        except ChildCrashed as crash:
            failure = str(crash)
        self.process.restart()
        return failure


def _location(
    info: SetupInfo, settings: TuneSettings, axes: Sequence[SearchAxis], *, home: Path, progress: Progress
) -> StudyLocation:
    """Locate the study: by the name that was given, else by a name made from what its figures depend on."""
    made_for = _purpose(info, settings)
    if any(axis.name == COMPILE for axis in axes):
        made_for["planned_steps"] = settings.planned_steps
    if settings.workers is not None:
        made_for["workers"] = settings.workers
    content = msgspec.json.encode([made_for, axes], order="deterministic")
    name = settings.study or f"{info.name}-{hashlib.sha256(content).hexdigest()[:12]}"
    return StudyLocation(name, _storage(settings, name, home, progress), made_for)


def _lr_location(
    info: SetupInfo, settings: TuneSettings, task: LrTrialSpec, home: Path, progress: Progress
) -> StudyLocation:
    """Locate the study of learning rates. Its figures hardly depend on the tuner's choice."""
    made_for = _purpose(info, settings) | {
        "train_samples": info.samples,
        "learning_rate": task.default,
        "lr_steps": task.steps,
        "seed": settings.seed,
    }
    digest = hashlib.sha256(msgspec.json.encode(made_for, order="deterministic")).hexdigest()[:12]
    name = f"{settings.study or f'{info.name}-{digest}'}{LR_SUFFIX}"
    return StudyLocation(name, _storage(settings, name, home, progress), made_for)


def _purpose(info: SetupInfo, settings: TuneSettings) -> dict[str, Any]:
    """Return what the figures of any study depend on, by name."""
    key: dict[str, Any] = {name: value for name, value in info.key.items() if name not in _NOT_A_PURPOSE}
    return key | dict(settings.asked)


def _storage(settings: TuneSettings, name: str, home: Path, progress: Progress) -> str | None:
    """Return where a study is kept: as asked, else in a file of its own, else (None) in memory."""
    if settings.storage is not None:
        return settings.storage
    folder = home / "studies"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return str(folder / f"{name}.log")
        reason = "it is not writable"
    except OSError as error:
        reason = error.strerror or str(error)
    progress.note(
        f"the study {name} is kept in memory and cannot be continued later: {folder}: {reason}; give "
        "--storage, or set AUTOBATCH_HOME to a writable directory"
    )
    return None
