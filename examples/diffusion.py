"""Denoising diffusion (Ho et al. 2020): a U-Net learns the noise that was added to rings.

python examples/diffusion.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, silu
from torch.utils.data import Dataset

import autobatch  # +

STEPS = 100


class UNet(nn.Module):
    """A U-Net of two levels, which knows the step by a code of waves."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.register_buffer("kept", (1 - torch.linspace(1e-4, 0.05, STEPS)).cumprod(0))
        self.register_buffer("waves", 1e-3 ** torch.linspace(0, 1, width // 2))
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.enter = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 4, 2, 1)
        self.middle = self.convolution(48)
        self.up = nn.ConvTranspose2d(2 * width, width, 4, 2, 1)
        self.leave = self.convolution(1)

    def convolution(self, outputs: int) -> nn.Module:
        """Build a normalized convolution of all channels."""
        return nn.Sequential(nn.GroupNorm(4, 48), nn.SiLU(), nn.Conv2d(48, outputs, 3, padding=1))

    def forward(self, noisy: Tensor, step: Tensor) -> Tensor:
        """Return the noise in the pictures."""
        phase = step[:, None] * self.waves
        code = self.time(torch.cat([phase.sin(), phase.cos()], 1))[..., None, None]
        high = self.enter(noisy) + code
        low = self.down(silu(high))
        return self.leave(torch.cat([high, self.up(low + self.middle(low))], 1))


class Rings(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Rings of many sizes; each visit draws a step and the noise of that sample."""

    def __init__(self, samples: int = 512) -> None:
        middle, radius = torch.rand(2, samples, 1, 1, generator=torch.Generator().manual_seed(0))
        places = torch.linspace(-1, 1, 16)
        away = (places[:, None] ** 2 + (places - middle / 2) ** 2).sqrt()
        self.pictures = 2 * (-(((away - 0.3 - radius / 2) * 6) ** 2)).exp()[:, None] - 1

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.pictures[index], torch.randint(STEPS, ()), torch.randn(1, 16, 16)


def loss(model: UNet, batch: list[Tensor]) -> Tensor:
    """Return the mean squared error of the noise."""
    pictures, step, noise = batch
    kept = model.kept[step][:, None, None, None]
    return mse_loss(model(kept.sqrt() * pictures + (1 - kept).sqrt() * noise, step), noise)


def workload() -> autobatch.Workload:  # +
    """Return the model, the data and the loss."""
    parts = {"model": UNet, "train_data": Rings(), "loss": loss, "optimizer": torch.optim.Adam}  # +
    return autobatch.Workload(**parts, learning_rate=2e-3)  # +


if __name__ == "__main__":
    print(autobatch.fit(workload, target_batch=128, memory_budget="12MiB", steps=20, trials=0, ema=0.99))  # +
