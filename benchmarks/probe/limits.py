"""The limits: every workload under three budgets on two devices, and the truth from real attempts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch.utils.data import Dataset

from autobatch import Workload
from autobatch.core.options import Options
from autobatch.device.oom import is_oom
from autobatch.setup.attempt import attempt
from autobatch.setup.setup import Setup, open_setup
from autobatch.step.restore import temporary_weights
from autobatch.step.train_state import StepSettings, build_train_state
from autobatch.step.train_step import train_step
from autobatch.workload.data import load_micro_batch
from autobatch.workload.nested import tensors_of
from autobatch.workload.rng import preserved_random_state
from benchmarks.workloads import WORKLOADS

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
LATER = 20
"""Optimizer steps at a found size, on random samples."""


class InMemory(Dataset):
    """Samples in memory, because their creation is not measured."""

    def __init__(self, data: Dataset) -> None:
        self.samples = [data[index] for index in range(len(data))]  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> object:
        return self.samples[index]


def workload_of(name: str) -> Workload:
    workload = WORKLOADS[name]()
    return replace(workload, train_data=InMemory(workload.train_data))


@dataclass
class Limit:
    """One limit, and the sizes that fit under it; each size runs once."""

    workload: Workload
    device: str
    budget: str
    known: dict[int, bool] = field(default_factory=dict)
    survived: dict[int, int] = field(default_factory=dict)

    @property
    def settings(self) -> Options:
        return Options().with_values(device=self.device, memory_budget=self.budget)

    @property
    def cap(self) -> int:
        return len(self.workload.train_data)  # type: ignore[arg-type]

    def setup(self) -> Setup:
        return open_setup(self.workload, self.settings)

    def fits(self, setup: Setup, size: int) -> bool:
        if size not in self.known:
            self.known[size] = attempt(setup, size).attempt.fits
        return self.known[size]

    def later(self, setup: Setup, size: int) -> int:
        """Return the number of optimizer steps at a size before memory runs out."""
        if size and size not in self.survived:
            self.survived[size] = later(setup, size)
        return self.survived[size] if size else LATER

    def true(self, setup: Setup, *around: int) -> int:
        """Return the largest size that fits, by bisection and by running all sizes near the answers."""
        found = bisected(lambda size: self.fits(setup, size), self.cap)
        if self.device != "cpu":
            for answer in {found, *around}:
                for size in range(max(1, answer - NEIGHBOURS), min(self.cap, answer + NEIGHBOURS) + 1):
                    self.fits(setup, size)
        return max((size for size, fits in self.known.items() if fits), default=0)


def bisected(fits, cap: int) -> int:
    """Double the size until it fails, then bisect the interval."""
    low, high = 0, 1
    while high <= cap and fits(high):
        low, high = high, (min(2 * high, cap) if high < cap else cap + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def later(setup: Setup, size: int, steps: int = LATER) -> int:
    """Train at a size on random samples. Return the number of optimizer steps before memory runs out."""
    generator = torch.Generator().manual_seed(size)
    count = len(setup.workload.train_data)  # type: ignore[arg-type]
    done = 0
    with (
        preserved_random_state(),
        setup.device.enforced() as meter,
        temporary_weights(setup.model, torch.device("cpu")),
    ):
        meter.count(tensor.data for tensor in [*setup.model.parameters(), *setup.model.buffers()])
        setup.model.train()
        train_state = build_train_state(
            setup.workload,
            setup.model,
            torch.device("cpu"),
            StepSettings(precision=setup.precision),
            learning_rate=setup.workload.learning_rate,
        )

        def micro_batch(_):
            with meter.uncounted():
                ids = torch.randint(count, (size,), generator=generator).tolist()
                batch = load_micro_batch(setup.workload, ids)
            meter.count(tensors_of(batch))
            return batch, size

        try:
            for _ in range(steps):
                # No generator: its frame would hold each micro-batch through the backward pass.
                train_step(train_state, map(micro_batch, range(2)), 2 * size)
                done += 1
        except Exception as error:
            if not is_oom(error):
                raise
    return done
