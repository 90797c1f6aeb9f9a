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
    OF_WHOLE,
    SearchAxis,
    applicable,
    defaults,
    parse_knobs,
)
from autobatch.core.progress import Progress
from autobatch.core.records.plan import Plan
from autobatch.core.records.tuning import LrTuning, Tuning
from autobatch.distributed.rank_plan import layout_of, limit_of_rank, limits_over_ranks, share_of_rank, spread
from autobatch.distributed.ranks import Alone, Ranks
from autobatch.setup.child import SetupProcess
from autobatch.tuning.apply_choice import with_choice, with_learning_rate
from autobatch.tuning.common_axes import common_axes
from autobatch.tuning.configuration import Measurement
from autobatch.tuning.find_fastest import Budget, StudyLocation, TuningResult, find_fastest
from autobatch.tuning.find_learning_rate import find_learning_rate
from autobatch.tuning.joint_trial import JointTrials
from autobatch.tuning.lr_runs import JointRuns, SharedRuns, ShortRuns
from autobatch.tuning.lr_trial import LrTrialSpec, Runs
from autobatch.tuning.trial import look_at_workload
from autobatch.tuning.trial_limit import TrialSpec
from autobatch.tuning.trial_source import OwnTrials, SharedTrials, Trials

TRIAL_SECONDS = 0.5
"""Approximate time that a trial measures for."""
LR_SUFFIX = "-learning-rate"
"""End of the name of a study of learning rates."""
_NOT_A_PURPOSE = ("budget_bytes", "total_bytes")
"""Fields of the key that do not belong to a study, because free memory makes no configuration fast."""


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
    """Storage of the study; None for a file of its own in the data directory."""
    study: str | None = None
    """Name of the study; None for one made from its purpose."""
    knobs: str | None = None
    """Names of the knobs to tune; None for all that apply."""
    is_precision_open: bool = True
    """True if no precision was asked for."""
    workers: int | None = None
    """Loader workers that were asked for; None if none were."""
    prefetch: int | None = None
    """Micro-batches per worker that were asked for; None if none were."""
    lr_trials: int = 0
    """Learning rates to try; 0 if none were asked for."""
    lr_steps: int = 0
    skips_nonfinite: bool = False
    """True to skip a non-finite step, as the training that follows does."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """Options that change the figures of a study, by name."""

    def trial_spec(self, samples: int, limit: int) -> TrialSpec:
        """Return the settings of trials with this many samples per step, under a limit on the micro-batch."""
        return TrialSpec(
            limit=limit,
            cap=self.cap,
            samples=samples,
            planned_steps=self.planned_steps,
            seconds=TRIAL_SECONDS,
            is_precision_open=self.is_precision_open,
            workers=self.workers,
            prefetch=self.prefetch,
        )

    def lr_trial_spec(self, plan: Plan) -> LrTrialSpec:
        """Return the settings of the short runs of a plan."""
        return LrTrialSpec(
            default=plan.learning_rate,
            target_batch=plan.target_batch,
            micro_batch=plan.micro_batch,
            precision=plan.precision,
            knobs=plan.knobs,
            steps=self.lr_steps,
            skips=self.skips_nonfinite,
        )


@dataclass(frozen=True, kw_only=True)
class PlanTuner:
    """Tuner of a plan, in the process that holds its setup."""

    process: SetupProcess
    settings: TuneSettings
    home: Path
    """Data directory, in which studies are kept."""
    progress: Progress
    """Receives every trial and the choices."""
    expired: Callable[[], bool] = lambda: False
    """Asked before every trial whether the time is over."""
    ranks: Ranks = field(default_factory=Alone)
    """The processes that tune together: all of them make the same calls, and rank 0 decides."""
    clock: Callable[[], float] = time.monotonic

    def tune(self, plan: Plan, limit: int) -> tuple[Plan, Tuning]:
        """Find the fastest configuration of a plan, and put it into the plan.

        Args:
            plan: the plan with every knob at its default.
            limit: the largest micro-batch that fits with every knob at its default.

        Raises:
            InputError: the storage is not usable, the study was made for something else, or the ranks differ
                in what can be tuned.
            AutobatchError: the workload does not run with every knob at its default.
        """
        settings, ranks = self.settings, self.ranks
        limit = limit_of_rank(ranks, plan) if plan.ranks else limit
        task = settings.trial_spec(max(1, share_of_rank(ranks, plan, sum(self._shares(plan)))), limit)
        self.progress.doing("looking for what can be tuned")
        context = self.process.call("looking at the workload", look_at_workload, task)
        axes, notes = applicable(context, None if settings.knobs is None else parse_knobs(settings.knobs))
        self._note(notes)
        axes = common_axes(axes, ranks)
        task = replace(task, defaults=defaults(axes))
        own: Trials = OwnTrials(self.process, task)
        if layout_of(plan) is not None:
            self.progress.note(f"{', '.join(OF_WHOLE)} are not tuned, because the ranks share the model")
            own = JointTrials(self.process, task, ranks, plan.target_batch)
        if ranks.world == 1:
            found = self._find_fastest(own, axes)
            chosen = with_choice(plan, found, axes)
        else:
            found, chosen = self._tune_together(SharedTrials(own, ranks, self._shares(plan)), plan, axes)
        self._note(found.tuning.notes)
        self.progress.tuned(found.tuning)
        return self._planned(plan, chosen), found.tuning

    def _find_fastest(self, trials: Trials, axes: Sequence[SearchAxis]) -> TuningResult:
        settings = self.settings
        return find_fastest(
            trials.measure,
            axes,
            budget=Budget(settings.trials, self.expired, settings.run_samples),
            seed=settings.seed,
            place=self.locate(axes),
            confirm_fits=trials.confirm_fits,
            progress=self.progress,
            clock=self.clock,
        )

    def _shares(self, plan: Plan) -> list[int]:
        """Return the samples of a batch that each rank takes."""
        return [one.samples for one in plan.ranks] or [sum(plan.micro_batches)]

    def _tune_together(
        self, trials: SharedTrials, plan: Plan, axes: Sequence[SearchAxis]
    ) -> tuple[TuningResult, Plan]:
        """Search on rank 0, with trials on all ranks; every rank plans what fits on it."""
        ranks = self.ranks
        if ranks.rank == 0:
            found = self._find_fastest(trials, axes)
            trials.end([msgspec.to_builtins(found.tuning), found.winner])
        else:
            tuning, winner = trials.follow()
            winner = None if winner is None else Measurement(*winner)
            found = TuningResult(msgspec.convert(tuning, Tuning), winner)
        chosen = with_choice(plan, found, axes)
        if chosen == plan:
            return found, plan
        own = trials.micro_batch(found.tuning.best) or limit_of_rank(ranks, plan)
        limits = limits_over_ranks(ranks, own, self.process.info.device)
        return found, spread(chosen, limits, layout_of(plan))

    def tune_learning_rate(self, plan: Plan) -> tuple[Plan, LrTuning]:
        """Try learning rates in short runs of a plan, and put a better one into the plan.

        Args:
            plan: the plan, with the tuner's choice if there is one.

        Raises:
            InputError: the storage is not usable, or the study was made for something else.
            AutobatchError: the workload does not train at its own learning rate.
        """
        task = self.settings.lr_trial_spec(plan)
        if layout_of(plan) is None:
            # A short run trains whole batches in one process, so that one rank is enough.
            runs = ShortRuns(self.process, task)
            plain = self.ranks.once(lambda: msgspec.to_builtins(self._find_learning_rate(runs, task)))
        else:
            plain = self._find_learning_rate_together(plan, task)
        found = msgspec.convert(plain, LrTuning)
        self._note(found.notes)
        chosen = with_learning_rate(plan, found, declared=self.process.info.learning_rate)
        return self._planned(plan, chosen), found

    def _find_learning_rate_together(self, plan: Plan, task: LrTrialSpec) -> Any:
        """Search on rank 0, with short runs of all ranks, which share the model."""
        limits = [one.limit for one in plan.ranks]
        own = JointRuns(self.process, task, self.ranks, limits, self.settings.seed)
        runs = SharedRuns(own, self.ranks)
        if self.ranks.rank:
            return runs.follow()
        plain = msgspec.to_builtins(self._find_learning_rate(runs, task))
        runs.end(plain)
        return plain

    def _find_learning_rate(self, runs: Runs, task: LrTrialSpec) -> LrTuning:
        settings = self.settings
        return find_learning_rate(
            runs,
            task,
            budget=Budget(settings.lr_trials, self.expired),
            seed=settings.seed,
            place=self._locate_lr(task),
            progress=self.progress,
            clock=self.clock,
        )

    def locate(self, axes: Sequence[SearchAxis]) -> StudyLocation:
        """Locate the study of configurations, which compiling and loader workers make another one."""
        made_for = self._purpose()
        if any(axis.name == COMPILE for axis in axes):
            made_for["planned_steps"] = self.settings.planned_steps
        if self.settings.workers is not None:
            made_for["workers"] = self.settings.workers
        return self._location(made_for, [made_for, axes])

    def _note(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.progress.note(line)

    def _planned(self, plan: Plan, chosen: Plan) -> Plan:
        """Report the chosen plan if it is another one."""
        if chosen != plan:
            self.progress.planned(chosen)
        return chosen

    def _locate_lr(self, task: LrTrialSpec) -> StudyLocation:
        """Locate the study of learning rates. Its figures hardly depend on the tuner's choice."""
        made_for = self._purpose() | {
            "train_samples": self.process.info.samples,
            "learning_rate": task.default,
            "lr_steps": task.steps,
            "seed": self.settings.seed,
        }
        return self._location(made_for, made_for, suffix=LR_SUFFIX)

    def _purpose(self) -> dict[str, Any]:
        """Return the values that the figures of any study depend on, by name."""
        key: dict[str, Any] = self.process.info.key
        return {name: key[name] for name in key if name not in _NOT_A_PURPOSE} | dict(self.settings.asked)

    def _location(self, made_for: dict[str, Any], content: object, *, suffix: str = "") -> StudyLocation:
        """Name a study as asked, else by a digest of its content."""
        digest = hashlib.sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()[:12]
        name = f"{self.settings.study or f'{self.process.info.name}-{digest}'}{suffix}"
        return StudyLocation(name, self.settings.storage or self._file(name), made_for)

    def _file(self, name: str) -> str | None:
        """Return the file of a study in the data directory; None to keep it in memory."""
        folder = self.home / "studies"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK | os.X_OK):
                return str(folder / f"{name}.log")
            reason = "it is not writable"
        except OSError as error:
            reason = error.strerror or str(error)
        self.progress.note(
            f"the study {name} is kept in memory and cannot be continued later: {folder}: {reason}. Give "
            "--storage, or set AUTOBATCH_HOME to a writable directory"
        )
        return None
