"""Training loop: one `StepRecord` per batch, with recovery from out-of-memory errors.

    batch ─► micro-batches, forward and backward ─► sum over ranks ─► norms, clip, step
               ▲        out of memory on any rank │
               └── smaller ◄── rewind, free ◄─────┘

After an out-of-memory error the partial gradients are dropped, random states and buffers are those of the
start of the batch again, and the cache of the allocator is emptied. The same samples then run in smaller
micro-batches. Nothing is repeated after the sum: the optimizer step may have moved a part of the weights.

A request to stop is obeyed between two micro-batches. The open batch is dropped, and drawn again on a resume.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch

from autobatch.core.errors import DoesNotFitError, InputError, NonFiniteError, RestartSmallerError
from autobatch.core.records import StepRecord
from autobatch.core.units import format_bytes
from autobatch.device.base import Device
from autobatch.device.oom import Verdict, classify, first_line
from autobatch.distributed.engine import DroppedError, OutOfMemory, Whole
from autobatch.step.gradients import Optimizers
from autobatch.step.loss import StepTotals
from autobatch.step.train_state import TrainState
from autobatch.step.train_step import StepResult, accumulate, finish
from autobatch.workload.contract import Collated, WholeBatchLoss, Workload
from autobatch.workload.feed import Feed
from autobatch.workload.order import GlobalBatch, GlobalBatchSampler, MicroBatchIds, Split
from autobatch.workload.rng import RandomState, capture_random_state, restore_random_state
from autobatch.workload.streams import StreamSampler
from autobatch.workload.user_code import user_code

LEAST_LOSS_SCALE = 2.0**-10
"""Loss scale below which an overflow means that the gradients themselves are not finite."""
MAX_SKIPS_IN_A_ROW = 3
"""Consecutive steps that may be skipped because they are not finite."""
EARLY_STEPS = 16
"""Steps of this process after which the memory that is held is read, to compare with if memory runs out."""
MAX_NAMED_SAMPLES = 32
"""Samples that a message names."""
CHANGED = "the forward pass changed a large buffer or a frozen weight"
NOT_INTACT = f", where the batch cannot run again, because {CHANGED}"
IN_THE_DRIVER = ", in the driver, after which this process cannot continue"
"""Why a batch cannot run again in this process."""


_TrainedBatch: TypeAlias = tuple[StepResult, list[MicroBatchIds], str | None]
"""A batch whose step was taken, or skipped: its micro-batches, and why it ran more than once."""


@dataclass(kw_only=True)
class Loop:
    """A training run between two steps; `autobatch.training.resume` captures all that a resume needs."""

    workload: Workload
    train_state: TrainState
    sampler: GlobalBatchSampler
    device: Device
    micro_batch: int
    """The largest micro-batch to run; shrinks after an out-of-memory error."""
    split: Split
    """Forms the micro-batches of each batch."""
    feed: Feed
    """Fetches and collates the micro-batches."""
    engine: Whole = field(default_factory=Whole)
    """The ranks that train each batch together."""
    schedules: list[torch.optim.lr_scheduler.LRScheduler] = field(default_factory=list)
    """One per optimizer, or empty."""
    on_nonfinite: Literal["raise", "skip"] = "raise"
    """Raise or skip the step if the loss or gradient is not finite; fp16 overflows are always skipped."""
    batches_seen: int = 0
    steps_applied: int = 0
    skipped_steps_in_a_row: int = 0
    """Steps skipped since the last applied one because they were not finite."""
    oom_recoveries: int = 0
    clock: Callable[[], float] = time.perf_counter
    can_be_saved: bool = True
    """True if the state is that between two steps, and all ranks can save it together."""
    held_early: str = ""
    """Memory that was held after the first steps of this process, in words; empty before, or if unknown."""

    def run(self) -> Iterator[StepRecord]:
        """Train the remaining batches, and yield one record per batch. End early if asked to stop.

        Raises:
            NonFiniteError: the loss or the gradient is not finite, and the step may not be skipped; the
                weights did not change.
            InputError: a learning rate or the count of a `Loss` is invalid; the weights did not change.
            RestartSmallerError: out of memory where the loop cannot recover.
            DoesNotFitError: out of memory, and no smaller micro-batch is left.
        """
        # Gradients that the model came with are not part of the first batch.
        self.train_state.gradients.clear()
        batches, early = self.sampler.batches(self.batches_seen), self.batches_seen + EARLY_STEPS
        random_state: RandomState | None = None
        while True:
            start = self.clock()
            batch = next(batches, None)
            if batch is None:
                return
            learning_rate = first_learning_rate(self.train_state.optimizers, batch.index + 1)
            random_state = capture_random_state(random_state)
            # FSDP2 runs its collectives within the loss and its backward pass.
            with self.engine.ranks.waiting("train the batch"):
                trained = self._train_batch(batch, random_state)
            if trained is None:
                return
            result, parts, recovered = trained
            self._check(batch, result)
            self._advance(batch, result)
            memory = self.train_state.meter.stats()
            if self.batches_seen == early and memory.allocated_bytes:
                self.held_early = f"{format_bytes(memory.allocated_bytes)} after step {early}"
            seconds = self.clock() - start
            yield StepRecord(
                step=self.batches_seen,
                applied=result.applied,
                samples=self.sampler.seen(self.batches_seen),
                loss=_finite(result.loss),
                terms={name: _finite(value) for name, value in result.terms.items()},
                count=result.count,
                learning_rate=learning_rate,
                grad_norm=_finite(result.grad_norm),
                micro_batch=max((len(part.ids) for part in parts), default=0),
                accumulation_steps=len(parts),
                seconds=seconds,
                samples_per_s=len(batch.ids) / seconds if seconds > 0 else None,
                items_per_s=result.count / seconds if seconds > 0 else None,
                peak_allocated_bytes=memory.peak_allocated_bytes,
                peak_reserved_bytes=memory.peak_reserved_bytes,
                oom_recoveries=self.oom_recoveries,
                recovered=recovered,
            )

    def _train_batch(self, batch: GlobalBatch, random_state: RandomState) -> _TrainedBatch | None:
        """Train a batch, and repeat it after an out-of-memory error, as long as micro-batches get smaller.

        Returns:
            None if the batch was dropped, because the run was asked to stop.
        """
        recovered: str | None = None
        while True:
            parts = self.split.parts(batch, self.micro_batch)
            self.can_be_saved = False
            outcome = self._attempt(batch, parts, is_first=recovered is None)
            try:
                outcome = self.engine.combine(self.train_state, outcome)
                if isinstance(outcome, StepTotals):
                    result = finish(self.train_state, outcome)
                    return result, parts, recovered
            except Exception as error:
                outcome = self._out_of_memory(error, parts)
                why = ", inside the optimizer step, which may have moved part of the weights"
                self._shrink_or_end(batch, outcome, why)
            # Outside of the except block, so that nothing holds the tensors of the failed step.
            is_intact = self._rewind(random_state, is_fatal=outcome.is_fatal)
            is_intact = not self.engine.ranks.agree(not is_intact)
            # A stream cannot go back to the start of a batch.
            self.can_be_saved = is_intact and not isinstance(self.sampler, StreamSampler)
            if self.engine.request.signal_number is not None:
                return None
            why = "" if is_intact else NOT_INTACT
            self._shrink_or_end(batch, outcome, IN_THE_DRIVER if outcome.is_fatal else why)
            recovered = outcome.message
            self.oom_recoveries += 1

    def _attempt(
        self, batch: GlobalBatch, parts: list[MicroBatchIds], *, is_first: bool
    ) -> StepTotals | OutOfMemory:
        """Run the micro-batches of a batch, or return why they ended early, without any gradient.

        In the first attempt, an error that may be about memory counts as out of memory, as long as smaller
        micro-batches are left to try.
        """
        try:
            return accumulate(
                self.train_state,
                self.engine.padded(
                    self.train_state.feed(self._fetch(parts)),
                    lambda: self.split.rounds(batch, self.micro_batch) - len(parts),
                ),
                len(batch.ids),
            )
        except DroppedError:
            failure = OutOfMemory("")
        except Exception as error:
            may_be_suspect = is_first and any(len(part.ids) > 1 for part in parts)
            failure = self._out_of_memory(error, parts, may_be_suspect=may_be_suspect)
            if not self.engine.is_alone:
                self._shrink_or_end(batch, failure, ", for which the other ranks of the sharded model wait")
        self.train_state.gradients.clear()
        return failure

    def _fetch(self, parts: list[MicroBatchIds]) -> Iterator[tuple[Collated, int]]:
        """Yield the micro-batches of a batch on the host, each with its number of samples, and hold none."""
        fed = self.feed.collated(parts, self.micro_batch)
        may_stop = self.engine.is_alone and not isinstance(self.sampler, StreamSampler)
        for part in parts:
            if may_stop and self.engine.request.is_asked:
                raise DroppedError("the run was asked to stop")
            # Not in a variable, because this frame lives while the micro-batch trains.
            yield next(fed), len(part.ids)

    def _out_of_memory(
        self, error: Exception, parts: list[MicroBatchIds], *, may_be_suspect: bool = False
    ) -> OutOfMemory:
        """Return what an error says about memory; raise it if it says nothing."""
        verdict = classify(error)
        if verdict is Verdict.NONE or (verdict is Verdict.SUSPECT and not may_be_suspect):
            raise error
        # A rank may have no sample. The fullest micro-batch shrinks; the others are no larger.
        halved = [self.split.halved(part, self.micro_batch) for part in parts]
        return OutOfMemory(
            first_line(error),
            is_fatal=verdict is Verdict.FATAL,
            size=max((len(part.ids) for part in parts), default=1),
            smaller=max(halved, default=1),
        )

    def _rewind(self, random_state: RandomState, *, is_fatal: bool) -> bool:
        """Return to the start of a batch, outside of any ``except`` block.

        Returns:
            False if a large buffer has changed, or if a device after a fatal error no longer answers.
        """
        train_state = self.train_state
        train_state.gradients.clear()
        try:
            self.device.release()
            # A lost device fails here for certain: freeing its cache may not show it.
            self.device.synchronize()
            is_restored = train_state.buffers.restore()
            restore_random_state(random_state)
        except Exception:
            if not is_fatal:
                raise
            return False
        return is_restored

    def _shrink_or_end(self, batch: GlobalBatch, oom: OutOfMemory, why: str) -> None:
        """Set the largest micro-batch for another attempt in this process, which a ``why`` rules out.

        Raises:
            RestartSmallerError: a restart in smaller micro-batches may leave more room.
            DoesNotFitError: there is no smaller micro-batch.
        """
        can_shrink = oom.size > 1 and oom.smaller < self.micro_batch
        self.micro_batch = min(self.micro_batch, oom.smaller)
        if can_shrink and not why:
            return
        message, held = oom.message.rstrip("."), self.train_state.meter.stats().allocated_bytes
        if self.held_early and held:
            message += f"; held between steps: {self.held_early}, {format_bytes(held)} now"
        line = f"out of memory in step {batch.index + 1} at a micro-batch of {oom.size}{why}: {message}"
        if can_shrink:
            raise RestartSmallerError(line)
        smaller = "a smaller --target-batch, " if isinstance(self.train_state.loss, WholeBatchLoss) else ""
        raise DoesNotFitError(
            f"{line}; what would help: a larger --memory-budget, {smaller}--precision bf16, activation "
            "checkpointing, a fused optimizer (fused=True) or one with less state"
        )

    def _check(self, batch: GlobalBatch, result: StepResult) -> None:
        """Raise if the step was not applied because it is not finite, unless it may be skipped."""
        if result.applied:
            self.skipped_steps_in_a_row = 0
        if result.applied or result.count == 0:
            return
        scaler, reason = self.train_state.scaler, ""
        if scaler.is_enabled() and scaler.get_scale() >= LEAST_LOSS_SCALE:
            return
        skipped = self.skipped_steps_in_a_row
        if skipped:
            reason = f" (after {skipped} skipped steps in a row)"
        if not scaler.is_enabled() and self.on_nonfinite == "skip" and skipped < MAX_SKIPS_IN_A_ROW:
            # Running statistics drop the samples of a step that is not applied.
            self.skipped_steps_in_a_row += 1
            # No rank may train on without another.
            if not self.engine.ranks.agree(not self.train_state.buffers.restore()):
                return
            reason = f" and cannot be skipped, because {CHANGED}"
        what = "gradient" if math.isfinite(result.loss) else f"loss ({result.loss})"
        at = f" at a loss scale of {scaler.get_scale():.1e}" if scaler.is_enabled() else ""
        named, more = batch.ids[:MAX_NAMED_SAMPLES], len(batch.ids) - MAX_NAMED_SAMPLES
        raise NonFiniteError(
            f"the {what} of step {batch.index + 1} is not finite{at}{reason}, so the step was not applied: "
            f"its batch has the samples {named}{f' and {more} more' if more > 0 else ''}. "
            "Check these samples, the learning rate and the precision"
        )

    def _advance(self, batch: GlobalBatch, result: StepResult) -> None:
        """Count the batch; a schedule advances only if its optimizer stepped."""
        self.steps_applied += result.applied
        with user_code("schedule"):
            for schedule, stepped in zip(self.schedules, result.stepped, strict=False):
                if stepped:
                    schedule.step()
        self.batches_seen = batch.index + 1
        self.can_be_saved = True


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def first_learning_rate(optimizers: Optimizers, step: int) -> float:
    """Return the learning rate of the first parameter group, 0 if it has none.

    Raises:
        InputError: a learning rate of step ``step`` is negative or not finite.
    """
    rates = [float(group.get("lr") or 0.0) for optimizer in optimizers for group in optimizer.param_groups]
    if not all(0 <= rate < math.inf for rate in rates):
        raise InputError(
            f"the learning rates of step {step} are {', '.join(f'{rate:g}' for rate in rates)}, so the step "
            "was not taken: each must be finite and at least 0; check Workload(schedule=…)"
        )
    return rates[0]
