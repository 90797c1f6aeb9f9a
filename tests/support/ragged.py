"""Workloads with samples of different sizes, and splits of their batches."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from autobatch import Workload
from autobatch.core.records import SizeCut
from autobatch.device.cpu import SimulatedDevice
from autobatch.device.profiles import load_profile
from autobatch.rehearsal.setup import Setup
from autobatch.workload.data import WorstCaseSampler, digest_of
from autobatch.workload.order import SizeSplit
from tests.support.training import (
    IGNORED,
    adamw,
    language_model,
    make_loop,
    make_setup,
    make_workload,
    token_loss,
)


class Sequences:
    """Sequences of 1 to ``longest`` tokens; a quarter of the labels is ignored."""

    def __init__(self, samples: int = 48, longest: int = 24, *, noise: float = 0.0) -> None:
        self.samples, self.longest, self.noise = samples, longest, noise

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(index)
        length = 1 + (index * 7919) % self.longest
        ids = torch.randint(7, (length + 1,), generator=draw)
        if self.noise and random.random() < self.noise:
            ids = (ids + int(np.random.randint(7))) % 7
        labels = ids[1:].masked_fill(torch.rand(length, generator=draw) < 0.25, IGNORED)
        return ids[:-1], labels


def pad(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    ids, labels = zip(*samples, strict=True)
    return (
        pad_sequence(list(ids), batch_first=True),
        pad_sequence(list(labels), batch_first=True, padding_value=IGNORED),
    )


def ragged_workload(**changes: Any) -> Workload:
    known = {
        "model": language_model, "train_data": Sequences(), "collate": pad, "loss": token_loss,
        "optimizer": adamw, "learning_rate": 0.01, "size_of": lambda sample: len(sample[0]), "name": "ragged",
    }  # fmt: skip
    return make_workload(**{**known, **changes})


def ragged_split(workload: Workload, limit: int = 5) -> SizeSplit:
    """Make a split in which ``limit`` of the longest samples fit, and more of shorter ones."""
    sizes = WorstCaseSampler(workload).sizes()
    longest, digest = float(sizes.max()), digest_of(sizes)
    cut = SizeCut(longest=longest, micro_batch=limit, max_micro_batch=4 * limit, digest=digest)
    return SizeSplit(sizes=sizes, cut=cut)


def padded_and_real(sizes: np.ndarray, groups: list[list[int]]) -> tuple[float, float]:
    """Return the total of the sizes of a batch with padding and without."""
    padded = sum(len(group) * float(sizes[list(group)].max()) for group in groups)
    return padded, float(sizes.sum())


def wide_model() -> nn.Module:
    """Make a model whose activations outweigh its parameters."""
    return nn.Sequential(nn.Embedding(7, 32), nn.Linear(32, 512), nn.Tanh(), nn.Linear(512, 7))


def simulated_setup(workload: Workload, budget: str) -> Setup:
    """Build what a probe opens of a workload, on a simulated GPU."""
    return make_setup(workload, device=SimulatedDevice(load_profile("t4"), memory_budget=budget))


def count_ooms(workload: Workload, setup: Setup, micro_batch: int, *, target: int, steps: int) -> int:
    """Train, and return how often memory ran out."""
    with setup.device.session(is_probe=False) as meter:
        meter.mark("setup")
        counts = {"target_batch": target, "micro_batch": micro_batch, "steps": steps}
        loop = make_loop(workload, **counts, device=setup.device, meter=meter)
        list(loop.run())
    return loop.oom_recoveries
