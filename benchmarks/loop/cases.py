"""The workloads of the loop benchmark: models, and micro-batches joined from samples or made before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

ACCUMULATION = 4
Precision = Literal["fp32", "bf16"]
Source = Literal["made", "joined"]


class Transformer(nn.Module):
    """Four layers of width 256 over 128 positions."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
        self.embed = nn.Embedding(256, 256)
        self.body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 256)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids)))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())


@dataclass(frozen=True)
class Made:
    """Micro-batches that were made before: a sample is its index, and collating picks a whole micro-batch."""

    micro_batches: list[Any]
    size: int

    def __len__(self) -> int:
        return len(self.micro_batches) * self.size

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices

    def collate(self, indices: list[int]) -> Any:
        return self.micro_batches[indices[0] // self.size]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its samples, and the work of a segment."""

    model: Callable[[], nn.Module]
    data: TensorDataset
    micro_batch: int
    steps: int
    """Optimizer steps of each segment."""
    fewer: int
    """Divides the number of segments."""

    def made(self) -> Made:
        """Return the samples as micro-batches that were made before."""
        loader = DataLoader(self.data, batch_size=self.micro_batch, drop_last=True)
        return Made(list(loader), self.micro_batch)

    def stream(self, source: Source) -> Iterator[Any]:
        """Yield micro-batches without end, as loops written by hand do."""
        if source == "made":
            batches: Any = self.made().micro_batches
        else:
            batches = DataLoader(
                self.data, batch_size=self.micro_batch, sampler=RandomSampler(self.data), drop_last=True
            )
        while True:
            yield from batches


CASES = {
    "mlp": Case(
        model=perceptron,
        data=TensorDataset(torch.randn(8192, 64), torch.randint(10, (8192,))),
        micro_batch=32,
        steps=20,
        fewer=1,
    ),
    "transformer": Case(
        model=Transformer,
        data=TensorDataset(torch.randint(256, (512, 128)), torch.randint(256, (512, 128))),
        micro_batch=4,
        steps=1,
        fewer=10,
    ),
}


def context(precision: Precision) -> AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=torch.bfloat16) if precision == "bf16" else nullcontext()
