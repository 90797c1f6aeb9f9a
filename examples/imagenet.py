"""ImageNet: a ResNet (He et al. 2015) with label smoothing, momentum and a cosine schedule.

python examples/imagenet.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu
from torch.utils.data import Dataset

import autobatch  # +


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.body = nn.Sequential(first, norm(outputs), nn.ReLU(), second, norm(outputs))
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, pictures: Tensor) -> Tensor:
        """Return the features of the next stage."""
        return relu(self.body(pictures) + self.shortcut(pictures))


def build_model(norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Module:
    """Build three stages. BatchNorm is what the paper has; GroupNorm is exact in micro-batches."""
    stem = nn.Conv2d(3, 16, 3, padding=1, bias=False), norm(16), nn.ReLU()
    stages = Block(16, 16, 1, norm), Block(16, 32, 2, norm), Block(32, 64, 2, norm)
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Gratings(Dataset[tuple[Tensor, Tensor]]):
    """Gratings of ten directions and many colours under noise; a crop is drawn at each visit."""

    def __init__(self, samples: int = 512, size: int = 20) -> None:
        draw = torch.Generator().manual_seed(0)
        self.labels = torch.randint(10, (samples,), generator=draw)
        angle = (self.labels * torch.pi / 10)[:, None, None]
        places = torch.arange(float(size))
        waves = (angle.cos() * places[:, None] + angle.sin() * places).sin()[:, None]
        colours = torch.rand(samples, 3, 1, 1, generator=draw)
        self.pictures = waves * colours + torch.randn(samples, 3, size, size, generator=draw) / 2

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        top, left = torch.randint(5, (2,)).tolist()
        return self.pictures[index, :, top : top + 16, left : left + 16], self.labels[index]


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the mean over the pictures."""
    return cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


def workload() -> autobatch.Workload:  # +
    """Return the model, the data and the loss."""
    return autobatch.Workload(  # +
        model=build_model,  # +
        train_data=Gratings(),  # +
        loss=loss,  # +
        optimizer=lambda params, rate: torch.optim.SGD(params, rate, momentum=0.9, weight_decay=1e-4),  # +
        schedule=torch.optim.lr_scheduler.CosineAnnealingLR,  # +
        learning_rate=0.1,  # +
    )  # +


if __name__ == "__main__":
    print(autobatch.fit(workload, target_batch=128, memory_budget="16MiB", steps=20, trials=0))  # +
