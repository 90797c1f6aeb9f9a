"""Loops that are fed as ``fit`` feeds them, the samples that a feed yields, and its worker processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkProcess
from typing import Any

import torch

from autobatch import Workload
from autobatch.training.loop import Loop
from autobatch.workload.feed import open_feed
from autobatch.workload.order import GlobalBatchSampler
from tests.support.kinds import Augmented, Everything, adamw
from tests.support.training import make_loop, make_workload, points


class Numbered(Augmented):
    """Augmented samples that begin with their index."""

    def __getitem__(self, index: int):
        inputs, labels = super().__getitem__(index)
        return index, inputs, labels


def augmented(**changes: Any) -> Workload:
    """Make a workload that draws at random in its data and in its model."""
    data = Augmented(*points(dtype=torch.float32).columns)
    return make_workload(**{"model": Everything, "train_data": data, "optimizer": adamw, **changes})


@contextmanager
def fed_loop(
    workload: Workload, *, workers: int, sample_seeds: bool = False, seed: int = 0, **options: Any
) -> Iterator[Loop]:
    """Open a loop of 6 steps with its feed, as ``fit`` does."""
    loop = make_loop(workload, seed=seed, **{"target_batch": 7, "micro_batch": 3, "steps": 6, **options})
    with open_feed(workload, loop.sampler, workers=workers, seeds_samples=sample_seeds) as feed:
        loop.feed = feed
        yield loop


def fed_samples(
    *, workers: int, micro_batch: int, start: int = 0, seed: int = 5
) -> list[tuple[int, list[float]]]:
    """Return every sample of a run of two epochs in order: its index, and its augmented inputs."""
    workload = make_workload(train_data=Numbered(*points(dtype=torch.float32).columns))
    sampler = GlobalBatchSampler(samples=24, target_batch=10, seed=seed, epochs=2)
    found = []
    with open_feed(workload, sampler, workers=workers, seeds_samples=True) as feed:
        for batch in sampler.batches(start):
            for ids, inputs, _ in feed.collated(batch, micro_batch):
                found += list(zip(ids.tolist(), inputs.tolist(), strict=True))
    return found


def loader_workers() -> list[ForkProcess]:
    """Return the loader workers that run. Servers for other tests are no plain forks."""
    return [child for child in multiprocessing.active_children() if isinstance(child, ForkProcess)]
