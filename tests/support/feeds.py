"""Loops that are fed as ``fit`` feeds them, the samples that a feed yields, and its worker processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.context import ForkProcess
from typing import Any

from autobatch import Workload
from autobatch.training.loop import Loop
from autobatch.workload.feed import Feed
from tests.support.training import make_loop


@contextmanager
def fed_loop(
    workload: Workload, *, workers: int, sample_seeds: bool = False, seed: int = 0, **options: Any
) -> Iterator[Loop]:
    """Open a loop of 6 steps with its feed, as ``fit`` does."""
    loop = make_loop(workload, seed=seed, **{"target_batch": 7, "micro_batch": 3, "steps": 6, **options})
    loop.feed = Feed(workload, loop.sampler, loop.split, workers=workers, seeds_samples=sample_seeds)
    with closing(loop.feed):
        yield loop


def loader_workers() -> list[ForkProcess]:
    """Return the loader workers that run. Servers for other tests are no plain forks."""
    return [child for child in multiprocessing.active_children() if isinstance(child, ForkProcess)]
