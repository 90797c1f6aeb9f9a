"""The limits: every workload under three budgets on two devices, and the truth from a plain loop of torch."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch

import autobatch
from autobatch import Workload
from autobatch.core.options import Options
from autobatch.device.base import Device
from autobatch.rehearsal.setup import Setup, open_setup
from benchmarks.plain_loop import STEPS, costliest, train

BUDGETS: dict[str, dict[str, tuple[str, str, str]]] = {
    "cpu": {
        "mlp": ("160KiB", "300KiB", "900KiB"),
        "mlp-heavy": ("2760KiB", "3200KiB", "5MiB"),
        "mlp-deep-sgd": ("350KiB", "600KiB", "1500KiB"),
        "conv": ("250KiB", "1MiB", "5MiB"),
        "resnet-bn": ("130KiB", "1MiB", "7MiB"),
        "u-net": ("170KiB", "1MiB", "5MiB"),
        "gpt": ("3MiB", "6MiB", "16MiB"),
        "gpt-checkpointed": ("3MiB", "5MiB", "12MiB"),
        "gpt-ragged": ("4MiB", "8MiB", "20MiB"),
        "encoder-dropout": ("700KiB", "2MiB", "8MiB"),
        "lstm": ("900KiB", "3MiB", "12MiB"),
        "experts": ("300KiB", "600KiB", "1500KiB"),
        "contrastive": ("150KiB", "500KiB", "4MiB"),
    },
    # CUDA's allocator takes memory in segments of 2 MiB (blocks up to 1 MiB) and 20 MiB (up to 10 MiB).
    "sim:t4": {
        "mlp": ("2MiB", "4MiB", "6MiB"),
        "mlp-heavy": ("4MiB", "6MiB", "30MiB"),
        "mlp-deep-sgd": ("2MiB", "4MiB", "6MiB"),
        "conv": ("2MiB", "4MiB", "8MiB"),
        "resnet-bn": ("2MiB", "6MiB", "12MiB"),
        "u-net": ("2MiB", "6MiB", "12MiB"),
        "gpt": ("4MiB", "12MiB", "24MiB"),
        "gpt-checkpointed": ("4MiB", "8MiB", "22MiB"),
        "gpt-ragged": ("6MiB", "12MiB", "24MiB"),
        "encoder-dropout": ("2MiB", "8MiB", "22MiB"),
        "lstm": ("2MiB", "22MiB", "30MiB"),
        "experts": ("2MiB", "4MiB", "6MiB"),
        "contrastive": ("2MiB", "22MiB", "40MiB"),
    },
}
NEIGHBOURS = 8
"""Sizes on either side of an answer that also run on the simulated GPU, where memory need not be monotone."""


@dataclass
class Limit:
    """One limit, and the sizes that fit under it; each size runs once."""

    workload: Workload
    device: str
    budget: str
    known: dict[int, bool] = field(default_factory=dict)

    @property
    def cap(self) -> int:
        return len(self.workload.train_data)  # type: ignore[arg-type]

    def setup(self) -> Setup:
        options = Options(device=self.device, memory_budget=self.budget)
        return open_setup(self.workload, options)

    def fits(self, setup: Setup, size: int) -> bool:
        if size not in self.known:
            self.known[size] = all(trains(self.workload, setup.device, size, steps) for steps in STEPS)
        return self.known[size]

    def true(self, setup: Setup, answer: int) -> int:
        """Return the largest size that fits, by bisection and by running all sizes near both answers."""
        found = bisected(lambda size: self.fits(setup, size), self.cap)
        if self.device != "cpu":
            for near in {found, answer}:
                for size in range(max(1, near - NEIGHBOURS), min(self.cap, near + NEIGHBOURS) + 1):
                    self.fits(setup, size)
        return max((size for size, fits in self.known.items() if fits), default=0)


class Answer(NamedTuple):
    """The answer of a search."""

    found: int
    runs: int
    errors: int
    seconds: float


def by_autobatch(limit: Limit) -> Answer:
    """Probe as a user does, without saved limits."""
    start = time.perf_counter()
    given = {"device": limit.device, "memory_budget": limit.budget}
    with tempfile.TemporaryDirectory() as home, mock.patch.dict(os.environ, AUTOBATCH_HOME=home):
        try:
            probe = autobatch.probe(limit.workload, progress=False, **given)
        except autobatch.DoesNotFitError:
            return Answer(0, 1, 1, time.perf_counter() - start)
    return Answer(probe.micro_batch, len(probe.attempts), probe.oom_count, time.perf_counter() - start)


def bisected(fits, cap: int) -> int:
    """Double the size until it fails, then bisect the interval."""
    low, high = 0, 1
    while high <= cap and fits(high):
        low, high = high, (min(2 * high, cap) if high < cap else cap + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def trains(workload: Workload, device: Device, size: int, steps: tuple[int, ...]) -> bool:
    """Return whether a plain loop of torch stays within the budget. Of the product it uses the meter only."""
    torch.manual_seed(0)
    model = workload.model().train()
    optimizer = workload.optimizer(model.parameters(), workload.learning_rate)
    try:
        with device.session(is_probe=True) as meter:
            meter.count([*model.parameters(), *model.buffers()])

            def draw() -> Any:
                with meter.uncounted():
                    batch = costliest(workload, size)
                meter.count(batch)
                return batch

            train(model, optimizer, workload.loss, draw, steps, device_type="cpu")
            return device.refuses(meter.stats()) is None
    except torch.OutOfMemoryError:
        return False
