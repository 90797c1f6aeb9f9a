"""Training loop: one `StepRecord` per batch, with recovery from out-of-memory errors.

After an out-of-memory error the batch runs again: its partial gradients are dropped, random states and
buffers are restored to the start of the step, and the cache of the allocator is emptied. If the memory was
fragmented, the same micro-batches run again first, with the same result. Otherwise, or if that fails too, the
same samples run in smaller micro-batches. The optimizer step is applied once. There is no recovery inside the
optimizer step, which may have moved part of the weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from autobatch.core.errors import InputError, NonFiniteError
from autobatch.core.records import StepRecord
from autobatch.device.allocator.ledger import MemoryStats
from autobatch.device.base import Device, Meter
from autobatch.device.oom import Verdict, classify, first_line, is_fragmented
from autobatch.distributed.engine import Engine, OutOfMemory
from autobatch.step.gradients import Optimizers
from autobatch.step.loss_share import StepTotals
from autobatch.step.train_state import TrainState
from autobatch.step.train_step import StepResult, accumulate, finish
from autobatch.training.batchnorm import rescaled_momentum
from autobatch.training.fetched import Fetched, KeptBatch, Running
from autobatch.training.noise_scale import NoiseScale
from autobatch.training.nonfinite import nonfinite_error
from autobatch.training.out_of_memory import error_before_step, error_in_step, undo_batch
from autobatch.training.phase_times import OTHER, PhaseTimes
from autobatch.workload.contract import WholeBatchLoss, Workload
from autobatch.workload.feed import Feed
from autobatch.workload.nested import feed
from autobatch.workload.order import GlobalBatch, GlobalBatchSampler
from autobatch.workload.rng import RandomState, capture_random_state
from autobatch.workload.split import MicroBatchIds, Split
from autobatch.workload.user_code import user_code

LEAST_LOSS_SCALE = 2.0**-10
"""Loss scale below which an overflow means that the gradients themselves are not finite."""
MAX_SKIPS_IN_A_ROW = 3
"""Consecutive steps that may be skipped because they are not finite."""


READING_INTERVAL = 16
"""Steps between two readings in the steady state, and steps before it that are all read."""


@dataclass(kw_only=True)
class Loop:
    """A training run between two steps; `autobatch.training.loop_state` captures all that a resume needs."""

    workload: Workload
    train_state: TrainState
    sampler: GlobalBatchSampler
    device: Device
    meter: Meter
    micro_batch: int
    """The largest micro-batch to run; shrinks after an out-of-memory error."""
    split: Split = field(default_factory=Split)
    """Forms the micro-batches of each batch."""
    engine: Engine = field(default_factory=Engine)
    """The ranks that train each batch together."""
    schedules: list[torch.optim.lr_scheduler.LRScheduler] = field(default_factory=list)
    """One per optimizer, or empty."""
    on_nonfinite: Literal["raise", "skip"] = "raise"
    """Raise or skip the step if the loss or gradient is not finite; fp16 overflows are always skipped."""
    rescaled_norms: list[_BatchNorm] = field(default_factory=list)
    """BatchNorms whose momentum is rescaled, so that a step counts as one update."""
    warmup_samples: int | None = None
    """Samples over which the learning rate grows to its full value; ``None`` for no warm-up."""
    batches_seen: int = 0
    steps_applied: int = 0
    skipped_steps_in_a_row: int = 0
    """Steps skipped since the last applied one because they were not finite."""
    oom_recoveries: int = 0
    noise: NoiseScale = field(default_factory=NoiseScale)
    """Measured from the norms that accumulation gives at almost no cost."""
    feed: Feed | None = None
    """Makes the micro-batches; if ``None``, the loop does, from its own random generators."""
    kept: KeptBatch | None = None
    """Gets a copy of each micro-batch; None to keep none."""
    clock: Callable[[], float] = time.perf_counter
    times: PhaseTimes = field(default_factory=PhaseTimes)
    """Seconds of the phases of the steps."""
    _random_state: RandomState | None = field(default=None, init=False, repr=False)
    """At the start of the last batch; None before the first."""
    is_intact: bool = True
    """True if the state is that between two steps. False while a batch trains, and if it cannot be undone."""
    has_failed_on_all_ranks: bool = False
    """True if an out-of-memory error ended the run on all ranks at once, so that they can still talk."""

    @property
    def limits(self) -> list[int]:
        """The largest micro-batch of each rank."""
        return [*self.engine.limits] or [self.micro_batch]

    @limits.setter
    def limits(self, limits: list[int]) -> None:
        self.engine.limits[:] = limits
        self.micro_batch = limits[self.engine.ranks.rank]

    def run(self) -> Iterator[StepRecord]:
        """Train the remaining batches, and yield one record per batch.

        Raises:
            NonFiniteError: the learning rate is not finite, or the loss or the gradient is not and the step
                may not be skipped; the weights did not change.
            InputError: a learning rate or the count of a `Loss` is invalid; the weights did not change.
            RestartSmallerError: out of memory where the loop cannot recover.
            DoesNotFitError: out of memory at a micro-batch of 1.
        """
        self.train_state.model.train()
        # Gradients that the model came with are not part of the first batch.
        self.train_state.gradients.clear()
        batches = self.sampler.batches(self.batches_seen)
        memory = MemoryReadings(self.meter)
        while True:
            start = self.clock()
            batch = next(batches, None)
            if batch is None:
                return
            self.times.begin(start)
            factor = warmup_factor(self.sampler.seen(batch.index + 1), self.warmup_samples)
            with scaled_learning_rate(self.train_state.optimizers, factor):
                learning_rate = check_learning_rates(self.train_state.optimizers, batch.index + 1)
                result, parts, oom_message = self._train_batch(batch)
            self._check(batch, parts, result)
            self._advance(batch, result)
            stats = memory.after_step(is_unusual=oom_message is not None)
            self.times.end()
            seconds = self.clock() - start
            yield StepRecord(
                step=self.batches_seen,
                applied=result.applied,
                samples=self.sampler.seen(self.batches_seen),
                loss=result.loss if math.isfinite(result.loss) else None,
                count=result.count,
                learning_rate=learning_rate,
                grad_norm=result.grad_norm if math.isfinite(result.grad_norm) else None,
                micro_batch=max((len(part.ids) for part in parts), default=0),
                accumulation_steps=len(parts),
                seconds=seconds,
                samples_per_s=len(batch.ids) / seconds if seconds > 0 else None,
                items_per_s=result.count / seconds if seconds > 0 else None,
                peak_allocated_bytes=stats.peak_allocated_bytes,
                peak_reserved_bytes=stats.peak_reserved_bytes,
                oom_recoveries=self.oom_recoveries,
                recovered=oom_message,
            )

    def _advance(self, batch: GlobalBatch, result: StepResult) -> None:
        """Count the batch; a schedule advances only if its optimizer stepped."""
        self.steps_applied += result.applied
        if result.applied and result.first_norm is not None:
            self.noise.observe(result.first_norm**2, result.first_count, result.grad_norm**2, result.count)
        with user_code("schedule"):
            for schedule, stepped in zip(self.schedules, result.stepped, strict=False):
                if stepped:
                    schedule.step()
        self.batches_seen = batch.index + 1
        self.is_intact = True

    def _train_batch(self, batch: GlobalBatch) -> tuple[StepResult, list[MicroBatchIds], str | None]:
        """Train a batch, again after an out-of-memory error.

        Returns:
            The result, the micro-batches, and the message of the last out-of-memory error.
        """
        oom: OutOfMemory | None = None
        items_per_sample = self.train_state.items_per_sample
        # Micro-batches are halved down to 1, where `error_before_step` ends the run.
        while True:
            parts = self.split.parts(batch, self.micro_batch)
            before = self._random_state = capture_random_state(self._random_state)
            self.is_intact = False
            is_first = oom is None
            with rescaled_momentum(self.rescaled_norms, len(parts)):
                may_be_suspect = is_first and any(len(part.ids) > 1 for part in parts)
                outcome = self._attempt(batch, parts, may_be_suspect=may_be_suspect)
            if isinstance(outcome, StepResult):
                return outcome, parts, None if oom is None else oom.message
            # Outside of the except block, so that nothing holds the tensors of the failed step.
            self.train_state.items_per_sample = items_per_sample
            is_intact = undo_batch(self.train_state, self.device, before, is_fatal=outcome.is_fatal)
            oom = self.engine.settle(outcome._replace(is_intact=is_intact), may_repeat=is_first)
            self.is_intact = oom.is_intact
            # Emptying the cache mends fragmentation, so the same micro-batches get one more try.
            runs_unchanged = is_first and oom.is_fragmented and self.is_intact
            if not runs_unchanged:
                self.micro_batch = oom.smaller
                end = error_before_step(self.train_state, batch.index + 1, oom)
                if end is not None:
                    self.has_failed_on_all_ranks = True
                    raise end
            self.oom_recoveries += 1

    def _attempt(
        self, batch: GlobalBatch, parts: list[MicroBatchIds], *, may_be_suspect: bool
    ) -> StepResult | OutOfMemory:
        """Train a batch, or return the out-of-memory error that ended it before the optimizer step.

        Args:
            batch: the samples.
            parts: the micro-batches.
            may_be_suspect: whether errors that only may be about memory count as such.
        """
        fed = None if self.feed is None else self.feed.collated(batch, self.micro_batch)
        twice = isinstance(self.train_state.loss, WholeBatchLoss)
        fetched = Fetched(self.workload, parts, fed, self.times, self.kept)
        placed = feed(fetched, self.train_state.device, self.meter, twice=twice)
        running = Running(parts, placed, runs_twice=twice)
        outcome: StepTotals | OutOfMemory
        # Each call ends before an error is looked at, so that nothing holds the tensors of the failed step.
        try:
            outcome = self._accumulate(batch, parts, running)
        except Exception as error:
            outcome = self._out_of_memory(error, batch, running, may_be_suspect)
        if isinstance(outcome, OutOfMemory):
            self.train_state.gradients.clear()
        running.end()
        try:
            return self._combine_and_step(outcome)
        except Exception as error:
            return self._out_of_memory(error, batch, running, may_be_suspect)

    def _accumulate(self, batch: GlobalBatch, parts: list[MicroBatchIds], running: Running) -> StepTotals:
        """Run the micro-batches forward and backward."""
        return accumulate(
            self.train_state,
            self.engine.passing(self.train_state, running, len(parts), batch),
            len(batch.ids),
            self._mark if self.times.is_timing else self.meter.mark,
            places=[part.places for part in parts],
            measure_first=len(parts) > 1 and self.noise.is_due(batch.index),
        )

    def _combine_and_step(self, outcome: StepTotals | OutOfMemory) -> StepResult | OutOfMemory:
        """Sum the batch over the ranks, and take the step unless memory ran out on one of them."""
        totals = self.engine.combine(self.train_state, outcome)
        if isinstance(totals, OutOfMemory):
            return totals
        is_timing = self.times.is_timing
        result = finish(self.train_state, totals, mark=self._mark if is_timing else self.meter.mark)
        self.train_state.stepping = False
        if is_timing:
            self.times.lap(OTHER)
        return result

    def _mark(self, phase: str) -> None:
        """Begin a phase of a step that is timed."""
        self.meter.mark(phase)
        self.times.lap(phase)

    def _out_of_memory(
        self, error: Exception, batch: GlobalBatch, running: Running, may_be_suspect: bool
    ) -> OutOfMemory:
        """Return an out-of-memory error that came before the optimizer step, and raise any other error."""
        verdict = classify(error)
        is_step = self.train_state.stepping
        if verdict is Verdict.NONE:
            raise self.engine.explained(error)
        if verdict is Verdict.SUSPECT and (is_step or not may_be_suspect):
            raise error
        self.times.drop()
        size, smaller = running.blamed(self.split, self.micro_batch)
        if not is_step:
            found = OutOfMemory(first_line(error), verdict is Verdict.FATAL, size=size, smaller=smaller)
            if running.is_in_loss:
                found = found._replace(is_in_loss=True, size=len(batch.ids), smaller=self.micro_batch)
            has_room = is_fragmented(error) or running.is_in_loss
            return found._replace(is_fragmented=has_room and not found.is_fatal)
        self.micro_batch = smaller
        raise error_in_step(self.train_state, batch.index + 1, size, first_line(error)) from error

    def _check(self, batch: GlobalBatch, parts: list[MicroBatchIds], result: StepResult) -> None:
        """Raise if the step was not applied because it is not finite, unless it may be skipped."""
        if result.applied:
            self.skipped_steps_in_a_row = 0
        if result.applied or result.count == 0:
            return
        scaler = self.train_state.scaler
        if scaler is not None and scaler.get_scale() >= LEAST_LOSS_SCALE:
            return
        skipped = self.skipped_steps_in_a_row
        reason = f" (after {skipped} skipped steps in a row)" if skipped else ""
        if scaler is None and self.on_nonfinite == "skip" and skipped < MAX_SKIPS_IN_A_ROW:
            # Running statistics drop the samples of a step that is not applied.
            self.skipped_steps_in_a_row += 1
            if self.train_state.buffers.restore():
                return
            reason = " and cannot be skipped, because the forward pass changed a large buffer of the model"
        step, ids = f"step {batch.index + 1}", [part.ids for part in parts]
        raise nonfinite_error(
            self.workload,
            self.train_state,
            ids,
            ranks=self.engine.ranks,
            step=step,
            loss=result.loss,
            reason=reason,
        )


def warmup_factor(samples_seen: int, warmup_samples: int | None) -> float:
    """Return the warm-up factor of the learning rate for the batch that ends after ``samples_seen``."""
    return 1.0 if warmup_samples is None else min(1.0, samples_seen / warmup_samples)


def scaled_learning_rate(optimizers: Optimizers, factor: float) -> AbstractContextManager[None]:
    """Multiply all learning rates by ``factor`` within the block; schedules never see it."""
    return nullcontext() if factor == 1.0 else _scaled(optimizers, factor)


@contextmanager
def _scaled(optimizers: Optimizers, factor: float) -> Iterator[None]:
    originals = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    try:
        for group, rate in originals:
            group["lr"] = rate * factor
        yield
    finally:
        for group, rate in originals:
            group["lr"] = rate


def check_learning_rates(optimizers: Optimizers, step: int) -> float:
    """Return the learning rate of the first parameter group, 0 if it has none.

    Raises:
        NonFiniteError: a learning rate of step ``step`` is not finite.
        InputError: a learning rate is negative.
    """
    rates = [group.get("lr") for optimizer in optimizers for group in optimizer.param_groups]
    away = [one for one in rates if isinstance(one, Tensor) and not one.is_cpu]
    if away:
        # One transfer for all rates that are on the device.
        values = iter(torch.stack([one.double() for one in away]).tolist())
        rates = [next(values) if any(one is other for other in away) else one for one in rates]
    for number, rate in enumerate(rates, 1):
        if rate is not None and not 0 <= rate < math.inf:
            raise (InputError if math.isfinite(rate) else NonFiniteError)(
                f"the learning rate of step {step} is {float(rate):g} (parameter group {number} of "
                f"{len(rates)}), so the step was not taken: it must be finite and at least 0; check "
                "Workload(schedule=…) and Workload(optimizer=…)"
            )
    return float(rates[0] or 0.0)


class MemoryReadings:
    """The memory after each step, as it was last read.

    Args:
        meter: reads it.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._steps = 0
        self._last: MemoryStats | None = None

    def after_step(self, *, is_unusual: bool) -> MemoryStats:
        """Return the memory after the next step, read anew if that is due.

        Args:
            is_unusual: whether the step ran out of memory, so that what is known no longer holds.
        """
        is_due = self._steps < READING_INTERVAL or self._steps % READING_INTERVAL == 0
        self._steps += 1
        if self._last is None or is_due or is_unusual:
            self._last = self._meter.stats()
        return self._last
