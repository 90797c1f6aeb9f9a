"""Tuning of a plan: the fastest configuration at its batch, then the learning rate."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from autobatch.core.knobs import (
    COMPILE,
    PRECISION,
    SearchAxis,
    Value,
    applicable,
    defaults,
    parse_knobs,
)
from autobatch.core.options import Options
from autobatch.core.progress import Progress
from autobatch.core.records import LrTuning, Plan, Tuning
from autobatch.distributed.rank_plan import limit_of_rank, limits_over_ranks, share_of_rank, spread
from autobatch.distributed.ranks import Ranks
from autobatch.planning import micro_batches
from autobatch.rehearsal.process import SetupProcess
from autobatch.tuning.configuration import Budget, Measurement, StorageFailed, StudyLocation, changes
from autobatch.tuning.find_fastest import TuningResult, find_fastest
from autobatch.tuning.learning_rate import LrTrialSpec, ShortRuns, find_learning_rate
from autobatch.tuning.trial import Trials, TrialSpec, look_at_workload

T = TypeVar("T")
DEFAULT_TRIALS = 8
"""Configurations that are measured if no number was asked for."""
TRIAL_SECONDS = 0.5
"""Approximate time that a trial measures for."""
LR_SUFFIX = "-learning-rate"
"""End of the name of a study of learning rates."""
_NOT_A_PURPOSE = ("budget_bytes", "total_bytes")
"""Fields of the key that do not belong to a study, because free memory makes no configuration fast."""


@dataclass(frozen=True, kw_only=True)
class PlanTuner:
    """Tuner of a plan, in the process that holds its setup.

    Over ranks, rank 0 tunes alone, at its share of the batch, and every rank confirms the choice.
    """

    process: SetupProcess
    options: Options
    planned_steps: int
    """Optimizer steps of the run that is tuned for."""
    home: Path
    """Data directory, in which studies are kept."""
    progress: Progress
    """Receives every trial and the choices."""
    expired: Callable[[], bool] = lambda: False
    """Asked before every trial whether the time is over."""
    ranks: Ranks = field(default_factory=Ranks)
    """The processes that train together; all of them make the same calls."""

    @property
    def trials(self) -> int:
        """Configurations to measure."""
        asked = self.options.tune.trials
        return DEFAULT_TRIALS if asked is None else asked

    @property
    def lr_trials(self) -> int:
        """Learning rates to try."""
        return self.options.tune.lr_trials if self.options.tune.tune_lr else 0

    def tune(self, plan: Plan, limit: int) -> tuple[Plan, Tuning | None]:
        """Find the fastest configuration of a plan, and put it into the plan; None if a storage lost it.

        Args:
            plan: the plan with every knob at its default.
            limit: the largest micro-batch that fits with every knob at its default.

        Raises:
            InputError: the storage is not usable, or the study was made for something else.
            AutobatchError: the workload does not run with every knob at its default.
        """
        task = self._trial_spec(plan, limit_of_rank(self.ranks, plan) if plan.ranks else limit)
        answer = self._answer_or_note(lambda: self._find_fastest(task))
        if answer is None:
            return plan, None
        found, default = answer
        chosen, tuning = self._with_choice(plan, found, replace(task, defaults=default))
        for line in tuning.notes:
            self.progress.note(line)
        self.progress.tuned(tuning)
        return self._planned(plan, chosen), tuning

    def _answer_or_note(self, search: Callable[[], T]) -> T | None:
        """Search on rank 0. A training goes on with its plan if the storage fails in the middle of that."""

        def run() -> T | None:
            try:
                return search()
            except StorageFailed as error:
                if self.options.command != "fit":
                    raise
                self.progress.note(f"{error}. The training goes on with the plan as it is")
                return None

        return self.ranks.once(run)

    def _find_fastest(self, task: TrialSpec) -> tuple[TuningResult, dict[str, Value]]:
        """Search, and return the answer and the default configuration."""
        options = self.options
        self.progress.doing("looking for what can be tuned")
        context = self.process.call("looking at the workload", look_at_workload, task)
        asked = None if options.tune.knobs is None else parse_knobs(options.tune.knobs)
        axes, notes = applicable(context, asked)
        for line in notes:
            self.progress.note(line)
        trials = Trials(self.process, replace(task, defaults=defaults(axes)))
        # A run pays back only what it was not asked to measure.
        pays_back = options.command == "fit" and options.tune.trials is None
        run_samples = self.planned_steps * options.target_batch if pays_back else None
        found = find_fastest(
            trials.measure,
            trials.confirm,
            axes,
            budget=Budget(self.trials, self.expired, run_samples),
            seed=options.device.seed,
            place=self.locate(axes),
            progress=self.progress,
        )
        return found, defaults(axes)

    def _with_choice(self, plan: Plan, found: TuningResult, task: TrialSpec) -> tuple[Plan, Tuning]:
        """Put the choice into the plan, if every rank can run it. The effective batch stays."""
        tuning, micro_batch = found
        if not micro_batch or not changes(tuning.best, task.defaults):
            return plan, tuning
        sizes = micro_batches(sum(plan.micro_batches), micro_batch, plan.multiple)
        # Knobs at their default are left out, and the split is the plan itself.
        knobs = task.changes(tuning.best)
        chosen = msgspec.structs.replace(
            plan,
            micro_batch=sizes[0],
            accumulation_steps=len(sizes),
            micro_batches=sizes,
            precision=knobs.pop(PRECISION, None) or plan.precision,
            knobs=knobs,
        )
        if self.ranks.world == 1:
            return chosen, tuning
        own = Measurement(0.0, micro_batch)
        if self.ranks.rank:
            own = Trials(self.process, task).confirm(tuning.best)
        failures = self.ranks.gather(own.failure)
        failed = next((rank for rank, failure in enumerate(failures) if failure is not None), None)
        if failed is not None:
            note = f"kept the plan: the fastest configuration fails on rank {failed}: {failures[failed]}"
            base = {"best": dict(task.defaults), "best_samples_per_s": tuning.baseline_samples_per_s}
            return plan, msgspec.structs.replace(tuning, **base, notes=[*tuning.notes, note])
        limits = limits_over_ranks(self.ranks, own.micro_batch, self.process.info.device)
        return spread(chosen, limits), tuning

    def tune_learning_rate(self, plan: Plan) -> tuple[Plan, LrTuning | None]:
        """Try learning rates in short runs of a plan, and put a better one into the plan; see `tune`.

        Args:
            plan: the plan, with the tuner's choice if there is one.

        Raises:
            InputError: the storage is not usable, or the study was made for something else.
            AutobatchError: the workload does not train at its own learning rate.
        """
        skips = self.options.train.on_nonfinite == "skip"
        task = LrTrialSpec(plan, self.options.tune.lr_steps, skips)
        # A short run trains whole batches in one process, so that one rank is enough.
        found = self._answer_or_note(
            lambda: find_learning_rate(
                ShortRuns(self.process, task),
                budget=Budget(self.lr_trials, self.expired),
                seed=self.options.device.seed,
                place=self._locate_lr(task),
                progress=self.progress,
            )
        )
        if found is None:
            return plan, None
        for line in found.notes:
            self.progress.note(line)
        if found.best == plan.learning_rate:
            return plan, found
        source = f"tuned in {found.trials} runs of {found.steps} optimizer steps at this batch"
        chosen = msgspec.structs.replace(
            plan,
            learning_rate=found.best,
            learning_rate_rule="tuned",
            learning_rate_factor=found.best / self.process.info.learning_rate,
            learning_rate_source=source,
        )
        return self._planned(plan, chosen), found

    def locate(self, axes: Sequence[SearchAxis]) -> StudyLocation:
        """Locate the study of configurations, which compiling and loader workers make another one."""
        made_for = self._purpose()
        if any(axis.name == COMPILE for axis in axes):
            made_for["planned_steps"] = self.planned_steps
        if self._workers() is not None:
            made_for["workers"] = self._workers()
        return self._location(made_for, [made_for, axes])

    def _trial_spec(self, plan: Plan, limit: int) -> TrialSpec:
        """Return the settings of the trials of a plan, under a limit on the micro-batch of this rank."""
        options, info = self.options, self.process.info
        caps = (options.target_batch, options.search.max_micro_batch, info.samples)
        return TrialSpec(
            limit=limit,
            multiple=plan.multiple,
            cap=min(cap for cap in caps if cap is not None),
            samples=max(1, share_of_rank(self.ranks, plan, sum(plan.micro_batches))),
            planned_steps=self.planned_steps,
            seconds=TRIAL_SECONDS,
            is_precision_open=options.device.precision == "auto",
            workers=self._workers(),
            prefetch=info.prefetch if options.train.prefetch is None else options.train.prefetch,
        )

    def _workers(self) -> int | None:
        """Return the loader workers that were asked for; None if none were."""
        asked = self.options.train.workers
        return self.process.info.workers if asked is None else asked

    def _planned(self, plan: Plan, chosen: Plan) -> Plan:
        """Report the chosen plan if it is another one."""
        if chosen != plan:
            self.progress.planned(chosen)
        return chosen

    def _locate_lr(self, task: LrTrialSpec) -> StudyLocation:
        """Locate the study of learning rates. Its results hardly depend on the tuner's choice."""
        made_for = self._purpose() | {
            "train_samples": self.process.info.samples,
            "learning_rate": task.plan.learning_rate,
            "lr_steps": task.steps,
            "seed": self.options.device.seed,
        }
        return self._location(made_for, made_for, suffix=LR_SUFFIX)

    def _purpose(self) -> dict[str, Any]:
        """Return the values that the results of any study depend on, by name."""
        key: dict[str, Any] = self.process.info.key
        budget = self.options.device.memory_budget
        return {name: key[name] for name in key if name not in _NOT_A_PURPOSE} | {
            "target_batch": self.options.target_batch,
            "memory_budget": None if budget is None else str(budget),
            "max_micro_batch": self.options.search.max_micro_batch,
        }

    def _location(self, made_for: dict[str, Any], content: object, *, suffix: str = "") -> StudyLocation:
        """Name a study as asked, else by a digest of its content."""
        digest = hashlib.sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()[:12]
        name = f"{self.options.tune.study or f'{self.process.info.name}-{digest}'}{suffix}"
        return StudyLocation(name, self.options.tune.storage or self._file(name), made_for)

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
