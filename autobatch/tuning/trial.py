"""Trials: the micro-batch that a configuration allows, a check of its losses, and its speed.

    configuration ──► largest micro-batch ──► losses ──► seconds per step

An error makes a configuration infeasible, also memory that runs out. With every knob at its default, an error
of the workload is its own and passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from autobatch.core.knobs import (
    COMPILE,
    LOADER_WORKERS,
    PREFETCH,
    SPLIT,
    Configuration,
    TuningContext,
    Value,
    memory_signature,
    numeric_signature,
)
from autobatch.device.oom import first_line
from autobatch.planning import micro_batches
from autobatch.search.replay import Replay
from autobatch.search.search import first_size, search
from autobatch.setup.attempt import attempt
from autobatch.setup.child import ChildCrashed, Session, SetupProcess
from autobatch.setup.rehearsal import Batch
from autobatch.setup.setup import Setup, describe_setup, with_knobs
from autobatch.setup.trace import program_on, trace_footprint
from autobatch.tuning.configuration import Infeasible, Key, Measurement, changes, infeasible, key_of
from autobatch.tuning.context import describe_context
from autobatch.tuning.timing import random_batch, rehearsed, time_steps
from autobatch.workload.feed import AHEAD
from autobatch.workload.rng import seed_torch

CHECK_STEPS = 10
CHECK_MICRO_BATCHES = 2
"""Micro-batches of a step of the loss check."""
CHECK_SAMPLES = 8
"""Samples of such a micro-batch: enough to see a loss go wrong, and cheap."""
TOLERANCE = 0.02
"""Bound on the mean relative distance of the losses; a model in bf16 stays well below it."""


@dataclass(frozen=True, kw_only=True)
class TrialSpec:
    """Settings of the trials of a study: plain values, which travel to a child process."""

    limit: int
    """The largest micro-batch that fits with every knob at its default."""
    cap: int
    """The largest micro-batch that any configuration may use."""
    samples: int
    """Samples of an optimizer step on one rank."""
    multiple: int = 1
    """Number whose multiples all micro-batches are."""
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

    def changes(self, values: Configuration) -> dict[str, Value]:
        """Return the values that are not at their default, except the split."""
        changed = changes(values, {**values, **self.defaults})
        return {name: value for name, value in changed.items() if name != SPLIT}


@dataclass(frozen=True)
class Trials:
    """Trials in the process that holds the setup. A configuration that crashes a child is infeasible."""

    process: SetupProcess
    task: TrialSpec

    def measure(self, values: Configuration) -> Measurement:
        """Run a trial.

        Raises:
            Exception: whatever the workload raises with every knob at its default, except out of memory.
        """
        return self._ask("a trial", _measure, values)

    def confirm(self, values: Configuration) -> Measurement:
        """Run a configuration within the enforced budget, and return its micro-batch or why it has none."""
        return self._ask("the check of the best trial", _confirm, values)

    def confirm_fits(self, values: Configuration) -> str | None:
        """Return why a configuration does not run within the enforced budget; None if it does."""
        return self.confirm(values).failure

    def _ask(
        self,
        act: str,
        run: Callable[[Session, TrialSpec, dict[str, Value]], Measurement],
        values: Configuration,
    ) -> Measurement:
        try:
            return self.process.call(act, run, self.task, dict(values))
        except ChildCrashed as crash:
            failure = str(crash)
        self.process.restart()
        return infeasible(failure)


@dataclass
class TrialRunner:
    """Runner of a study's trials on one setup, which keeps limits and checks for later trials."""

    setup: Setup
    task: TrialSpec
    _limits: dict[Key, int] = field(default_factory=dict)
    _gaps: dict[Key, float] = field(default_factory=dict)
    _compiling_s: dict[Key, float] = field(default_factory=dict)
    _check: LossCheck | None = None

    def measure(self, values: Configuration) -> Measurement:
        """Run a trial; see `Trials.measure`."""
        return self._guarded(values, self._measure)

    def confirm(self, values: Configuration) -> Measurement:
        """Run a configuration within the enforced budget; see `Trials.confirm`."""
        return self._guarded(values, self._confirm)

    def limit(self, values: Configuration) -> int:
        """Return the largest micro-batch that fits with a configuration; 0 if none does."""
        signature = memory_signature(values)
        if not self.task.changes(signature):
            return self.task.limit
        key = key_of(signature)
        if key not in self._limits:
            self._limits[key] = self._find_limit(signature)
        return self._limits[key]

    def _find_limit(self, values: Configuration) -> int:
        """Search for the largest micro-batch.

        A compiled configuration starts from what fits without the compiler, because a search would compile
        every size anew.
        """
        setup, cap = with_knobs(self.setup, values), self.task.cap
        if COMPILE in self.task.changes(values):
            size = self.limit({name: value for name, value in values.items() if name != COMPILE})
            if not size or attempt(setup, size).attempt.fits:
                return size
            cap = size - self.task.multiple
        return _largest(setup, cap, self.task.multiple) if cap > 0 else 0

    def _micro_batch(self, values: Configuration) -> int:
        """Return the micro-batch of a configuration: the even split at its limit, halved as it says."""
        limit = self.limit(values)
        if not limit:
            return 0
        unit = self.task.multiple
        size = micro_batches(self.task.samples, limit, unit)[0]
        return unit * max(1, size // unit >> int(values.get(SPLIT) or 0))

    def _measure(self, values: Configuration) -> Measurement:
        size = self._micro_batch(values)
        if not size:
            return infeasible("not even a micro-batch of 1 fits")
        over = self._loss_over(values)
        if over > 0:
            reason = f"its losses differ from the reference by {over:.1%} more than the tolerance"
            return infeasible(reason, micro_batch=size)
        sizes = micro_batches(self.task.samples, size, self.task.multiple)
        setup = with_knobs(self.setup, {LOADER_WORKERS: self.task.workers} | dict(values))
        prefetch = self.task.prefetch or int(values.get(PREFETCH) or AHEAD)
        timing = time_steps(setup, sizes, self.task.seconds, prefetch=prefetch)
        # A configuration that is measured again reuses compiled code.
        once = self._compiling_s.setdefault(key_of(values), timing.setup)
        seconds = timing._replace(setup=once).a_step(len(sizes), self.task.planned_steps)
        return Measurement(self.task.samples / seconds, sizes[0])

    def _confirm(self, values: Configuration) -> Measurement:
        size = self._micro_batch(values)
        if not size:
            return infeasible("not even a micro-batch of 1 fits")
        reason = attempt(with_knobs(self.setup, values), size).attempt.reason
        return Measurement(0.0, size, reason)

    def _guarded(self, values: Configuration, run: Callable[[Configuration], Measurement]) -> Measurement:
        """Run a part of a trial, and turn an error that the configuration caused into a measurement."""
        try:
            return run(values)
        except Infeasible as reason:
            return infeasible(str(reason))
        except Exception as error:
            if not self.task.changes(values):
                raise
            failure = first_line(error)
        # Outside the except block, nothing keeps the failed step's tensors alive.
        self.setup.device.release()
        return infeasible(failure)

    def _loss_over(self, values: Configuration) -> float:
        """Return by how much the losses of a configuration exceed the tolerance."""
        signature = numeric_signature(values)
        if not self.task.changes(signature) and self.setup.precision == "fp32":
            return -TOLERANCE
        key = key_of(signature)
        if key not in self._gaps:
            self._check = self._check or LossCheck(self.setup, self.task.limit)
            self._gaps[key] = self._check.over(with_knobs(self.setup, values))
        return self._gaps[key]


class LossCheck:
    """A comparison of losses with a short run in fp32 with every knob at its default, on the same samples.

    Args:
        setup: the model and the data.
        micro_batch: the largest that fits, in samples.
    """

    def __init__(self, setup: Setup, micro_batch: int) -> None:
        self._reference_setup = replace(setup, precision="fp32", knobs={})
        self._size = min(CHECK_SAMPLES, micro_batch)
        self._reference: list[float] | None = None
        self._noise = 0.0

    def over(self, setup: Setup) -> float:
        """Return by how much the relative distance to the reference exceeds the tolerance; at most 1.

        Compiled code draws other random numbers in the forward pass than the model does. So the tolerance is
        at least twice the distance of two runs of the reference with different seeds.

        Raises:
            Exception: whatever running the configuration raises.
        """
        if self._reference is None:
            self._reference = _losses(self._reference_setup, self._size, seed=1)
            self._noise = _distance(self._reference, _losses(self._reference_setup, self._size, seed=2))
        if not all(map(math.isfinite, self._reference)):
            # Nothing can be compared with a reference that does not train.
            return -TOLERANCE
        gap = _distance(self._reference, _losses(setup, self._size, seed=1))
        if not math.isfinite(gap):
            return 1.0
        return min(1.0, gap - max(TOLERANCE, 2 * self._noise))


def look_at_workload(session: Session, task: TrialSpec) -> TuningContext:
    """Return the context that decides which knobs apply to the workload of a session."""
    return describe_context(
        session.setup,
        precision_is_open=task.is_precision_open,
        micro_batch=micro_batches(task.samples, task.limit, task.multiple)[0],
        planned_steps=task.planned_steps,
        workers_are_open=task.workers is None,
    )


def _measure(session: Session, task: TrialSpec, values: dict[str, Value]) -> Measurement:
    return _runner_of(session, task).measure(values)


def _confirm(session: Session, task: TrialSpec, values: dict[str, Value]) -> Measurement:
    return _runner_of(session, task).confirm(values)


def _runner_of(session: Session, task: TrialSpec) -> TrialRunner:
    """Return the runner that the trials of one study share."""
    runner = session.find(TrialRunner)
    if runner is None or runner.task != task:
        runner = session.keep(TrialRunner(session.setup, task))
    return runner


def _largest(setup: Setup, cap: int, multiple: int) -> int:
    """Return the largest micro-batch that runs within the enforced budget; 0 if none does."""
    step = trace_footprint(setup)
    program = None if step is None else program_on(step, describe_setup(setup))
    return search(
        lambda size: attempt(setup, size),
        cap=cap,
        replay=Replay(setup.device.new_allocator, program),
        first=first_size(setup.device.compute_capability),
        multiple=multiple,
    ).micro_batch


def _distance(reference: list[float], losses: list[float]) -> float:
    """Return the mean absolute difference ÷ the mean absolute value of the reference."""
    scale = sum(map(abs, reference)) or 1.0
    return sum(abs(a - b) for a, b in zip(reference, losses, strict=True)) / scale


def _losses(setup: Setup, size: int, *, seed: int) -> list[float]:
    """Return the losses of the first steps, without dropout, on samples that are always the same."""
    draw = torch.Generator().manual_seed(0)

    def batches() -> Iterator[Batch]:
        for module in setup.model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.eval()
        seed_torch(seed)
        for _ in range(CHECK_STEPS):
            yield random_batch(setup, size, CHECK_MICRO_BATCHES, draw)

    return [step.result.loss for step in rehearsed(setup, batches())]
