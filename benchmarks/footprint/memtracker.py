"""Torch's tracker of the memory of a step, `torch.distributed._tools.mem_tracker`, for comparison.

It runs on real tensors. On fake ones it stops at the first value that is read (``.item()`` in Adam, and in
the check of the loss), and a training step needs those reads.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch.distributed._tools.mem_tracker import MemTracker

from autobatch.setup.attempt import ATTEMPT_STEPS
from autobatch.setup.setup import Setup
from autobatch.step.restore import temporary_weights
from autobatch.step.train_state import StepSettings, build_train_state
from autobatch.step.train_step import train_step


class Tracked(NamedTuple):
    """Its result for one micro-batch."""

    peak_bytes: int | None
    """Live bytes; it does not model an allocator."""
    cpu_seconds: float
    failure: str | None


def tracked(setup: Setup, micro_batch: int) -> Tracked:
    """Track the steps of an attempt; every size needs a run of its own."""
    start = time.process_time()
    try:
        peak = _peak(setup, micro_batch)
    except Exception as error:
        return Tracked(None, time.process_time() - start, f"{type(error).__name__}: {error}"[:200])
    return Tracked(peak, time.process_time() - start, None)


def _peak(setup: Setup, micro_batch: int) -> int:
    with temporary_weights(setup.model, torch.device("cpu")) as model:
        model.train()
        train_state = build_train_state(
            setup.workload,
            model,
            torch.device("cpu"),
            StepSettings(precision=setup.precision, max_grad_norm=setup.max_grad_norm),
            learning_rate=setup.workload.learning_rate,
        )
        tracker = MemTracker()
        tracker.track_external(model, *train_state.optimizers)

        def mark(phase: str) -> None:
            # It allows one forward pass of a module between two resets.
            if phase == "forward":
                tracker.reset_mod_stats()

        with tracker:
            for count in ATTEMPT_STEPS:
                batches = ((setup.worst_case.batch(micro_batch), micro_batch) for _ in range(count))
                train_step(train_state, batches, micro_batch * count, mark=mark)
            return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
