"""torch's own tracker of a step's memory, beside ours: `torch.distributed._tools.mem_tracker`.

It is run on real tensors: on fake ones it stops at the first value that is read (``.item()`` in Adam, and in
the step's check of its loss), which a training step cannot do without.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch.distributed._tools.mem_tracker import MemTracker

from autobatch.probing.attempt import WINDOWS, Bench
from autobatch.step.restore import lent
from autobatch.step.train_state import assemble
from autobatch.step.train_step import run_window


class Tracked(NamedTuple):
    """What it says of one micro-batch."""

    peak_bytes: int | None
    """Live bytes; it knows no allocator."""
    cpu_seconds: float
    failure: str | None


def tracked(bench: Bench, micro_batch: int) -> Tracked:
    """Have it watch the windows of an attempt; it needs a run of its own for every size."""
    start = time.process_time()
    try:
        peak = _peak(bench, micro_batch)
    except Exception as error:
        return Tracked(None, time.process_time() - start, f"{type(error).__name__}: {error}"[:200])
    return Tracked(peak, time.process_time() - start, None)


def _peak(bench: Bench, micro_batch: int) -> int:
    with lent(bench.model, torch.device("cpu")) as model:
        model.train()
        trainee = assemble(
            bench.workload,
            model,
            torch.device("cpu"),
            precision=bench.precision,
            learning_rate=bench.workload.learning_rate,
            max_grad_norm=bench.max_grad_norm,
        )
        tracker = MemTracker()
        tracker.track_external(model, *trainee.optimizers)

        def mark(phase: str) -> None:
            # It takes one forward of a module between two of these.
            if phase == "forward":
                tracker.reset_mod_stats()

        with tracker:
            for count in WINDOWS:
                batches = ((bench.costliest.batch(micro_batch), micro_batch) for _ in range(count))
                run_window(trainee, batches, micro_batch * count, mark=mark)
            return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
