"""Trials: the micro-batch that a configuration allows, a check of its losses, and its speed.

    configuration ──► limit (predicted, else searched) ──► fits? ──► losses ──► seconds per step

`autobatch.tuning.trial_limit` finds the limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from autobatch.core.knobs import (
    LOADER_WORKERS,
    PREFETCH,
    Configuration,
    TuningContext,
    numeric_signature,
)
from autobatch.device.oom import Verdict, classify, first_line
from autobatch.planning import micro_batches
from autobatch.search.confirm import is_lost
from autobatch.setup.attempt import TrainSetup, attempt
from autobatch.setup.child import Session
from autobatch.setup.setup import with_knobs
from autobatch.tuning.configuration import LOSS, MEMORY, RUNS, Key, Measurement, infeasible, key_of
from autobatch.tuning.context import describe_context
from autobatch.tuning.lead import OTHER_ENDED
from autobatch.tuning.loss_check import LossCheck
from autobatch.tuning.timing import Joint, time_steps
from autobatch.tuning.trial_limit import TrialLimits, TrialSpec, micro_batch_of
from autobatch.workload.feed import AHEAD


@dataclass
class TrialRunner:
    """Runner of a study's trials on one setup, which keeps limits and checks for later trials."""

    setup: TrainSetup
    task: TrialSpec
    limits: TrialLimits = field(init=False)
    _gaps: dict[Key, float] = field(default_factory=dict)
    _setups: dict[Key, float] = field(default_factory=dict)
    _check: LossCheck | None = None

    def __post_init__(self) -> None:
        """Begin without any limits."""
        self.limits = TrialLimits(self.setup, self.task)

    def measure(self, values: Configuration) -> Measurement:
        """Run a trial.

        An error makes a configuration infeasible. An error with every knob at its default is the workload's
        own, unless it is out of memory.

        Raises:
            Exception: whatever the workload raises with every knob at its default, except out of memory.
        """
        return self.guarded(values, self._measure)

    def guarded(self, values: Configuration, run: Callable[[Configuration], Measurement]) -> Measurement:
        """Run a part of a trial, and turn an error that the configuration caused into a measurement."""
        try:
            return run(values)
        except Exception as error:
            out_of_memory = classify(error) is not Verdict.NONE
            lost = is_lost(error)
            if not (out_of_memory or lost or self.task.changes(values)):
                raise
            found = infeasible(MEMORY if out_of_memory else RUNS, OTHER_ENDED if lost else first_line(error))
        # Outside the except block, nothing keeps the failed step's tensors alive.
        self.setup.device.release()
        return found

    def confirm_fits(self, values: Configuration) -> str | None:
        """Run a configuration within the enforced budget. Return why it does not fit, None if it fits."""
        limit = self.limits.limit(values)
        if isinstance(limit, str):
            return limit
        size = micro_batch_of(limit, self.task.samples, values)
        return attempt(with_knobs(self.setup, values), size).attempt.reason

    def size(self, values: Configuration) -> Measurement:
        """Return the micro-batch that a configuration may run at, without a speed, or why there is none."""
        return self.guarded(values, self._size)

    def _measure(self, values: Configuration) -> Measurement:
        found = self._size(values)
        if not found.feasible:
            return found
        timed = self.time(values, found.micro_batch)
        return timed._replace(constraints=found.constraints)

    def _size(self, values: Configuration) -> Measurement:
        size, reason = self.limits.size(values)
        if reason is not None:
            return infeasible(MEMORY, reason, micro_batch=size)
        over = self._loss_over(values)
        if over > 0:
            reason = f"its losses differ from the reference by {over:.1%} more than the tolerance"
            return infeasible(LOSS, reason, over=over, micro_batch=size)
        return Measurement(0.0, size, constraints={LOSS: over})

    def time(self, values: Configuration, size: int, joint: Joint | None = None) -> Measurement:
        """Time a configuration; over ranks that share the model, ``joint`` has the micro-batches."""
        sizes = micro_batches(self.task.samples, size) if joint is None else joint.batch.sizes()
        steps = len(sizes) if joint is None else joint.steps
        fed = {LOADER_WORKERS: self.task.workers} | dict(values)
        prefetch = self.task.prefetch or int(values.get(PREFETCH) or AHEAD)
        setup = with_knobs(self.setup, fed)
        timing = time_steps(setup, sizes, self.task.seconds, prefetch=prefetch, joint=joint)
        # A configuration that is measured again reuses compiled code.
        once = self._setups.setdefault(key_of(values), timing.setup)
        seconds = timing._replace(setup=once).a_step(steps, self.task.planned_steps)
        return Measurement(self.task.samples / seconds, sizes[0])

    def _loss_over(self, values: Configuration) -> float:
        signature = numeric_signature(values)
        reference = {name: value for name, value in signature.items() if name in self.task.changes(signature)}
        if not reference and self.setup.precision == "fp32":
            return -1.0
        key = key_of(signature)
        if key not in self._gaps:
            self._check = self._check or LossCheck(self.setup, self.task.limit)
            self._gaps[key] = self._check.over(with_knobs(self.setup, values))
        return self._gaps[key]


def look_at_workload(session: Session, task: TrialSpec) -> TuningContext:
    """Return the context that decides which knobs apply to the workload of a session."""
    return describe_context(
        session.setup,
        precision_is_open=task.is_precision_open,
        micro_batch=micro_batches(task.samples, task.limit)[0],
        planned_steps=task.planned_steps,
        workers_are_open=task.workers is None,
    )


def measure_trial(session: Session, task: TrialSpec, values: Configuration) -> Measurement:
    """Run a trial in a session; see `TrialRunner.measure`."""
    return runner_of(session, task).measure(values)


def confirm_trial(session: Session, task: TrialSpec, values: Configuration) -> str | None:
    """Run a configuration within the enforced budget in a session; see `TrialRunner.confirm_fits`."""
    return runner_of(session, task).confirm_fits(values)


def size_trial(session: Session, task: TrialSpec, values: Configuration) -> Measurement:
    """Return the micro-batch of a configuration in a session; see `TrialRunner.size`."""
    return runner_of(session, task).size(values)


def runner_of(session: Session, task: TrialSpec) -> TrialRunner:
    """Return the runner that the trials of one study share."""
    runner = session.find(TrialRunner)
    if runner is None or runner.task != task:
        return session.keep(TrialRunner(session.setup, task))
    # A meeting with other ranks replaces the setup of the session.
    runner.setup = runner.limits.setup = session.setup
    return runner
