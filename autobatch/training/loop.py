"""Training loop: one `StepRecord` per batch, with recovery from out-of-memory errors.

After an out-of-memory error the batch runs again: its partial gradients are dropped, random states and
buffers are restored to the start of the step, and the cache of the allocator is emptied. If the memory was
fragmented, the same micro-batches run again first, with the same result. Otherwise, or if that fails too or
happens again soon, the same samples run in smaller micro-batches. The optimizer step is applied once. There
is no recovery inside the optimizer step, which may have moved part of the weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from autobatch.core.errors import (
    AutobatchError,
    DoesNotFitError,
    InputError,
    NonFiniteError,
    RestartSmallerError,
)
from autobatch.core.records import StepRecord
from autobatch.core.units import format_bytes
from autobatch.device.base import Device, Meter
from autobatch.device.oom import Verdict, classify, first_line, is_fragmented
from autobatch.distributed.engine import Engine, OutOfMemory
from autobatch.distributed.ranks import Ranks
from autobatch.report.words import plural
from autobatch.step.apply_knobs import free_graphs
from autobatch.step.gradients import Optimizers
from autobatch.step.loss import StepTotals, mean_of
from autobatch.step.train_state import TrainState, precision_context
from autobatch.step.train_step import StepResult, accumulate, finish
from autobatch.workload.contract import Collated, WholeBatchLoss, Workload
from autobatch.workload.data import load_micro_batch
from autobatch.workload.loader import Feed
from autobatch.workload.nested import tensors_of, to_device
from autobatch.workload.order import GlobalBatch, GlobalBatchSampler
from autobatch.workload.rng import (
    RandomState,
    capture_random_state,
    preserved_random_state,
    restore_random_state,
)
from autobatch.workload.split import MicroBatchIds, Split
from autobatch.workload.user_code import user_code

LEAST_LOSS_SCALE = 2.0**-10
"""Loss scale below which an overflow means that the gradients themselves are not finite."""
MAX_SKIPS_IN_A_ROW = 3
"""Consecutive steps that may be skipped because they are not finite."""
REPEATS_APART = 16
"""Least batches from one that ran again in the same micro-batches to the next: more often is not worth it."""
EARLY_STEPS = 16
"""Steps of this process after which the memory that is held is read, to compare with if memory runs out."""
GROWTH = 1.1
"""Ratio of held memory above which it has grown, rather than fluctuated."""
MAX_NAMED_SAMPLES = 8
"""Samples that a message names."""


@dataclass(kw_only=True)
class Loop:
    """A training run between two steps; `autobatch.training.resume` captures all that a resume needs."""

    workload: Workload
    train_state: TrainState
    sampler: GlobalBatchSampler
    device: Device
    meter: Meter
    micro_batch: int
    """The largest micro-batch to run; shrinks after an out-of-memory error."""
    split: Split
    """Forms the micro-batches of each batch."""
    feed: Feed
    """Fetches and collates the micro-batches."""
    engine: Engine = field(default_factory=Engine)
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
    _random_state: RandomState | None = field(default=None, init=False, repr=False)
    """At the start of the last batch; None before the first."""
    _phase: str = field(default="", init=False, repr=False)
    """The phase of the step that runs."""
    _fitted: int = field(default=0, init=False, repr=False)
    """Batches that ran in these micro-batches, in this process."""
    _repeated: int | None = field(default=None, init=False, repr=False)
    """The last batch that ran again in these micro-batches, by its index; None if none has."""
    is_intact: bool = True
    """True if the state is that between two steps. False while a batch trains, and if it cannot be undone."""
    has_failed_on_all_ranks: bool = False
    """True if an out-of-memory error ended the run on all ranks at once, so that they can still talk."""
    _held_early: tuple[int, int] | None = field(default=None, init=False, repr=False)
    """A step, and the bytes that were held after it; None before it."""
    _held_bytes: int = field(default=0, init=False, repr=False)
    """Bytes that were held after the last step; 0 if the device counts none."""

    def run(self) -> Iterator[StepRecord]:
        """Train the remaining batches, and yield one record per batch.

        Raises:
            NonFiniteError: the learning rate is not finite, or the loss or the gradient is not and the step
                may not be skipped; the weights did not change.
            InputError: a learning rate or the count of a `Loss` is invalid; the weights did not change.
            RestartSmallerError: out of memory where the loop cannot recover.
            DoesNotFitError: out of memory at a micro-batch of 1.
        """
        train_state = self.train_state
        # Gradients that the model came with are not part of the first batch.
        train_state.gradients.clear()
        batches, early = self.sampler.batches(self.batches_seen), self.batches_seen + EARLY_STEPS
        while True:
            start = self.clock()
            batch = next(batches, None)
            if batch is None:
                return
            samples = self.sampler.seen(batch.index + 1)
            learning_rate = check_learning_rates(train_state.optimizers, batch.index + 1)
            result, parts, oom_message = self._train_batch(batch)
            self._check(batch, parts, result)
            self._advance(batch, result)
            memory = self.meter.stats()
            self._held_bytes = memory.allocated_bytes or 0
            if self.batches_seen == early:
                self._held_early = early, self._held_bytes
            seconds = self.clock() - start
            yield StepRecord(
                step=self.batches_seen,
                applied=result.applied,
                samples=samples,
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
                recovered=oom_message,
            )

    def _train_batch(self, batch: GlobalBatch) -> tuple[StepResult, list[MicroBatchIds], str | None]:
        """Train a batch, and repeat it after an out-of-memory error.

        Returns:
            The result, the micro-batches, and why it ran again, None if it ran once.
        """
        oom: OutOfMemory | None = None
        before_errors = self.micro_batch
        items_per_sample = self.train_state.items_per_sample
        # Micro-batches are halved down to 1, where `out_of_memory_error` ends the run.
        while True:
            parts = self.split.parts(batch, self.micro_batch)
            before = self._random_state = capture_random_state(self._random_state)
            self.is_intact = False
            is_first = oom is None
            outcome = self._attempt(batch, parts, is_first=is_first)
            if isinstance(outcome, StepResult):
                is_smaller = self.micro_batch < before_errors
                reason = None if oom is None else self._reason(oom, is_smaller=is_smaller)
                self._fitted += 1
                return outcome, parts, reason
            # Outside of the except block, so that nothing holds the tensors of the failed step.
            self.train_state.items_per_sample = items_per_sample
            is_intact = self._roll_back(before, is_fatal=outcome.is_fatal)
            oom = self.engine.agree_on_oom(outcome._replace(is_intact=is_intact))
            self.is_intact = oom.is_intact
            # Emptying the cache mends fragmentation, so the same micro-batches get one more try.
            runs_unchanged = is_first and oom.is_fragmented and self.is_intact
            if runs_unchanged:
                self._repeated = batch.index
            else:
                self.micro_batch = oom.smaller
                end = out_of_memory_error(self.train_state, batch.index + 1, oom)
                if end is not None:
                    self.has_failed_on_all_ranks = True
                    raise end
            self.oom_recoveries += 1

    def growth(self) -> str | None:
        """Return in words that more memory is held between two steps than early in the run; None if not."""
        if self._held_early is None or self._held_bytes <= GROWTH * self._held_early[1]:
            return None
        step, early = self._held_early
        return (
            f"memory grew: {format_bytes(early)} were held after step {step}, and "
            f"{format_bytes(self._held_bytes)} after step {self.batches_seen}. Usually a tensor is kept from "
            "step to step with its graph, as by losses.append(loss): keep loss.item()"
        )

    def _reason(self, oom: OutOfMemory, *, is_smaller: bool) -> str:
        """Return in words why a batch ran again; micro-batches that got smaller begin to fit now."""
        fitted, more = self._fitted, self.growth()
        if is_smaller:
            self._fitted, self._repeated = 0, None
            if more is None and fitted:
                more = (
                    f"it had fitted in {plural(fitted, 'step')}, so this one takes more: for larger samples, "
                    "for layers that were not used before, or because other processes took memory"
                )
        else:
            fragmented = "" if oom.is_in_loss else "memory was fragmented, so "
            more = f"{fragmented}the cache was emptied, and the same micro-batches ran again"
        return ". ".join(filter(None, (more, oom.message)))

    def _attempt(
        self, batch: GlobalBatch, parts: list[MicroBatchIds], *, is_first: bool
    ) -> StepResult | OutOfMemory:
        """Train a batch, or return the out-of-memory error that ended it before the optimizer step.

        In the first attempt, an error that may be about memory counts as out of memory, as long as smaller
        micro-batches are left to try.
        """
        train_state, may_be_suspect = self.train_state, is_first and any(len(part.ids) > 1 for part in parts)
        placed = train_state.feed(self._fetch(batch, parts), self.meter)
        running = _Running(parts, placed)
        outcome: StepTotals | OutOfMemory
        # Each call ends before an error is looked at, so that nothing holds the tensors of the failed step.
        try:
            outcome = accumulate(
                train_state,
                self.engine.begin_step(
                    train_state, running, len(parts), self.split.rounds(batch, self.micro_batch)
                ),
                len(batch.ids),
                self._mark,
                places=[part.places for part in parts],
            )
        except Exception as error:
            outcome = self._out_of_memory(error, batch, running, may_be_suspect=may_be_suspect)
        if isinstance(outcome, OutOfMemory):
            train_state.gradients.clear()
        running.part, self._phase = None, ""
        try:
            totals = self.engine.combine(train_state, outcome)
            if isinstance(totals, OutOfMemory):
                return totals
            result = finish(train_state, totals, mark=self._mark)
        except Exception as error:
            return self._out_of_memory(error, batch, running, may_be_suspect=may_be_suspect)
        train_state.stepping = False
        return result

    def _fetch(self, batch: GlobalBatch, parts: list[MicroBatchIds]) -> Iterator[tuple[Collated, int]]:
        """Yield the micro-batches of a batch on the host, each with its number of samples, and hold none."""
        fed = self.feed.collated(batch, self.micro_batch)
        for part in parts:
            # Not in a variable, because this frame lives while the micro-batch trains.
            yield next(fed), len(part.ids)

    def _mark(self, phase: str) -> None:
        """Begin a phase of a step."""
        self._phase = phase
        self.meter.mark(phase)

    def _out_of_memory(
        self, error: Exception, batch: GlobalBatch, running: _Running, *, may_be_suspect: bool
    ) -> OutOfMemory:
        """Return an out-of-memory error from before the optimizer step, and raise any other error."""
        verdict = classify(error)
        is_step = self.train_state.stepping
        if verdict is Verdict.NONE:
            raise self.engine.explain(error)
        if verdict is Verdict.SUSPECT and (is_step or not may_be_suspect):
            raise error
        size, smaller = running.failed(self.split, self.micro_batch)
        is_fatal = verdict is Verdict.FATAL
        # A loss over the whole batch runs between two passes over its micro-batches.
        is_in_loss = self._phase == "loss" and running.part is None
        # Fragmented again and again, every step would run twice.
        is_again = self._repeated is not None and batch.index - self._repeated < REPEATS_APART
        oom = OutOfMemory(
            first_line(error),
            is_fatal=is_fatal,
            is_fragmented=((is_fragmented(error) and not is_again) or is_in_loss) and not is_fatal,
            size=len(batch.ids) if is_in_loss else size,
            smaller=self.micro_batch if is_in_loss else smaller,
            is_in_loss=is_in_loss,
        )
        if is_step:
            self.micro_batch = smaller
            end = out_of_memory_error(self.train_state, batch.index + 1, oom, in_step=True)
            assert end is not None
            raise end from error
        return oom

    def _roll_back(self, random_state: RandomState, *, is_fatal: bool) -> bool:
        """Return to the start of a batch, outside of any ``except`` block.

        Returns:
            False if a large buffer has changed, or if a device after a fatal error no longer answers.
        """
        train_state = self.train_state
        train_state.gradients.clear()
        try:
            if train_state.gradients.are_overwritten:
                # The graphs of the micro-batches that ran out of memory hold theirs.
                free_graphs()
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
        raise nonfinite_error(
            self.workload,
            self.train_state,
            [part.ids for part in parts],
            ranks=self.engine.ranks,
            step=batch.index + 1,
            loss=result.loss,
            reason=reason,
        )

    def _advance(self, batch: GlobalBatch, result: StepResult) -> None:
        """Count the batch; a schedule advances only if its optimizer stepped."""
        self.steps_applied += result.applied
        with user_code("schedule"):
            for schedule, stepped in zip(self.schedules, result.stepped, strict=False):
                if stepped:
                    schedule.step()
        self.batches_seen = batch.index + 1
        self.is_intact = True


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class _Running:
    """Iterable over the micro-batches of a batch; it knows which one runs, and holds none of them."""

    def __init__(self, parts: list[MicroBatchIds], placed: Iterable[tuple[Collated, int]]) -> None:
        self._parts = parts
        self._placed = placed
        self.part: MicroBatchIds | None = None
        """The micro-batch that runs; None between passes."""

    def __iter__(self) -> Iterator[tuple[Collated, int]]:
        """Begin a pass."""
        placed = iter(self._placed)
        for part in self._parts:
            self.part = part
            yield next(placed)
        self.part = None

    def failed(self, split: Split, micro_batch: int) -> tuple[int, int]:
        """Return the samples of the micro-batch that ran out of memory, and the limit that halves it.

        If none was running, take the fullest one. Both are 1 for a rank without samples.
        """
        if not self._parts:
            return 1, 1
        part = self.part or max(self._parts, key=lambda one: split.halved(one, micro_batch))
        return len(part.ids), split.halved(part, micro_batch)


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
        rates = [next(values) if isinstance(one, Tensor) and not one.is_cpu else one for one in rates]
    for number, rate in enumerate(rates, 1):
        if rate is not None and not 0 <= rate < math.inf:
            raise (InputError if math.isfinite(rate) else NonFiniteError)(
                f"the learning rate of step {step} is {float(rate):g} (parameter group {number} of "
                f"{len(rates)}), so the step was not taken: it must be finite and at least 0; check "
                "Workload(schedule=…) and Workload(optimizer=…)"
            )
    return float(rates[0] or 0.0)


def out_of_memory_error(
    train_state: TrainState, step: int, oom: OutOfMemory, *, in_step: bool = False
) -> AutobatchError | None:
    """Return the error that ends a run out of memory; None if the batch can run again in smaller parts.

    A restart in smaller micro-batches, down to 1, may leave more room for the optimizer step.

    Args:
        train_state: tells which suggestions apply.
        step: the number of the step, from 1.
        oom: the error.
        in_step: whether the optimizer step had begun, or another rank may wait for this one.
    """
    where, why = f"out of memory in step {step} at a micro-batch of {oom.size}", ""
    message = oom.message.rstrip(".")
    if oom.size == 1 or oom.is_in_loss:
        suggestions = {"a larger --memory-budget": True}
        if in_step:
            where += ", inside the optimizer step"
            suggestions |= {"a fused optimizer (fused=True)": True, "an optimizer with less state": True}
            suggestions["no --ema"] = train_state.average is not None
        else:
            suggestions["a smaller --target-batch"] = isinstance(train_state.loss, WholeBatchLoss)
            suggestions["--precision bf16"] = train_state.precision == "fp32"
            suggestions["activation checkpointing"] = not oom.is_in_loss
        if oom.is_in_loss:
            where = f"out of memory in the loss over all {oom.size} samples of a batch, at any micro-batch"
        remedies = ", ".join(remedy for remedy, applies in suggestions.items() if applies)
        return DoesNotFitError(f"{where}: {message}; what would help: {remedies}")
    if in_step and train_state.shared is not None:
        why = "for which the other ranks of the sharded model wait"
    elif in_step:
        why = "inside the optimizer step, which may have moved part of the weights"
    elif oom.is_fatal:
        why = "in the driver, after which this process cannot continue"
    elif not oom.is_intact:
        why = "where the batch cannot run again, because the forward pass changed a large buffer of the model"
    return RestartSmallerError(f"{where}, {why}: {message}") if why else None


def nonfinite_error(
    workload: Workload,
    train_state: TrainState,
    micro_batches: Sequence[list[int]],
    *,
    ranks: Ranks,
    step: int,
    loss: float,
    reason: str,
) -> NonFiniteError:
    """Return the error of a step that was not applied because its loss or gradient is not finite.

    All ranks call it, and get the same error. If each raised its own, a rank without a bad sample might fail
    first and name its own samples.

    Args:
        workload: has the data and the loss.
        train_state: the model, in the state in which the step failed.
        micro_batches: the samples of each micro-batch of this rank.
        ranks: the ranks.
        step: the number of the step, from 1.
        loss: of the batch.
        reason: why the step is not skipped, in words that follow the finding; empty for none.
    """
    what = "gradient" if math.isfinite(loss) else f"loss ({loss})"
    own = [index for part in micro_batches for index in part]
    culprit = find_nonfinite_sample(workload, train_state, micro_batches)
    found = ranks.gather((culprit, own[:MAX_NAMED_SAMPLES], len(own)))
    culprit = next((one for one, _, _ in found if one is not None), None)
    first = [index for _, some, _ in found for index in some][:MAX_NAMED_SAMPLES]
    more = sum(count for _, _, count in found) - len(first)
    named = f"samples {first}{f' and {more} more' if more else ''}"
    if culprit is not None:
        kind = "representation" if isinstance(train_state.loss, WholeBatchLoss) else "loss"
        named = f"sample {culprit} alone gives a non-finite {kind} ({named})"
    scaler = train_state.scaler
    at = "" if scaler is None else f" at a loss scale of {scaler.get_scale():.1e}"
    return NonFiniteError(
        f"the {what} of step {step} is not finite{at}{reason}, so the step was not applied: "
        f"{named}. Check these samples, the learning rate and the precision"
    )


def find_nonfinite_sample(
    workload: Workload, train_state: TrainState, micro_batches: Sequence[list[int]]
) -> int | None:
    """Return the sample whose own loss is not finite, or its representation for a `WholeBatchLoss`.

    Halves the first non-finite micro-batch until one sample is left. It runs forward passes only, and changes
    nothing that the run depends on.

    Returns:
        None if none is found, or if the model is sharded, where all ranks would have to run the same passes.
    """
    if train_state.shared is not None:
        return None
    try:
        with preserved_random_state(), torch.no_grad():
            for part in micro_batches:
                if _is_finite(workload, train_state, part):
                    continue
                left = part
                while len(left) > 1:
                    half = left[: len(left) // 2]
                    left = left[len(half) :] if _is_finite(workload, train_state, half) else half
                return None if _is_finite(workload, train_state, left) else left[0]
    except Exception:  # a failed diagnosis must not hide the error that it is about
        return None
    return None


def _is_finite(workload: Workload, train_state: TrainState, ids: Sequence[int]) -> bool:
    train_state.buffers.take()
    try:
        batch = to_device(load_micro_batch(workload, ids), train_state.device)
        with precision_context(train_state.device, train_state.precision):
            if isinstance(train_state.loss, WholeBatchLoss):
                found = tensors_of(train_state.loss.represent(train_state.model, batch))
                return all(bool(one.isfinite().all()) for one in found)
            loss = train_state.loss(train_state.model, batch)
        return math.isfinite(float(mean_of(loss)))
    finally:
        train_state.buffers.restore()
