"""The training loop: windows in, `StepRecord`s out.

A window that runs out of memory is run again: its partial gradients are dropped, the random states and the
buffers go back to its start, and the same samples run in smaller micro-batches; the step is applied once.
Nothing is mended inside an optimizer step, where part of the weights may have moved already.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from autobatch.core.errors import DoesNotFitError, NonFiniteError, RestartSmallerError
from autobatch.core.records import StepRecord
from autobatch.device.allocator.ledger import MemoryStats
from autobatch.device.base import Device, Meter
from autobatch.device.oom import Verdict, classify, first_line
from autobatch.planning import micro_batches
from autobatch.step.gradients import Optimizers
from autobatch.step.train_state import TrainState
from autobatch.step.train_step import StepResult, accumulate, finish
from autobatch.training.batchnorm import rescaled_momentum
from autobatch.training.noise_scale import NoiseScale
from autobatch.training.nonfinite import find_nonfinite_sample
from autobatch.workload.contract import Collated, WholeBatchLoss, Workload
from autobatch.workload.data import load_micro_batch
from autobatch.workload.feed import Feed
from autobatch.workload.nested import feed
from autobatch.workload.order import GlobalBatch, GlobalBatchSampler
from autobatch.workload.rng import capture_random_state, restore_random_state
from autobatch.workload.user_code import user_code


def warmup_factor(samples_seen: int, warmup_samples: int | None) -> float:
    """Share of the learning rate for the window that ends after so many samples: it grows in proportion."""
    return 1.0 if warmup_samples is None else min(1.0, samples_seen / warmup_samples)


@contextmanager
def scaled_learning_rate(optimizers: Optimizers, factor: float) -> Iterator[None]:
    """Inside, all learning rates are ``factor`` times what they are; schedules never see it."""
    if factor == 1.0:
        yield
        return
    kept = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    try:
        for group, rate in kept:
            group["lr"] = rate * factor
        yield
    finally:
        for group, rate in kept:
            group["lr"] = rate


REPLAYS_IN_A_ROW = 2
"""A window that runs out of memory more often than this ends the run: memory is going elsewhere."""


LEAST_LOSS_SCALE = 2.0**-10
"""Gradients that overflow even at this scale are not finite by themselves."""


SKIPS_IN_A_ROW = 3
"""Windows in a row that may be skipped for not being finite: more are a run gone wrong."""


READINGS_EVERY = 16
"""Windows between two readings of the allocator in the steady state: a reading waits for the device."""


@dataclass(kw_only=True)
class Loop:
    """A training run between two windows; `autobatch.training.loop_state` says all that a resume needs."""

    workload: Workload
    train_state: TrainState
    sampler: GlobalBatchSampler
    device: Device
    meter: Meter
    micro_batch: int
    """The largest micro-batch to run; falls when memory runs out."""
    schedules: list[torch.optim.lr_scheduler.LRScheduler] = field(default_factory=list)
    """One for each optimizer, or none at all."""
    on_nonfinite: Literal["raise", "skip"] = "raise"
    """What a window without a loss scale is whose loss or gradient is not finite."""
    rescaled_norms: list[_BatchNorm] = field(default_factory=list)
    """BatchNorms whose momentum follows the number of micro-batches, so that a window weighs what it would
    as one batch."""
    warmup_samples: int | None = None
    """Samples over which the learning rate grows to what it is; ``None``: none."""
    batches_seen: int = 0
    steps_applied: int = 0
    skipped_in_a_row: int = 0
    """Windows skipped since the last step because they were not finite."""
    oom_recoveries: int = 0
    noise: NoiseScale = field(default_factory=NoiseScale)
    """Fed with what accumulation gives almost for nothing."""
    feed: Feed | None = None
    """What joins the micro-batches; ``None``: the loop, from its own generators."""
    clock: Callable[[], float] = time.perf_counter

    def run(self) -> Iterator[StepRecord]:
        """Train the windows that are left, one record each.

        Raises:
            NonFiniteError: the loss or the gradient of a window is not finite and may not be skipped; no step
                was taken for it.
            RestartSmallerError: out of memory where nothing can be mended in place.
            DoesNotFitError: out of memory at a micro-batch of 1.
        """
        self.train_state.model.train()
        # What a model comes with is no part of the first window.
        self.train_state.gradients.clear()
        windows = self.sampler.batches(self.batches_seen)
        stats: MemoryStats | None = None
        started = self.batches_seen
        while True:
            start = self.clock()
            window = next(windows, None)
            if window is None:
                return
            factor = warmup_factor(self.sampler.seen(window.index + 1), self.warmup_samples)
            with scaled_learning_rate(self.train_state.optimizers, factor):
                learning_rate = float(self.train_state.optimizers[0].param_groups[0]["lr"])
                result, sizes, trouble = self._train_batch(window)
            self._check(window, sizes, result)
            self._advance(window, result)
            since = window.index - started
            if stats is None or since < READINGS_EVERY or since % READINGS_EVERY == 0 or trouble:
                stats = self.meter.stats()
            seconds = self.clock() - start
            yield StepRecord(
                step=self.batches_seen,
                applied=result.applied,
                samples=self.sampler.seen(self.batches_seen),
                loss=result.loss if math.isfinite(result.loss) else None,
                count=result.count,
                learning_rate=learning_rate,
                grad_norm=result.grad_norm if math.isfinite(result.grad_norm) else None,
                micro_batch=sizes[0],
                accumulation_steps=len(sizes),
                seconds=seconds,
                samples_per_s=len(window.ids) / seconds if seconds > 0 else None,
                items_per_s=result.count / seconds if seconds > 0 else None,
                peak_allocated_bytes=stats.peak_allocated_bytes,
                peak_reserved_bytes=stats.peak_reserved_bytes,
                oom_recoveries=self.oom_recoveries,
                recovered=trouble,
            )

    def _advance(self, window: GlobalBatch, result: StepResult) -> None:
        """Count the window; schedules follow only the optimizers that stepped."""
        self.steps_applied += result.applied
        if result.applied and result.first_norm is not None:
            self.noise.observe(result.first_norm**2, result.first_count, result.grad_norm**2, result.count)
        with user_code("schedule"):
            for schedule, stepped in zip(self.schedules, result.stepped, strict=False):
                if stepped:
                    schedule.step()
        self.batches_seen = window.index + 1

    def _train_batch(self, window: GlobalBatch) -> tuple[StepResult, list[int], str | None]:
        trouble: str | None = None
        items_per_sample = self.train_state.items_per_sample
        for replay in range(REPLAYS_IN_A_ROW + 1):
            sizes = micro_batches(len(window.ids), self.micro_batch)
            before = capture_random_state()
            with rescaled_momentum(self.rescaled_norms, len(sizes)):
                outcome = self._attempt(window, sizes, may_be_suspect=replay == 0 and sizes[0] > 1)
            if isinstance(outcome, StepResult):
                return outcome, sizes, trouble
            # Out of the except block: nothing keeps the failed window's tensors alive any more.
            trouble = outcome
            self.train_state.gradients.clear()
            self.device.release()
            rewound = self.train_state.buffers.restore()
            restore_random_state(before)
            self.train_state.items_per_sample = items_per_sample
            self._shrink(sizes[0], trouble)
            if not rewound:
                raise RestartSmallerError(
                    f"out of memory in window {window.index} at a micro-batch of {sizes[0]}: {trouble}; the "
                    "forward pass had changed a large buffer of the model, so the window cannot be run again"
                )
            self.oom_recoveries += 1
        raise RestartSmallerError(
            f"out of memory in window {window.index} {REPLAYS_IN_A_ROW + 1} times in a row, last at a "
            f"micro-batch of {sizes[0]}: {trouble}; something else is taking the memory"
        )

    def _attempt(self, window: GlobalBatch, sizes: list[int], *, may_be_suspect: bool) -> StepResult | str:
        """Train a window; where it can be run again after an out-of-memory error, return what that said."""
        try:
            twice = isinstance(self.train_state.loss, WholeBatchLoss)
            fetched = self._fetched(window, sizes)
            batches = feed(fetched, self.train_state.device, self.meter, twice=twice)
            accumulator = accumulate(
                self.train_state,
                batches,
                len(window.ids),
                self.meter.mark,
                measure_first=len(sizes) > 1 and self.noise.due(window.index),
            )
            return finish(self.train_state, accumulator, mark=self.meter.mark)
        except Exception as error:
            verdict = classify(error)
            if verdict is Verdict.NONE:
                raise
            if verdict is Verdict.SUSPECT and (self.train_state.stepping or not may_be_suspect):
                raise
            if verdict is not Verdict.FATAL and not self.train_state.stepping:
                return first_line(error)
            self.micro_batch = math.ceil(sizes[0] / 2)
            where = (
                "inside the optimizer step; part of the weights may have moved, so nothing is mended in place"
                if self.train_state.stepping
                else "in the driver; this process cannot go on"
            )
            raise RestartSmallerError(
                f"out of memory in window {window.index} at a micro-batch of {sizes[0]}, {where}: "
                f"{first_line(error)}"
            ) from error

    def _shrink(self, failed: int, trouble: str) -> None:
        if failed == 1:
            raise DoesNotFitError(f"out of memory in training at a micro-batch of 1: {trouble}")
        self.micro_batch = math.ceil(failed / 2)

    def _fetched(self, window: GlobalBatch, sizes: list[int]) -> Iterator[tuple[Collated, int]]:
        ids, first = window.ids, 0
        fed = None if self.feed is None else self.feed.collated(window, self.micro_batch)
        for size in sizes:
            yield (
                load_micro_batch(self.workload, ids[first : first + size]) if fed is None else next(fed),
                size,
            )
            first += size

    def _check(self, window: GlobalBatch, sizes: list[int], result: StepResult) -> None:
        if result.applied:
            self.skipped_in_a_row = 0
        if result.applied or result.count == 0:
            return
        scaler = self.train_state.scaler
        if scaler is not None and scaler.get_scale() >= LEAST_LOSS_SCALE:
            return
        before = f", nor were those of {self.skipped_in_a_row} before it" if self.skipped_in_a_row else ""
        if scaler is None and self.on_nonfinite == "skip" and self.skipped_in_a_row < SKIPS_IN_A_ROW:
            # Running statistics forget samples that no step was taken for.
            self.skipped_in_a_row += 1
            if self.train_state.buffers.restore():
                return
            before = ", and cannot be skipped, for the forward pass changed a large buffer of the model"
        what = "gradient" if math.isfinite(result.loss) else f"loss ({result.loss})"
        at = "" if scaler is None else f" at a loss scale of {scaler.get_scale():.1e}"
        raise NonFiniteError(
            f"the {what} of step {window.index + 1} is not finite{at}{before}: no step was taken; "
            f"{find_nonfinite_sample(self.workload, self.train_state, window.ids, sizes)}; "
            "look at them, at the learning rate and at the precision"
        )
