"""Training on a stream that never ends: planned from its first samples, exact batches, a resume.

python examples/streaming.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import torch
from torch import Tensor
from train import build_model, loss, optimizer

import autobatch


def records() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield points without end; the sign of their sum is the label."""
    draw = torch.Generator().manual_seed(0)
    while True:
        point = torch.randn(16, generator=draw)
        yield point, (point.sum() > 0).long()


def workload() -> autobatch.Workload:
    """Return the model, the stream and the loss."""
    return autobatch.Workload(
        model=build_model, train_data=records, loss=loss, optimizer=optimizer, learning_rate=3e-3
    )


def main() -> None:
    """Train for 20 steps, then resume up to step 30."""
    with tempfile.TemporaryDirectory() as out:
        options = {"target_batch": 256, "memory_budget": "300KiB", "device": "cpu", "trials": 0}
        for steps, resume in ((20, False), (30, True)):
            result = autobatch.fit(workload(), steps=steps, resume=resume, out=out, **options)
            print(f"{result.training.samples:,} samples, loss {result.training.final_loss:.4f}")


if __name__ == "__main__":
    main()
