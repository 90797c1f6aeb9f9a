"""A GAN: two optimizers, and a loss in two parts, each of which reaches its own parameters only.

python examples/gan.py
"""

from __future__ import annotations

import tempfile

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import autobatch


class Gan(nn.Module):
    """A generator of points, and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))


def loss(model: Gan, batch: list[Tensor]) -> Tensor:
    """Return the sum of both losses, as means over the samples."""
    real, noise = batch
    fake = model.generator(noise)
    frozen = {name: parameter.detach() for name, parameter in model.discriminator.named_parameters()}
    fooled = functional_call(model.discriminator, frozen, (fake,))
    judged_real, judged_fake = model.discriminator(real), model.discriminator(fake.detach())
    yes, no = torch.ones_like(fooled), torch.zeros_like(fooled)
    return bce(fooled, yes) + bce(judged_real, yes) + bce(judged_fake, no)


def optimizers(model: Gan, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Build an optimizer for each part. The name ``model`` asks for the model itself."""
    return [torch.optim.Adam(part.parameters(), lr=learning_rate) for part in model.children()]


def main() -> None:
    """Train for 20 steps on points of a circle."""
    angles = torch.rand(1024, generator=torch.Generator().manual_seed(0)) * 6.28
    data = torch.utils.data.TensorDataset(torch.stack([angles.cos(), angles.sin()], 1), torch.randn(1024, 8))
    workload = autobatch.Workload(
        model=Gan, train_data=data, loss=loss, optimizer=optimizers, learning_rate=1e-3
    )
    with tempfile.TemporaryDirectory() as out:
        options = {"target_batch": 256, "memory_budget": "400KiB", "trials": 0}
        print(autobatch.fit(workload, steps=20, out=out, **options))


if __name__ == "__main__":
    main()
