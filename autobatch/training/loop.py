"""The training loop: windows in, `StepRecord`s out.

A window that runs out of memory is run again: its partial gradients are dropped, the random states and the
buffers go back to its start, and the same samples run in smaller micro-batches; the step is applied once.
Nothing is mended inside an optimizer step, where part of the weights may have moved already.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autobatch.device.base import Device, Meter
from autobatch.device.oom import Verdict, classify, first_line
from autobatch.errors import DoesNotFitError, NonFiniteError, RestartSmallerError
from autobatch.planning import micro_batches
from autobatch.records import StepRecord
from autobatch.samples import join
from autobatch.state import capture_random_state, restore_random_state
from autobatch.step import (
    Tally,
    Trainee,
    WindowResult,
    accumulate,
    discard_gradients,
    finish,
    tensors_of,
    to_device,
)
from autobatch.training.windows import Course, Window
from autobatch.workload import Batch, Workload

REPLAYS_IN_A_ROW = 2
"""A window that runs out of memory more often than this ends the run: memory is going elsewhere."""


@dataclass(kw_only=True)
class Loop:
    """A training run between two windows; what `state_dict` returns is all that a resume needs."""

    workload: Workload
    trainee: Trainee
    course: Course
    device: Device
    meter: Meter
    micro_batch: int
    """The largest micro-batch to run; falls when memory runs out."""
    schedules: list[torch.optim.lr_scheduler.LRScheduler] = field(default_factory=list)
    windows_seen: int = 0
    steps_applied: int = 0
    oom_recoveries: int = 0
    measure_norm: bool = False
    clock: Callable[[], float] = time.perf_counter

    def run(self) -> Iterator[StepRecord]:
        """Train the windows that are left, one record each.

        Raises:
            NonFiniteError: the loss of a window is not finite; no step was taken for it.
            RestartSmallerError: out of memory where nothing can be mended in place.
            DoesNotFitError: out of memory at a micro-batch of 1.
        """
        self.trainee.model.train()
        for window in self.course.windows(self.windows_seen):
            start = self.clock()
            result, sizes, trouble = self._train_window(window)
            self._check(window, result)
            if result.applied:
                self.steps_applied += 1
                for schedule in self.schedules:
                    schedule.step()
            self.windows_seen = window.index + 1
            stats = self.meter.stats()
            yield StepRecord(
                step=self.windows_seen,
                applied=result.applied,
                samples=self.course.seen(self.windows_seen),
                loss=result.loss if math.isfinite(result.loss) else None,
                count=result.count,
                learning_rate=float(self.trainee.optimizers[0].param_groups[0]["lr"]),
                grad_norm=result.grad_norm,
                micro_batch=sizes[0],
                accumulation_steps=len(sizes),
                seconds=self.clock() - start,
                peak_allocated_bytes=stats.peak_allocated_bytes,
                peak_reserved_bytes=stats.peak_reserved_bytes,
                oom_recoveries=self.oom_recoveries,
                recovered=trouble,
            )

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on, between two windows."""
        random_state = capture_random_state()
        numpy = random_state.numpy
        return {
            "model": self.trainee.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.trainee.optimizers],
            "schedules": [schedule.state_dict() for schedule in self.schedules],
            "scaler": None if self.trainee.scaler is None else self.trainee.scaler.state_dict(),
            "items_per_sample": self.trainee.items_per_sample,
            "random": {
                "python": random_state.python,
                # The one state that weights_only cannot read as it is: an array becomes a tensor.
                "numpy": None if numpy is None else (numpy[0], torch.from_numpy(numpy[1].copy()), *numpy[2:]),
                "torch": random_state.torch,
                "cuda": random_state.cuda,
            },
            "counters": {
                "windows_seen": self.windows_seen,
                "steps_applied": self.steps_applied,
                "oom_recoveries": self.oom_recoveries,
                "micro_batch": self.micro_batch,
            },
        }

    def load_state_dict(self, state: dict[str, Any], *, same_hardware: bool) -> None:
        """Go on where a checkpoint was written.

        Args:
            state: what `state_dict` returned.
            same_hardware: also take over the micro-batch and the generators of the card, so that the rest of
                the run is the same bit for bit; otherwise the windows are the same, and the micro-batch is
                what was planned here.
        """
        self.trainee.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.trainee.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for schedule, saved in zip(self.schedules, state["schedules"], strict=True):
            schedule.load_state_dict(saved)
        if self.trainee.scaler is not None and state["scaler"] is not None:
            self.trainee.scaler.load_state_dict(state["scaler"])
        self.trainee.items_per_sample = state["items_per_sample"]
        counters = state["counters"]
        self.windows_seen = counters["windows_seen"]
        self.steps_applied = counters["steps_applied"]
        self.oom_recoveries = counters["oom_recoveries"]
        if same_hardware:
            self.micro_batch = counters["micro_batch"]
        _restore_random(state["random"], with_cuda=same_hardware)

    def _train_window(self, window: Window) -> tuple[WindowResult, list[int], str | None]:
        trouble: str | None = None
        for _ in range(REPLAYS_IN_A_ROW + 1):
            sizes = micro_batches(len(window.ids), self.micro_batch)
            before = capture_random_state()
            buffers = [(buffer, buffer.clone()) for buffer in self.trainee.model.buffers()]
            tally, failure = self._accumulate(window, sizes)
            if tally is not None:
                return self._finish(tally), sizes, trouble
            # Out of the except block: nothing keeps the failed window's tensors alive any more.
            trouble = failure or trouble
            discard_gradients(self.trainee)
            self.device.release()
            with torch.no_grad():
                for buffer, kept in buffers:
                    buffer.copy_(kept)
            restore_random_state(before)
            self.oom_recoveries += 1
            self._shrink(sizes[0], trouble)
        raise RestartSmallerError(
            f"out of memory in window {window.index} {REPLAYS_IN_A_ROW + 1} times in a row, last at a "
            f"micro-batch of {sizes[0]}: {trouble}; something else is taking the memory"
        )

    def _accumulate(self, window: Window, sizes: list[int]) -> tuple[Tally | None, str | None]:
        """Run the window's micro-batches; on an out-of-memory error say what it said."""
        try:
            return accumulate(
                self.trainee, self._batches(window.ids, sizes), len(window.ids), self.meter.mark
            ), None
        except Exception as error:
            if classify(error) in (Verdict.NONE, Verdict.SUSPECT):
                raise
            if classify(error) is Verdict.FATAL:
                raise RestartSmallerError(
                    f"out of memory in the driver at a micro-batch of {sizes[0]}: {first_line(error)}; "
                    "this process cannot go on"
                ) from error
            return None, first_line(error)

    def _finish(self, tally: Tally) -> WindowResult:
        try:
            return finish(self.trainee, tally, measure_norm=self.measure_norm, mark=self.meter.mark)
        except Exception as error:
            if classify(error) in (Verdict.NONE, Verdict.SUSPECT):
                raise
            raise RestartSmallerError(
                f"out of memory inside the optimizer step, after micro-batches of {tally.micro_batches[0]}: "
                f"{first_line(error)}; part of the weights may have moved, so nothing is mended in place"
            ) from error

    def _shrink(self, failed: int, trouble: str | None) -> None:
        if failed == 1:
            raise DoesNotFitError(f"out of memory in training at a micro-batch of 1: {trouble}")
        self.micro_batch = math.ceil(failed / 2)

    def _batches(self, ids: list[int], sizes: list[int]) -> Iterator[tuple[Batch, int]]:
        first = 0
        for size in sizes:
            with self.meter.aside():
                batch = to_device(join(self.workload, ids[first : first + size]), self.trainee.device)
            self.meter.adopt(tensors_of(batch))
            yield batch, size
            first += size

    def _check(self, window: Window, result: WindowResult) -> None:
        if result.applied or self.trainee.scaler is not None or result.count == 0:
            return
        raise NonFiniteError(
            f"the loss of window {window.index} is {result.loss}: no step was taken; "
            f"samples {window.ids[:8]}{'…' if len(window.ids) > 8 else ''}; "
            "look at them, at the learning rate and at the precision"
        )


def _restore_random(state: dict[str, Any], *, with_cuda: bool) -> None:
    numpy = state["numpy"]
    current = capture_random_state()
    cuda: list[Tensor] = state["cuda"] if with_cuda and len(state["cuda"]) == len(current.cuda) else []
    restore_random_state(
        current._replace(
            python=state["python"],
            numpy=None if numpy is None else (numpy[0], numpy[1].numpy(), *numpy[2:]),
            torch=state["torch"],
            cuda=cuda,
        )
    )
