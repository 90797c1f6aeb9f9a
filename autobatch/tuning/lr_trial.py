"""Short runs at one learning rate, which yield the loss of every step and leave the model unchanged.

Every run starts from the same weights and takes the batches that its seed draws, with the plan's batch, split
and precision. The learning rate is constant: a warm-up longer than the run would try every learning rate on
its ramp only. The figure is the training loss rather than the validation loss: it is free, and a batch is new
to the model as long as the run is shorter than an epoch.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple, Protocol

from autobatch.core.knobs import Value
from autobatch.core.records.base import Precision
from autobatch.device.base import Device, Meter
from autobatch.device.oom import Verdict, classify, first_line
from autobatch.distributed.engine import Engine, OneProcess
from autobatch.search.confirm import is_lost
from autobatch.setup.attempt import TrainSetup, batches_of, on_copies
from autobatch.setup.setup import with_knobs
from autobatch.step.loss_share import StepTotals
from autobatch.step.train_state import TrainState
from autobatch.step.train_step import StepResult, accumulate, finish
from autobatch.tuning.lead import OTHER_ENDED
from autobatch.workload.contract import Collated, Workload
from autobatch.workload.data import load_micro_batch
from autobatch.workload.order import GlobalBatchSampler
from autobatch.workload.rng import preserved_random_state, seed_rank
from autobatch.workload.sampler_order import epoch_of
from autobatch.workload.split import CountSplit, MicroBatchIds, Split

REACH = 32.0
"""Learning rates are tried from the default ÷ this to the default × this."""
PARTS = 4
"""Number of parts of a run; it can stop after each, and the mean loss of the last is its figure."""


class LrTrialSpec(NamedTuple):
    """Settings of short runs: plain values that can be sent to another process."""

    default: float
    """The learning rate that is kept unless another is better."""
    target_batch: int
    micro_batch: int
    """The largest of the split, in samples."""
    precision: Precision
    knobs: dict[str, Value]
    steps: int
    """Optimizer steps of a run; at least `PARTS`."""
    skips: bool = False
    """True to skip a non-finite step, as the training that follows does."""


class StepLoss(NamedTuple):
    """The loss of a step."""

    loss: float
    """Mean over the counted items."""
    items: float
    """Number of counted items."""
    failure: str | None = None
    """Reason why the run ended here, in one line; None if it continues."""


class Segment(NamedTuple):
    """The loss of a part of a run."""

    loss: float | None
    """Mean over the counted items; None if no loss was finite."""
    first: float | None
    """Loss of the run's first step, before any update; None if no loss was finite yet."""
    failure: str | None = None
    """Reason why the run ended here; None if it continues."""


class LrTrialResult(NamedTuple):
    """The result of a short run."""

    rate: float
    loss: float | None
    """Of its last part; None if it ended earlier."""
    first: float | None
    """Of its first step; None if no loss was finite."""
    failure: str | None
    """Reason why it is infeasible, in one line; None if it is feasible."""


Losses = Generator[StepLoss, None, None]


def short_run(setup: TrainSetup, task: LrTrialSpec, rate: float, seed: int) -> Losses:
    """Train a few steps on temporary weights, and yield their losses; the last one carries any failure.

    Args:
        setup: the model and the data.
        task: what to train.
        rate: the learning rate.
        seed: of the order of the data and of the model's random numbers.

    Raises:
        Exception: whatever the workload raises at the default learning rate, except out of memory.
    """
    return guarded(_train(setup, task, rate, seed), setup.device, is_default=rate == task.default)


def guarded(losses: Losses, device: Device, *, is_default: bool) -> Losses:
    """Yield the losses of a run, and a last one that carries the error that ended it.

    Args:
        losses: of the steps.
        device: runs them.
        is_default: whether the run is at the default learning rate, which no error of the workload may end.

    Raises:
        Exception: whatever the workload raises at the default learning rate, except out of memory.
    """
    failure: str | None = None
    try:
        yield from losses
    except Exception as error:
        lost = is_lost(error)
        if classify(error) is Verdict.NONE and is_default and not lost:
            raise
        failure = OTHER_ENDED if lost else first_line(error)
    # Outside the except block, nothing keeps the failed step's tensors alive.
    if failure is not None:
        device.release()
        yield StepLoss(math.nan, 0.0, failure)


