"""Trials: the micro-batch that a configuration allows, a check of its losses, and its speed.

    configuration ──► limit (predicted, else searched) ──► fits? ──► losses ──► seconds per step

A micro-batch that a trace predicts far below or above the budget is not run to confirm that. One close to the
limit is run once within the enforced budget.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from autobatch.core.knobs import (
    COMPILE,
    EXPANDABLE,
    LOADER_WORKERS,
    PREFETCH,
    SPLIT,
    Configuration,
    TuningContext,
    Value,
    memory_signature,
    numeric_signature,
)
from autobatch.core.units import format_bytes
from autobatch.device.allocator.trace import replay
from autobatch.device.oom import Verdict, classify, first_line
from autobatch.footprint.largest import largest
from autobatch.footprint.predict import Footprint
from autobatch.footprint.program import Untraceable
from autobatch.planning import micro_batches
from autobatch.probing.attempt import Outcome, TrainSetup, attempt
from autobatch.probing.child import Session
from autobatch.probing.confirm import is_lost
from autobatch.probing.limits import ReplayPredictor, first_size
from autobatch.probing.search import search
from autobatch.probing.setup import with_knobs
from autobatch.probing.traced_setup import trace_footprint
from autobatch.tuning.configuration import LOSS, MEMORY, RUNS, Key, Measurement, infeasible, key_of
from autobatch.tuning.context import describe_context
from autobatch.tuning.lead import OTHER_ENDED
from autobatch.tuning.loss_check import LossCheck
from autobatch.tuning.timing import Joint, time_steps
from autobatch.workload.feed import AHEAD


@dataclass(frozen=True, kw_only=True)
class TrialSpec:
    """Settings of the trials of a study: plain values, which travel to a child process."""

    limit: int
    """The largest micro-batch that fits with every knob at its default."""
    cap: int
    """The largest micro-batch that any configuration may use."""
    samples: int
    """Samples of an optimizer step on one rank."""
    planned_steps: int
    """Optimizer steps over which one-time costs are spread."""
    seconds: float
    """Approximate time that a trial measures for."""
    is_precision_open: bool = True
    """No precision was asked for."""
    workers: int | None = None
    """Loader workers that were asked for; None if none were."""
    prefetch: int | None = None
    """Micro-batches per worker that were asked for; None if none were."""
    defaults: Configuration = field(default_factory=dict)
    """Values that change nothing. A knob that is missing is at its default."""


@dataclass
class TrialRunner:
    """Runner of a study's trials on one setup, which keeps limits and checks for later trials."""

    setup: TrainSetup
    task: TrialSpec
    _limits: dict[Key, int | str] = field(default_factory=dict)
    _predicted: dict[Key, Footprint | None] = field(default_factory=dict)
    _ran: dict[Key, int] = field(default_factory=dict)
    _gaps: dict[Key, float] = field(default_factory=dict)
    _setups: dict[Key, float] = field(default_factory=dict)
    _check: LossCheck | None = None

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
            if not (out_of_memory or lost or self._changes(values)):
                raise
            found = infeasible(MEMORY if out_of_memory else RUNS, OTHER_ENDED if lost else first_line(error))
        # Outside the except block, nothing keeps the failed step's tensors alive.
        self.setup.device.release()
        return found

    def confirm_fits(self, values: Configuration) -> str | None:
        """Run a configuration within the enforced budget. Return why it does not fit, None if it fits."""
        limit = self._limit(values)
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
        limit = self._limit(values)
        if isinstance(limit, str):
            return infeasible(MEMORY, limit)
        size = micro_batch_of(limit, self.task.samples, values)
        reason = self._does_not_fit(values, size)
        if reason is not None:
            limit = self._search(values, cap=size - 1) if size > 1 else 0
            if not limit:
                return infeasible(MEMORY, reason, micro_batch=size)
            self._limits[key_of(memory_signature(values))] = limit
            size = micro_batch_of(limit, self.task.samples, values)
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

    def _changes(self, values: Configuration) -> dict[str, Value]:
        """Return the values that are not at their default, except the split."""
        return {
            name: value
            for name, value in values.items()
            if name != SPLIT and value != self.task.defaults.get(name, value)
        }

    def _limit(self, values: Configuration) -> int | str:
        """Return the largest micro-batch of a configuration, or the reason why there is none.

        A compiled configuration starts from what fits without the compiler, because a search would compile
        every size anew.
        """
        compiled = self._limits.get(key_of(memory_signature(values)))
        if compiled is not None:
            return compiled
        values = {name: value for name, value in values.items() if name != COMPILE}
        signature = memory_signature(values)
        if not self._changes(signature):
            return self.task.limit
        key = key_of(signature)
        if key not in self._limits:
            self._limits[key] = self._predict_limit(values)
        return self._limits[key]

    def _predict_limit(self, values: Configuration) -> int | str:
        step = self._footprint(values)
        if step is not None:
            device = with_knobs(self.setup, values).device
            budget = format_bytes(self.setup.device.budget_bytes)
            with suppress(Untraceable):
                found = largest(step.program, device.new_allocator, self.task.cap)
                return found or f"not even a micro-batch of 1 is predicted to fit in {budget}"
        return self._search(values, cap=self.task.cap) or "not even a micro-batch of 1 fits"

    def _search(self, values: Configuration, *, cap: int) -> int:
        """Search for the largest micro-batch by attempts; 0 if none fits."""
        setup = with_knobs(self.setup, values)
        key = key_of(memory_signature(values))

        def run(size: int) -> Outcome:
            outcome = attempt(setup, size)
            if outcome.attempt.fits:
                self._ran[key] = max(size, self._ran.get(key, 0))
            return outcome

        step = self._predicted.get(key)
        predictor = ReplayPredictor(
            setup.device.new_allocator,
            None if step is None else step.program,
            first_size=first_size(setup.device.compute_capability),
        )
        return search(run, cap=cap, predictor=predictor).micro_batch

    def _does_not_fit(self, values: Configuration, size: int) -> str | None:
        """Return why a micro-batch does not fit; None if it fits. A run decides if nothing else does."""
        if not self._changes(memory_signature(values)):
            return None
        key = key_of(memory_signature(values))
        if size <= self._ran.get(key, 0) or self._has_room(values, size):
            return None
        outcome = attempt(with_knobs(self.setup, values), size).attempt
        if outcome.fits:
            self._ran[key] = size
        return outcome.reason

    def _has_room(self, values: Configuration, size: int) -> bool:
        """Return whether a micro-batch is predicted to fit by more than the error of a prediction."""
        step = self._footprint(values)
        if step is None:
            return False
        try:
            device = with_knobs(self.setup, values).device
            outcome = replay(step.program.at(size), device.new_allocator())
        except Untraceable:
            return False
        peak = outcome.peak_reserved_bytes or outcome.peak_allocated_bytes
        return outcome.fits and peak <= (1 - step.margin) * self.setup.device.budget_bytes

    def _footprint(self, values: Configuration) -> Footprint | None:
        signature = memory_signature(values)
        # A compiled model is traced as its module, and a trace does not depend on how segments grow.
        key = key_of({name: value for name, value in signature.items() if name not in (COMPILE, EXPANDABLE)})
        if key not in self._predicted:
            self._predicted[key] = trace_footprint(with_knobs(self.setup, signature))
        return self._predicted[key]

    def _loss_over(self, values: Configuration) -> float:
        signature = numeric_signature(values)
        reference = {name: value for name, value in signature.items() if name in self._changes(signature)}
        if not reference and self.setup.precision == "fp32":
            return -1.0
        key = key_of(signature)
        if key not in self._gaps:
            self._check = self._check or LossCheck(self.setup, self.task.limit)
            self._gaps[key] = self._check.over(with_knobs(self.setup, values))
        return self._gaps[key]


def micro_batch_of(limit: int, samples: int, values: Configuration) -> int:
    """Return the micro-batch of a configuration: the even split at the limit, halved as often as it says."""
    return max(1, micro_batches(samples, limit)[0] >> int(values.get(SPLIT) or 0))


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
    # A meeting with other ranks leaves another one.
    runner.setup = session.setup
    return runner
