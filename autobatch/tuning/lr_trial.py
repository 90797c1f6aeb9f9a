"""Short runs at one learning rate, which yield the loss of every step and leave the model unchanged.

Every run starts from the same weights and takes the batches that its seed draws, with the plan's batch, split
and precision. The learning rate is constant: a warm-up longer than the run would try every learning rate on
its ramp only. The figure is the training loss rather than the validation loss: it is free, and a batch is new
to the model as long as the run is shorter than an epoch.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from autobatch.core.knobs import Value
from autobatch.core.records.base import Precision
from autobatch.device.base import Meter
from autobatch.device.oom import Verdict, classify, first_line
from autobatch.planning import micro_batches
from autobatch.probing.attempt import TrainSetup, batches_of, on_copies
from autobatch.probing.child import ChildCrashed, Session, SetupProcess
from autobatch.probing.setup import with_knobs
from autobatch.step.train_state import TrainState
from autobatch.step.train_step import StepResult, train_step
from autobatch.workload.contract import Collated, Workload
from autobatch.workload.data import load_micro_batch
from autobatch.workload.order import GlobalBatchSampler
from autobatch.workload.rng import preserved_random_state, seed_everything
from autobatch.workload.sampler_order import epoch_of

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
    failure: str | None = None
    try:
        chosen = replace(with_knobs(setup, task.knobs), precision=task.precision)
        yield from _train(chosen, task, rate, seed)
    except Exception as error:
        if classify(error) is Verdict.NONE and rate == task.default:
            raise
        failure = first_line(error)
    # Outside the except block, nothing keeps the failed step's tensors alive.
    if failure is not None:
        setup.device.release()
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


def _train(setup: TrainSetup, task: LrTrialSpec, rate: float, seed: int) -> Losses:
    with preserved_random_state(), setup.device.training() as meter:
        seed_everything(seed)
        with on_copies(setup, meter, learning_rate=rate) as train_state:
            for result in _train_batches(setup, task, train_state, meter, seed):
                # Training would end here, unless a loss scale is still falling, which skips such a step.
                if result.count and not result.applied and train_state.scaler is None and not task.skips:
                    yield StepLoss(math.nan, 0.0, "its loss or gradient is not finite")
                    return
                yield StepLoss(result.loss, result.count)


def _train_batches(
    setup: TrainSetup, task: LrTrialSpec, train_state: TrainState, meter: Meter, seed: int
) -> Iterator[StepResult]:
    """Train the first steps of a run with this seed."""
    samples, order = epoch_of(setup.workload, seed)
    sampler = GlobalBatchSampler(
        samples=samples, target_batch=task.target_batch, seed=seed, steps=task.steps, order=order
    )
    for batch in sampler.batches():
        sizes = micro_batches(len(batch.ids), task.micro_batch)
        parts = batches_of(setup, meter, _fetched(setup.workload, batch.ids, sizes))
        yield train_step(train_state, parts, len(batch.ids))


def _fetched(workload: Workload, ids: list[int], sizes: list[int]) -> Iterator[tuple[Collated, int]]:
    first = 0
    for size in sizes:
        yield load_micro_batch(workload, ids[first : first + size]), size
        first += size


class Runs(Protocol):
    """Source of short runs."""

    def losses(self, rate: float, seed: int) -> Losses:
        """Train at a learning rate on the batches that a seed draws; the generator may be closed early."""


@dataclass(frozen=True)
class ShortRuns:
    """Short runs in the process that holds the setup. One that crashes a child makes its rate infeasible."""

    process: SetupProcess
    task: LrTrialSpec

    def losses(self, rate: float, seed: int) -> Losses:
        """Train at a learning rate on the batches that a seed draws; the generator may be closed early.

        Yields:
            One `StepLoss` per optimizer step.
        """
        act = "a trial of a learning rate"
        try:
            seen = self.process.call(act, _begin_run, self.task, rate, seed)
            while seen is not None:
                yield seen
                seen = self.process.call(act, _next_loss)
        except GeneratorExit:
            # Weights are temporary for as long as a run is open.
            self.process.call(act, _end_run)
            raise
        except ChildCrashed as crash:
            failure = str(crash)
        else:
            return
        self.process.restart()
        yield StepLoss(math.nan, 0.0, failure)


@dataclass
class _OpenRun:
    """The short run that a session is in."""

    losses: Losses


def _begin_run(session: Session, task: LrTrialSpec, rate: float, seed: int) -> StepLoss | None:
    run = session.keep(_OpenRun(short_run(session.setup, task, rate, seed)))
    return next(run.losses, None)


def _end_run(session: Session) -> None:
    run = session.find(_OpenRun)
    if run is not None:
        run.losses.close()


def _next_loss(session: Session) -> StepLoss | None:
    run = session.find(_OpenRun)
    return None if run is None else next(run.losses, None)
