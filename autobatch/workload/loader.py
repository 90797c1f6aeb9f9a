"""The feed of a loop, opened for the number of workers that was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from autobatch.core.knobs import PIN_MEMORY, Configuration
from autobatch.device.base import Device
from autobatch.workload.contract import Collated, Workload
from autobatch.workload.feed import AHEAD, Feed, SeededCollate, SeededFeed
from autobatch.workload.loader_parts import Loading
from autobatch.workload.nested import tensors_of
from autobatch.workload.split import Split
from autobatch.workload.worker import check_picklable, start_method
from autobatch.workload.worker_feed import BatchesFrom, WorkerFeed


@contextmanager
def open_feed(
    workload: Workload,
    batches: BatchesFrom,
    *,
    seed: int,
    workers: int = 0,
    prefetch: int = AHEAD,
    sample_seeds: bool = False,
    gpu: torch.device | None = None,
    split: Split | None = None,
) -> Iterator[Feed | None]:
    """Open the feed of a loop, and end its workers at the end of the block.

    Args:
        workload: has the data and the collate function.
        batches: returns the batches of the run, from a number on.
        seed: of the run.
        workers: processes that fetch and collate; 0 to do so in the loop.
        prefetch: micro-batches that each worker is ahead by.
        sample_seeds: seed every sample; always on with workers.
        gpu: copy the workers' micro-batches to pinned memory for this GPU; None not to copy.
        split: forms the micro-batches; None for equal counts.

    Yields:
        None if the loop collates its own micro-batches, with the run's own generators.
    """
    collate = SeededCollate(data=workload.train_data, collate=workload.collate, seed=seed)
    if not workers:
        yield SeededFeed(collate, split) if sample_seeds else None
        return
    feed = WorkerFeed(
        collate,
        batches,
        workers=workers,
        prefetch=prefetch,
        gpu=gpu,
        split=split,
        init_worker=workload.loading.init_worker,
    )
    try:
        yield feed
    finally:
        feed.close()


def gpu_of(device: Device, knobs: Configuration, loading: Loading) -> torch.device | None:
    """Return the GPU that `open_feed` pins memory for; None if the device or the choices ask for none."""
    is_pinned = knobs.get(PIN_MEMORY, loading.pin_memory)
    return device.torch_device if device.reads_pinned_memory and is_pinned else None


def why_not_sent(collate: SeededCollate, batch: Collated) -> str | None:
    """Return why loader workers cannot feed a workload; None if they can.

    Args:
        collate: the function that a worker runs.
        batch: one of its micro-batches.
    """
    if any(tensor.device.type != "cpu" for tensor in tensors_of(batch)):
        return "its samples are on a GPU, which workers cannot use"
    try:
        if start_method() is None:
            check_picklable(collate)
        check_picklable(batch)
    except Exception as error:
        return f"its samples cannot be sent from one process to another ({type(error).__name__}: {error})"
    return None
