"""Three models whose limits on a GPU are found by brute force."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from autobatch import Loss, Workload
from benchmarks.workloads import Block, adamw, classify, mlp

SAMPLES = 16384
TOKENS, LENGTH, WIDTH, LAYERS, HEADS = 50257, 512, 768, 12, 12


class Few(Dataset):
    """A dataset of any length that repeats a few samples, because their creation is not measured."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.samples[index % len(self.samples)]


class Gpt(nn.Module):
    """A decoder of 124 million parameters whose head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(LAYERS)), nn.LayerNorm(WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return functional.linear(self.blocks(x), self.embed.weight)


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions with batch statistics, around a shortcut."""

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * inner
        self.body = nn.Sequential(
            nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
            nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def resnet50() -> nn.Module:
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers: list[nn.Module] = [*stem, nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for inner, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            layers.append(Bottleneck(inputs, inner, stride if number == 0 else 1))
            inputs = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def next_token(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    logits = model(batch[0])
    total = functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum")
    return Loss(total, batch[1].numel())


def workload(name: str, model: Callable[[], nn.Module], samples: list[Any], loss: Any = classify) -> Workload:
    return Workload(
        name=name, model=model, train_data=Few(samples), loss=loss, optimizer=adamw, learning_rate=1e-4
    )


def gpt() -> Workload:
    ids = [torch.randint(TOKENS, (LENGTH + 1,)) for _ in range(16)]
    return workload("gpt-124m", Gpt, [(one[:-1], one[1:]) for one in ids], next_token)


def resnet() -> Workload:
    samples = [(torch.randn(3, 224, 224), torch.tensor(number)) for number in range(16)]
    return workload("resnet-50", resnet50, samples)


def wide() -> Workload:
    samples = [(torch.randn(4096), torch.tensor(number % 10)) for number in range(16)]
    return workload("mlp-wide", mlp(8192, 6, inputs=4096), samples)


MODELS = {"gpt-124m": gpt, "resnet-50": resnet, "mlp-wide": wide}
