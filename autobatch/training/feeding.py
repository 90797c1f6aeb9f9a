"""Opening what feeds a loop: itself, or loader workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from autobatch.device.base import Device
from autobatch.knobs import PIN_MEMORY, Configuration
from autobatch.training.feed import AHEAD, Feed, SeededFeed, SeededJoin
from autobatch.training.windows import Window
from autobatch.training.workers import WorkerFeed
from autobatch.workload import Workload


def card_of(device: Device, knobs: Configuration) -> torch.device | None:
    """The card that `open_feed` is to copy for; ``None`` where the device is none, or the knobs say no."""
    return device.torch_device if device.kind == "cuda" and knobs.get(PIN_MEMORY, True) else None


@contextmanager
def open_feed(
    workload: Workload,
    windows: Callable[[int], Iterator[Window]],
    *,
    seed: int,
    workers: int = 0,
    prefetch: int = AHEAD,
    sample_seeds: bool = False,
    card: torch.device | None = None,
) -> Iterator[Feed | None]:
    """Open what feeds a loop; its workers are gone afterwards.

    Args:
        workload: has the data and the collate.
        windows: the windows of the run from a number on.
        seed: of the run.
        workers: processes that fetch and join; 0: the loop does.
        prefetch: micro-batches that each is ahead by.
        sample_seeds: seed every sample by itself; with workers that is always so.
        card: copy what workers have joined to where this card can read it by itself, while it computes.

    Yields:
        ``None`` where the loop joins its own micro-batches, from the run's own generators.
    """
    join = SeededJoin(data=workload.train_data, collate=workload.collate, seed=seed)
    if not workers:
        yield SeededFeed(join) if sample_seeds else None
        return
    feed = WorkerFeed(join, windows, workers=workers, prefetch=prefetch, card=card)
    try:
        yield feed
    finally:
        feed.close()
