"""The feed of a run, for `fit` and for loops of the user's own."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from autobatch.workload.contract import Workload
from autobatch.workload.loader import AHEAD, Feed, open_feed, start_method
from autobatch.workload.order import GlobalBatchSampler
from autobatch.workload.split import SizeSplit, Split
from autobatch.workload.streams import StreamSampler


def feed_of_run(
    workload: Workload,
    sampler: GlobalBatchSampler,
    split: Split,
    *,
    workers: int = 0,
    gpu: torch.device | None = None,
    seeds_samples: bool = False,
) -> AbstractContextManager[Feed]:
    """Return a context that opens the feed of a run.

    Args:
        workload: has the data and the collate function.
        sampler: the batches of the run.
        split: forms the micro-batches.
        workers: processes that fetch and collate; 0 to do so in the loop.
        gpu: copy the workers' micro-batches to pinned memory for this GPU; None not to copy.
        seeds_samples: seed samples one by one, as they are with workers and in a split by size, which changes
            the order in which they are read.
    """
    seeds_samples = seeds_samples or workers > 0 or isinstance(split, SizeSplit)
    if isinstance(sampler, StreamSampler):
        # The stream has its own workers, and no seeds.
        workload = replace(workload, train_data=sampler.view)
        if workers:
            sampler.view.read_with(
                num_workers=workers,
                prefetch_factor=AHEAD,
                worker_init_fn=workload.loading.init_worker,
                multiprocessing_context=start_method(),
            )
        workers, seeds_samples = 0, False
    return open_feed(
        workload,
        sampler.batches,
        seed=sampler.seed,
        workers=workers,
        sample_seeds=seeds_samples,
        gpu=gpu,
        split=split,
    )
