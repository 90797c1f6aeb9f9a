"""Time and memory of the order of the data, computed and as a list of the epoch.

    python -m benchmarks.order

The list is what autobatch held before version 2 of the order: a permutation by torch, turned into integers.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator

import torch

from autobatch.workload.order import GlobalBatchSampler
from benchmarks.report import save, surroundings

BATCH = 1024
BATCHES = 200
LARGEST_LIST = 10**7
"""A list of 10^9 integers takes about 36 GB."""


def computed(samples: int) -> Iterator[list[int]]:
    """Yield batches from the middle of an epoch on."""
    sampler = GlobalBatchSampler(samples=samples, target_batch=BATCH, seed=0, steps=10**12)
    return (batch.ids for batch in sampler.batches(samples // BATCH // 2))


def listed(samples: int) -> Iterator[list[int]]:
    """Yield the same number of samples from a list of the epoch."""
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(0)).tolist()
    for start in range(samples // 2, samples - BATCH, BATCH):
        yield order[start : start + BATCH]


def measure(draw: Callable[[int], Iterator[list[int]]], samples: int) -> dict[str, float]:
    """Measure the first batch, the memory of Python's objects, and the time of each further batch."""
    gc.collect()
    start = time.perf_counter()
    batches = draw(samples)
    next(batches)
    start_s = time.perf_counter() - start
    times_s = []
    for _ in range(BATCHES):
        start = time.perf_counter()
        next(batches)
        times_s.append(time.perf_counter() - start)
    del batches
    tracemalloc.start()
    next(draw(samples))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "start_ms": 1e3 * start_s,
        "peak_mib": peak_bytes / 2**20,
        "batch_ms_mean": 1e3 * statistics.fmean(times_s),
        "batch_ms_worst": 1e3 * max(times_s),
    }


def main() -> None:
    """Print the table and save it."""
    argparse.ArgumentParser(description=str(__doc__).splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    next(computed(BATCH * 4))
    rows = [
        {"order": name, "samples": samples, **measure(draw, samples)}
        for name, draw, sizes in (
            ("computed", computed, (10**7, 10**9)),
            ("list of the epoch", listed, (LARGEST_LIST,)),
        )
        for samples in sizes
    ]
    lines = [
        "| order | samples | first batch, ms | memory of Python, MiB | batch of 1024, ms: mean; worst |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['order']} | {row['samples']:,} | {row['start_ms']:.1f} | {row['peak_mib']:.1f} "
        f"| {row['batch_ms_mean']:.2f}; {row['batch_ms_worst']:.2f} |"
        for row in rows
    ]
    table = "\n".join(lines) + "\n"
    print(table)
    print(save("order", surroundings() | {"command": "python -m benchmarks.order", "rows": rows}, table))


if __name__ == "__main__":
    main()
