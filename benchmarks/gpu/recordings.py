"""Recordings of a GPU's allocator: stored for the tests, and replayed in the model of the allocator."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.device import GPU, empty, room
from benchmarks.gpu.limits import train_within
from benchmarks.plain_loop import STEPS
from benchmarks.published.recordings import replays_of, rows_of

SIZES = (4, 8, 16)
"""Micro-batches: a third follows from two."""
MOST_ENTRIES = 300_000


def record(name: str, out: Path) -> dict[str, Any]:
    """Store the allocator's events of a plain loop at three sizes, and compare the model with them.

    Args:
        name: of a case.
        out: folder of the files, in the form of `tests/recordings`.
    """
    replays = []
    for size in SIZES:
        empty()
        torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=MOST_ENTRIES)
        try:
            train_within(name, room() >> 20, size, STEPS[0])
            torch.cuda.synchronize(GPU)
            rows = next(rows_of(torch.cuda.memory._snapshot(GPU.index)))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        content = "".join(",".join(map(str, row)) + "\n" for row in rows)
        (out / f"{name}-{size}.csv.gz").write_bytes(gzip.compress(content.encode(), mtime=0))
        (replay,) = replays_of([rows])
        replays.append({"micro_batch": size, **replay._asdict()})
    return {"replays": replays}
