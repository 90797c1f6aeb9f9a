"""A contrastive loss, in which every sample of the batch meets every other one, accumulated exactly.

python examples/clip.py
"""

from __future__ import annotations

import tempfile

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

import autobatch


class Clip(nn.Module):
    """Two towers, and a learnt temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 16))
        self.text = nn.Sequential(nn.Linear(24, 128), nn.ReLU(), nn.Linear(128, 16))
        self.scale = nn.Parameter(torch.tensor(2.0))


def represent(model: Clip, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return one row per sample of each tower."""
    return normalize(model.image(batch[0]), dim=1), normalize(model.text(batch[1]), dim=1)


def contrast(model: Clip, rows: tuple[Tensor, Tensor]) -> Tensor:
    """Return the symmetric InfoNCE loss over all rows of the batch."""
    logits = model.scale.exp() * rows[0] @ rows[1].T
    same = torch.arange(len(logits), device=logits.device)
    return (cross_entropy(logits, same) + cross_entropy(logits.T, same)) / 2


def main() -> None:
    """Train for 20 steps on pairs that share a hidden vector."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(512, 8, generator=draw)
    pairs = [hidden @ torch.randn(8, width, generator=draw) for width in (32, 24)]
    workload = autobatch.Workload(
        model=Clip,
        train_data=torch.utils.data.TensorDataset(*pairs),
        loss=autobatch.WholeBatchLoss(represent=represent, loss=contrast),
        optimizer=lambda parameters, learning_rate: torch.optim.AdamW(parameters, lr=learning_rate),
        learning_rate=3e-3,
    )
    with tempfile.TemporaryDirectory() as out:
        options = {"target_batch": 128, "memory_budget": "500KiB", "trials": 0}
        print(autobatch.fit(workload, steps=20, out=out, **options))


if __name__ == "__main__":
    main()
