"""A short run at one learning rate: the loss of every window, and nothing changed afterwards.

Every run starts at the same weights and sees the windows that its seed draws, at the batch, the split and the
precision of the plan. The learning rate is constant: under a warm-up that is longer than the run, every
learning rate would be tried on the ramp alone. The figure is the loss of the windows, not of validation data:
it costs nothing, and a window has not been trained on before as long as the run is no longer than an epoch.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from autobatch.core.knobs import Value
from autobatch.core.records import Precision
from autobatch.device.base import Meter
from autobatch.device.oom import Verdict, classify, first_line
from autobatch.planning import micro_batches
from autobatch.probing.attempt import TrainSetup, batches_of, open_train_state
from autobatch.probing.child import ChildCrashed, Session, SetupProcess
from autobatch.probing.setup import with_knobs
from autobatch.step.restore import temporary_weights
from autobatch.step.train_state import TrainState
from autobatch.step.train_step import StepResult, train_step
from autobatch.workload.contract import Collated, Workload
from autobatch.workload.data import load_micro_batch
from autobatch.workload.order import GlobalBatchSampler
from autobatch.workload.rng import preserved_random_state, seed_everything

REACH = 32.0
"""The learning rates that are tried lie between the default ÷ this and × this."""


PARTS = 4
"""A run is looked at after each of so many parts; the mean of the last is its figure."""


class LrTrialSpec(NamedTuple):
    """What short runs train; plain values, that travel to another process."""

    default: float
    """The learning rate that stays unless another is better."""
    target_batch: int
    micro_batch: int
    """The largest of the split, in samples."""
    precision: Precision
    knobs: dict[str, Value]
    steps: int
    """Optimizer steps of a run; at least `PARTS`."""
    skips: bool = False
    """Whether a window that is not finite is passed over, as the training that follows does."""


class StepLoss(NamedTuple):
    """A window of a run."""

    loss: float
    """Mean over what it counted."""
    items: float
    """How much that is."""
    failure: str | None = None
    """Why the run ended here, in one line; nothing follows then."""


class Segment(NamedTuple):
    """What a part of a run found."""

    loss: float | None
    """Mean over everything that its windows counted; ``None`` where no figure was finite."""
    first: float | None
    """The loss of the run's first window: before any step."""
    failure: str | None = None
    """Why the run ended here; nothing follows then."""


class LrTrialResult(NamedTuple):
    """What a short run came to."""

    rate: float
    loss: float | None
    """Of its last part; ``None`` where it did not come so far."""
    first: float | None
    """Of its first window."""
    failure: str | None
    """Why it is not feasible, in one line."""


Losses = Generator[StepLoss, None, None]


def short_run(setup: TrainSetup, task: LrTrialSpec, rate: float, seed: int) -> Losses:
    """Train a few windows at a learning rate; what goes wrong with it is told as the last.

    Args:
        setup: the model, which is lent, and the data.
        task: what to train.
        rate: the learning rate.
        seed: of the order of the data and of what the model draws.

    Raises:
        Exception: what the workload raises at the default learning rate, out of memory aside.
    """
    failure: str | None = None
    try:
        chosen = replace(with_knobs(setup, task.knobs), precision=task.precision)
        yield from _train(chosen, task, rate, seed)
    except Exception as error:
        if classify(error) is Verdict.NONE and rate == task.default:
            raise
        failure = first_line(error)
    # The except block is left: nothing keeps the failed step's tensors alive any more.
    if failure is not None:
        setup.device.release()
        yield StepLoss(math.nan, 0.0, failure)


def parts_of(windows: Iterable[StepLoss], steps: int) -> Iterator[Segment]:
    """The means of the parts of a run.

    Args:
        windows: as `short_run` tells them.
        steps: how many there are in a whole run.
    """
    ends = {steps * (part + 1) // PARTS for part in range(PARTS)}
    first: float | None = None
    total = count = 0.0
    for number, seen in enumerate(windows, 1):
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
    device = setup.device.torch_device
    with preserved_random_state(), setup.device.training() as meter, temporary_weights(setup.model, device):
        seed_everything(seed)
        train_state = open_train_state(setup, meter, learning_rate=rate)
        for result in _train_batches(setup, task, train_state, meter, seed):
            # Where training would end: a loss scale that is still to fall passes over such a window.
            if result.count and not result.applied and train_state.scaler is None and not task.skips:
                yield StepLoss(math.nan, 0.0, "its loss or gradient is not finite")
                return
            yield StepLoss(result.loss, result.count)


def _train_batches(
    setup: TrainSetup, task: LrTrialSpec, train_state: TrainState, meter: Meter, seed: int
) -> Iterator[StepResult]:
    """The first windows that a run with this seed would train."""
    samples = len(setup.workload.train_data)  # type: ignore[arg-type]
    sampler = GlobalBatchSampler(samples=samples, target_batch=task.target_batch, seed=seed, steps=task.steps)
    for window in sampler.batches():
        sizes = micro_batches(len(window.ids), task.micro_batch)
        batches = batches_of(setup, meter, _fetched(setup.workload, window.ids, sizes))
        yield train_step(train_state, batches, len(window.ids))


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
    run = session.replace(_OpenRun, _OpenRun(short_run(session.setup, task, rate, seed)))
    return next(run.losses, None)


def _end_run(session: Session) -> None:
    run = session.find(_OpenRun)
    if run is not None:
        run.losses.close()


def _next_loss(session: Session) -> StepLoss | None:
    run = session.find(_OpenRun)
    return None if run is None else next(run.losses, None)
