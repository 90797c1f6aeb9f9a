"""Models of torch: packed sequences, sparse gradients, a GAN; and eleven optimizers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from autobatch import Workload
from benchmarks.clients.data import IDS, IMAGES, LABELS, LENGTH, WORDS, classes_loss, workload


class PackedLstm(nn.Module):
    """A classifier of packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32)
        self.lstm = nn.LSTM(32, 48, batch_first=True)
        self.head = nn.Linear(48, 10)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of ten classes; the lengths follow from the first word."""
        lengths = (ids[:, 0] % LENGTH).clamp(min=1).cpu()
        packed = pack_padded_sequence(self.embedding(ids), lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.lstm(packed)[1][0][-1])


class SparseWords(nn.Module):
    """A classifier whose embedding has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(20_000, 32, sparse=True)
        self.head = nn.Linear(32, 10)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of ten classes."""
        return self.head(self.embedding(ids * 97 % 20_000))


def _network() -> nn.Module:
    layers = [nn.Linear(3072, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, 10))


def _trained_by(name: str, optimizer: Callable[..., Any], **settings: Any) -> Workload:
    def build(parameters: Any, learning_rate: float) -> Any:
        return optimizer(parameters, lr=learning_rate, **settings)

    return workload(f"MLP, {name}", _network, [IMAGES, LABELS], classes_loss, build)


def _schedulefree() -> Workload:
    import schedulefree

    return _trained_by("schedule-free AdamW", schedulefree.AdamWScheduleFree)


def _sgd(parameters: Any, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=learning_rate)


OPTIMIZERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {}),
    "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "Adam": (torch.optim.Adam, {}),
    "AdamW": (torch.optim.AdamW, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
}
WORKLOADS: dict[str, Callable[[], Workload]] = {
    "packed LSTM": lambda: workload("packed LSTM", PackedLstm, [IDS, LABELS], classes_loss),
    "sparse embedding": lambda: workload("sparse embedding", SparseWords, [IDS, LABELS], classes_loss, _sgd),
    **{
        f"MLP, {name}": partial(_trained_by, name, made, **settings)
        for name, (made, settings) in OPTIMIZERS.items()
    },
    "MLP, schedule-free AdamW": _schedulefree,
}
