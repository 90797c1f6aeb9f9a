"""Trials: the micro-batch that a configuration allows, a check of its losses, and its speed.

    configuration ──► largest micro-batch ──► losses ──► seconds per step

An error makes a configuration infeasible, also memory that runs out. With every knob at its default, an error
of the workload is its own and is raised.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch

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
from autobatch.device.host import usable_cores
from autobatch.device.oom import first_line
from autobatch.planning import micro_batches
from autobatch.rehearsal.attempt import attempt
from autobatch.rehearsal.process import ChildCrashed, Session, SetupProcess
from autobatch.rehearsal.setup import Setup, with_knobs
from autobatch.search.probe import find_largest
from autobatch.step.apply_knobs import find_blocks
from autobatch.step.optimizers import stand_in_optimizers
from autobatch.tuning.configuration import Infeasible, Key, Measurement, changes, infeasible, key_of
from autobatch.tuning.measure import TOLERANCE, LossCheck, fetch_share, time_steps
from autobatch.workload.loader import AHEAD, why_not_sent
from autobatch.workload.nested import tensors_of

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimizers with a fused step on GPUs and on the CPU."""


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
        """Run a trial; see `run_trial`."""
        return self._call("a trial", values, is_timed=True)

    def confirm(self, values: Configuration) -> Measurement:
        """Run a configuration within the enforced budget; see `run_trial`."""
        return self._call("the check of the best trial", values, is_timed=False)

    def _call(self, act: str, values: Configuration, *, is_timed: bool) -> Measurement:
        try:
            return self.process.call(act, run_trial, self.task, dict(values), is_timed=is_timed)
        except ChildCrashed as crash:
            return infeasible(str(crash))


def run_trial(
    session: Session, task: TrialSpec, values: Configuration, *, is_timed: bool = True
) -> Measurement:
    """Run a trial, or only the configuration within the enforced budget.

    An error, also memory that runs out, is the result of a configuration that changes anything.

    Raises:
        Exception: whatever the workload raises with every knob at its default, except out of memory.
    """
    results = session.find(TrialResults)
    if results is None or results.task != task:
        results = session.keep(TrialResults(session.setup, task))
    try:
        return results.measure(values) if is_timed else results.confirm(values)
    except Infeasible as reason:
        return infeasible(str(reason))
    except Exception as error:
        if not task.changes(values):
            raise
        failure = first_line(error)
    # Outside the except block, nothing keeps the failed step's tensors alive.
    session.setup.device.release()
    return infeasible(failure)


@dataclass
class TrialResults:
    """Limits, losses and compile times that the trials of a study have found, and that later ones reuse."""

    setup: Setup
    task: TrialSpec
    _limits: dict[Key, int] = field(default_factory=dict)
    _gaps: dict[Key, float] = field(default_factory=dict)
    _compiling_s: dict[Key, float] = field(default_factory=dict)
    _check: LossCheck | None = None

    def limit(self, values: Configuration) -> int:
        """Return the largest micro-batch that fits with a configuration; 0 if none does.

        A compiled configuration starts from what fits without the compiler, because a search would compile
        every size anew.
        """
        signature = memory_signature(values)
        changed = self.task.changes(signature)
        if not changed:
            return self.task.limit
        key = key_of(signature)
        if key not in self._limits:
            setup = with_knobs(self.setup, signature)
            if COMPILE in changed:
                found = self.limit({name: value for name, value in signature.items() if name != COMPILE})
                if found and not attempt(setup, found).attempt.fits:
                    found = self._largest(setup, found - self.task.multiple)
            else:
                found = self._largest(setup, self.task.cap)
            self._limits[key] = found
        return self._limits[key]

    def measure(self, values: Configuration) -> Measurement:
        """Check the losses of a configuration, and time its steps."""
        task, size = self.task, self._micro_batch(values)
        over = self._loss_over(values)
        if over > 0:
            reason = f"its losses differ from the reference by {over:.1%} more than the tolerance"
            return infeasible(reason, micro_batch=size)
        sizes = micro_batches(task.samples, size, task.multiple)
        setup = with_knobs(self.setup, {LOADER_WORKERS: task.workers} | dict(values))
        prefetch = task.prefetch or int(values.get(PREFETCH) or AHEAD)
        timing = time_steps(setup, sizes, task.seconds, prefetch=prefetch)
        # A configuration that is measured again reuses compiled code.
        once = self._compiling_s.setdefault(key_of(values), timing.setup)
        seconds = timing._replace(setup=once).a_step(len(sizes), task.planned_steps)
        return Measurement(task.samples / seconds, sizes[0])

    def confirm(self, values: Configuration) -> Measurement:
        """Run a configuration within the enforced budget."""
        size = self._micro_batch(values)
        return Measurement(0.0, size, attempt(with_knobs(self.setup, values), size).attempt.reason)

    def _micro_batch(self, values: Configuration) -> int:
        """Return the micro-batch of a configuration: the even split at its limit, halved as it says."""
        limit, unit = self.limit(values), self.task.multiple
        if not limit:
            raise Infeasible("not even a micro-batch of 1 fits")
        size = micro_batches(self.task.samples, limit, unit)[0]
        return unit * max(1, size // unit >> int(values.get(SPLIT) or 0))

    def _largest(self, setup: Setup, cap: int) -> int:
        """Return the largest micro-batch up to a cap that runs within the enforced budget; 0 if none does."""
        if cap < 1:
            return 0
        return find_largest(
            partial(attempt, setup),
            cap=cap,
            new_allocator=setup.device.new_allocator,
            multiple=self.task.multiple,
            guess=min(cap, self.task.limit),
        ).micro_batch

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


def look_at_workload(session: Session, task: TrialSpec) -> TuningContext:
    """Return the facts about the device and the workload that decide which knobs apply."""
    setup, workload, device = session.setup, session.setup.workload, session.setup.device
    micro_batch = micro_batches(task.samples, task.limit, task.multiple)[0]
    cores = usable_cores()
    loader: str | None = "the number of workers is given"
    if task.workers is None:
        loader = why_not_sent(workload, setup.worst_case.batch(1))
    precisions = device.native_precisions() if task.is_precision_open else ()
    return TuningContext(
        precisions=(setup.precision, *(one for one in precisions if one != setup.precision)),
        optimizers=_implementations(setup),
        blocks=len(find_blocks(setup.model)),
        images=any(p.dim() == 4 for p in setup.model.parameters())
        and any(t.dim() == 4 for t in tensors_of(setup.worst_case.batch(2))),
        compiler=device.compiler_missing(),
        micro_batch=micro_batch,
        planned_steps=task.planned_steps,
        cores=cores,
        loader=loader,
        fetch_share=fetch_share(setup, micro_batch) if loader is None and cores > 1 else 0.0,
        gains_from_compile=device.gains_from_compile,
        reads_pinned_memory=device.reads_pinned_memory,
        segments=device.why_not_expandable(),
    )


def _implementations(setup: Setup) -> tuple[str, ...]:
    """Return the implementations of the workload's optimizer that are left to choose, ``default`` first."""
    made = stand_in_optimizers(setup.workload)
    if not made or any(
        one.defaults.get("fused") is not None or one.defaults.get("foreach", True) is not None for one in made
    ):
        return ("default",)
    is_fusible = all(type(one) in FUSED for one in made)
    return tuple(one for one in setup.device.optimizer_implementations() if one != "fused" or is_fusible)