def parts_of(losses: Iterable[StepLoss], steps: int) -> Iterator[Segment]:
    """Yield the mean losses of the parts of a run.

    Args:
        losses: of the steps, as `short_run` yields them.
        steps: number of steps of a whole run.
    """
    ends = {steps * (part + 1) // PARTS for part in range(PARTS)}
    first: float | None = None
    total = count = 0.0
    for number, seen in enumerate(losses, 1):
        if seen.failure is not None:
            yield Segment(None, first, seen.failure)
            return
        if seen.items and math.isfinite(seen.loss):
            first = seen.loss if first is None else first
            total, count = total + seen.loss * seen.items, count + seen.items
        if number in ends:
            yield Segment(total / count if count else None, first)
            total = count = 0.0


class ModelInTraining(NamedTuple):
    """A model on temporary weights, and what trains it."""

    train_state: TrainState
    meter: Meter
    engine: Engine
    split: Split


def _train(setup: TrainSetup, task: LrTrialSpec, rate: float, seed: int) -> Losses:
    setup = configured(setup, task)
    with (
        preserved_random_state(),
        setup.device.training() as meter,
        on_copies(setup, meter, learning_rate=rate) as train_state,
    ):
        yield from train(setup, task, ModelInTraining(train_state, meter, OneProcess(), CountSplit()), seed)


def configured(setup: TrainSetup, task: LrTrialSpec) -> TrainSetup:
    """Return the setup with the knobs and the precision of a plan."""
    return replace(with_knobs(setup, task.knobs), precision=task.precision)


def train(setup: TrainSetup, task: LrTrialSpec, training: ModelInTraining, seed: int) -> Losses:
    """Train, and yield the losses of the steps."""
    seed_rank(seed, training.engine.ranks.rank)
    for result in _train_batches(setup, task, training, seed):
        # Training would end here, unless a loss scale is still falling, which skips such a step.
        if result.count and not result.applied and training.train_state.scaler is None and not task.skips:
            yield StepLoss(math.nan, 0.0, "its loss or gradient is not finite")
            return
        yield StepLoss(result.loss, result.count)


def _train_batches(
    setup: TrainSetup, task: LrTrialSpec, training: ModelInTraining, seed: int
) -> Iterator[StepResult]:
    """Train the first steps of a run with this seed."""
    samples, order = epoch_of(setup.workload, seed)
    sampler = GlobalBatchSampler(
        samples=samples, target_batch=task.target_batch, seed=seed, steps=task.steps, order=order
    )
    train_state, meter, engine, split = training
    for batch in sampler.batches():
        parts = split.parts(batch, task.micro_batch)
        placed = batches_of(setup, meter, _fetched(setup.workload, parts))
        passing = engine.passing(train_state, placed, len(parts), batch)
        # As in `autobatch.step.train_step.train_step`, with a sum over the ranks between its halves.
        totals = accumulate(train_state, passing, len(batch.ids), _unmarked, measure_first=True)
        summed = engine.combine(train_state, totals)
        assert isinstance(summed, StepTotals), "a child that fails ends the others"
        yield finish(train_state, summed, mark=_unmarked)


def _unmarked(phase: str) -> None:
    """Do nothing when a phase begins."""


def _fetched(workload: Workload, parts: list[MicroBatchIds]) -> Iterator[tuple[Collated, int]]:
    for part in parts:
        yield load_micro_batch(workload, part.ids), len(part.ids)


class Runs(Protocol):
    """Source of short runs."""

    def losses(self, rate: float, seed: int) -> Losses:
        """Train at a learning rate on the batches that a seed draws; the generator may be closed early."""
