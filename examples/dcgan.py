"""DCGAN (Radford et al. 2015) in its usual order: the discriminator steps, then the generator.

python examples/dcgan.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import autobatch  # +


class Gan(nn.Module):
    """A generator and a discriminator of pictures, with GroupNorm in place of BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.ConvTranspose2d(16, 32, 4), nn.GroupNorm(4, 32), nn.ReLU()
        second = nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.GroupNorm(4, 16), nn.ReLU()
        self.generator = nn.Sequential(*first, *second, nn.ConvTranspose2d(16, 1, 4, 2, 1), nn.Tanh())
        judge = nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 4, 2, 1), nn.LeakyReLU(0.2)
        self.discriminator = nn.Sequential(*judge, nn.Conv2d(32, 1, 4), nn.Flatten(0))


class Waves:
    """Waves, each with noise for the generator that is drawn at each visit."""

    def __init__(self, samples: int = 512) -> None:
        tilt, phase = torch.rand(2, samples, 1, 1, generator=torch.Generator().manual_seed(0))
        across = torch.arange(16.0)
        self.pictures = (across * tilt + across[:, None] * (1 - tilt) + 6 * phase).sin()[:, None]

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> list[Tensor]:
        return [self.pictures[index], torch.randn(16, 1, 1)]


def judge(model: Gan, batch: list[Tensor]) -> Tensor:
    """Return the loss of the discriminator."""
    real, fake = model.discriminator(batch[0]), model.discriminator(model.generator(batch[1]).detach())
    return bce(real, torch.ones_like(real)) + bce(fake, torch.zeros_like(fake))


def fool(model: Gan, batch: list[Tensor]) -> Tensor:
    """Return the loss of the generator."""
    fooled = model.discriminator(model.generator(batch[1]))
    return bce(fooled, torch.ones_like(fooled))


def optimizers(model: Gan, rate: float) -> list[torch.optim.Optimizer]:
    """Build an optimizer for each part, in the order of their steps."""
    parts = model.discriminator, model.generator
    return [torch.optim.Adam(part.parameters(), rate, (0.5, 0.999)) for part in parts]


def train(model: Gan, of_both: Any) -> None:
    """Take a step of each optimizer on the samples of each batch."""
    for pair in zip(*of_both, strict=True):
        for loss, batch in zip((judge, fool), pair, strict=True):
            for micro in batch:  # +
                batch.backward(loss(model, micro.data))  # +
            print(f"step {batch.index}, {loss.__name__}: {batch.step().loss:.4f}")  # +


def workload() -> autobatch.Workload:  # +
    """Return what a plan needs: both networks, both optimizers, and the sum of their losses."""
    parts = {"model": Gan, "train_data": Waves(), "optimizer": optimizers, "learning_rate": 2e-3}  # +
    return autobatch.Workload(**parts, loss=lambda *given: judge(*given) + fool(*given))  # +


if __name__ == "__main__":
    print(plan := autobatch.plan(workload, target_batch=128, memory_budget="4MiB"))  # +
    both = optimizers(model := Gan(), plan.learning_rate)
    train(model, [autobatch.batches(workload, plan, steps=10, optimizer=one) for one in both])  # +
