"""CLIP (Radford et al. 2021): every picture of the batch meets every caption, accumulated exactly.

python examples/clip.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import TensorDataset

import autobatch  # +

WORDS, LENGTH, WIDTH = 24, 4, 32


class Clip(nn.Module):
    """A tower of pictures, a tower of captions, and a learnt scale."""

    def __init__(self) -> None:
        super().__init__()
        self.pictures = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.GELU(), nn.Conv2d(16, WIDTH, 3, 2, 1), nn.GELU(), nn.Flatten(),
            nn.Linear(16 * WIDTH, WIDTH),
        )  # fmt: skip
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.scale = nn.Parameter(torch.tensor(1 / 0.07).log())


def represent(model: Clip, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return a row for each picture and each caption."""
    pictures, captions = batch
    texts = model.layer(model.words(captions) + model.places).mean(1)
    return normalize(model.pictures(pictures), dim=1), normalize(texts, dim=1)


def contrast(model: Clip, rows: tuple[Tensor, Tensor]) -> Tensor:
    """Return the symmetric loss over all pairs of the batch; the scale is at most 100."""
    scores = model.scale.exp().clamp(max=100) * rows[0] @ rows[1].T
    same = torch.arange(len(scores), device=scores.device)
    return (cross_entropy(scores, same) + cross_entropy(scores.T, same)) / 2


def pairs(samples: int = 512) -> TensorDataset:
    """Draw squares of many colours, places and sizes; a caption has a word for each of these."""
    draw = torch.Generator().manual_seed(0)
    colours = torch.rand(6, 3, generator=draw)
    facts = torch.stack([torch.randint(6, (samples,), generator=draw) for _ in range(LENGTH)], 1)
    pictures = torch.randn(samples, 3, 16, 16, generator=draw) / 10
    for picture, (colour, top, left, size) in zip(pictures, facts.tolist(), strict=True):
        picture[:, top : top + 3 + size, left : left + 3 + size] += colours[colour][:, None, None]
    return TensorDataset(pictures, facts + torch.arange(LENGTH) * 6)


def workload() -> autobatch.Workload:  # +
    """Return the model, the data and the loss."""
    return autobatch.Workload(  # +
        model=Clip,  # +
        train_data=pairs(),  # +
        loss=autobatch.WholeBatchLoss(represent=represent, loss=contrast),  # +
        optimizer=torch.optim.AdamW,  # +
        learning_rate=2e-3,  # +
    )  # +


if __name__ == "__main__":
    print(autobatch.fit(workload, target_batch=128, memory_budget="2MiB", steps=20, trials=0))  # +
