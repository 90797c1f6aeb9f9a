"""A masked autoencoder (He et al. 2021): the encoder sees a quarter of the patches, the rest is learnt.

python examples/mae.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import autobatch  # +

PATCHES, PIXELS, WIDTH, SEEN = 16, 48, 32, 4


def layers(count: int) -> nn.Module:
    """Build layers of a transformer."""
    form = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
    return nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, **form) for _ in range(count)))


class Mae(nn.Module):
    """An encoder of the patches that are seen, and a decoder of all."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.pixels = nn.Linear(PIXELS, WIDTH), nn.Linear(WIDTH, PIXELS)
        self.places = nn.Parameter(torch.randn(PATCHES, WIDTH) * 0.02)
        self.hidden = nn.Parameter(torch.zeros(WIDTH))
        self.encoder, self.decoder = layers(2), layers(1)

    def forward(self, patches: Tensor, order: Tensor) -> Tensor:
        """Return all patches from those that come first in the order."""
        seen = order[:, :SEEN, None].expand(-1, -1, WIDTH)
        codes = self.encoder((self.embedding(patches) + self.places).gather(1, seen))
        tokens = self.hidden.expand(len(patches), PATCHES, WIDTH).scatter(1, seen, codes)
        return self.pixels(self.decoder(tokens + self.places))


class Waves(Dataset[tuple[Tensor, Tensor]]):
    """Patches of crossed waves, and an order of them that is drawn at each visit."""

    def __init__(self, samples: int = 512) -> None:
        draw = torch.Generator().manual_seed(0)
        across, down = torch.rand(2, samples, 3, 1, 1, generator=draw)
        places = torch.arange(16.0)
        pictures = (across * places).sin() + (down * places[:, None]).cos()
        patches = pictures.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5)
        self.patches = patches.reshape(samples, PATCHES, PIXELS)

    def __len__(self) -> int:
        return len(self.patches)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.patches[index], torch.randperm(PATCHES)


def loss(model: nn.Module, batch: list[Tensor]) -> autobatch.Loss:  # +
    """Return the error of the hidden patches, each normalized by its own pixels, and their number."""
    patches, order = batch
    wanted = (patches - patches.mean(-1, keepdim=True)) / (patches.var(-1, keepdim=True) + 1e-6).sqrt()
    error = (model(patches, order) - wanted).square().mean(-1).gather(1, order[:, SEEN:])
    return autobatch.Loss(error.sum(), error.numel())  # +


def workload() -> autobatch.Workload:  # +
    """Return the model, the data and the loss."""
    return autobatch.Workload(  # +
        model=Mae,  # +
        train_data=Waves(),  # +
        loss=loss,  # +
        optimizer=lambda params, rate: torch.optim.AdamW(params, rate, betas=(0.9, 0.95)),  # +
        learning_rate=2e-3,  # +
    )  # +


if __name__ == "__main__":
    print(autobatch.fit(workload, target_batch=128, memory_budget="4MiB", steps=20, trials=0))  # +
