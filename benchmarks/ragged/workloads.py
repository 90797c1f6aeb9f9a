"""Ragged workloads: four models on four distributions of lengths."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from autobatch import Loss, Workload
from benchmarks.workloads import Gpt, Lstm, adamw, next_token, pad

VOCABULARY = 512
LENGTHS: dict[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    "uniform": lambda draw, count, longest: draw.uniform(1, longest + 1, count),
    "log-normal": lambda draw, count, longest: longest * np.exp(draw.normal(-1.8, 0.8, count)),
    "sft": lambda draw, count, longest: np.where(
        draw.random(count) < 0.9,
        longest * np.exp(draw.normal(-2.2, 0.6, count)),
        draw.uniform(longest / 2, longest + 1, count),
    ),
    "two-peaked": lambda draw, count, longest: np.where(
        draw.random(count) < 0.6,
        draw.normal(longest / 5, longest / 20, count),
        draw.normal(0.8 * longest, longest / 20, count),
    ),
    "equal": lambda draw, count, longest: np.full(count, longest),
}
"""Distributions of lengths from 1 to a longest: name to a function of (generator, samples, longest)."""


def lengths_of(name: str, count: int, longest: int, seed: int = 0) -> np.ndarray:
    """Draw lengths; the longest occurs at least once."""
    found = LENGTHS[name](np.random.default_rng(seed), count, longest).astype(int).clip(2, longest)
    found[count // 2] = longest
    return found


class Tokens:
    """Sequences of random tokens with given lengths, and the next token at each position."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths
        self.samples = [self.make(index) for index in range(len(lengths))]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.samples[index]

    def make(self, index: int) -> tuple[Tensor, Tensor]:
        """Draw a sample."""
        draw = torch.Generator().manual_seed(index)
        ids = torch.randint(1, VOCABULARY, (int(self.lengths[index]) + 1,), generator=draw)
        return ids[:-1], ids[1:]


class Rings(Tokens):
    """Graphs: rings with features and labels per node."""

    def make(self, index: int) -> tuple[Tensor, Tensor]:
        """Draw a graph."""
        draw = torch.Generator().manual_seed(index)
        nodes = int(self.lengths[index])
        return torch.randn(nodes, 16, generator=draw), torch.randint(4, (nodes,), generator=draw)


def join(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Put graphs side by side, with the neighbour of each node in its ring: nothing is padded."""
    features, labels = zip(*samples, strict=True)
    neighbours, first = [], 0
    for one in features:
        neighbours.append(first + (torch.arange(len(one)) + 1) % len(one))
        first += len(one)
    return torch.cat(features), torch.cat(labels), torch.cat(neighbours)


def node_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Loss:
    """Sum over the nodes."""
    features, labels, neighbours = batch
    return Loss(functional.cross_entropy(model(features, neighbours), labels, reduction="sum"), len(labels))


class OverTime(nn.Module):
    """Causal convolutions over time."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.body = nn.ModuleList([nn.Conv1d(width, width, 3) for _ in range(3)])
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).transpose(1, 2)
        for layer in self.body:
            x = x + functional.gelu(layer(functional.pad(x, (2, 0))))
        return self.head(x.transpose(1, 2))


class Rounds(nn.Module):
    """Message passing over rings."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.enter = nn.Linear(16, width)
        self.rounds = nn.ModuleList([nn.Linear(2 * width, width) for _ in range(3)])
        self.leave = nn.Linear(width, 4)

    def forward(self, x: Tensor, neighbours: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.rounds:
            x = x + functional.gelu(layer(torch.cat([x, x[neighbours]], 1)))
        return self.leave(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformer": lambda: Gpt(32, 1, vocabulary=VOCABULARY),
    "lstm": lambda: Lstm(48, vocabulary=VOCABULARY),
    "convolution": OverTime,
    "graph": Rounds,
}
PAIRS = [
    *(("transformer", name) for name in ("uniform", "log-normal", "sft", "two-peaked")),
    *(("lstm", name) for name in ("uniform", "log-normal", "sft")),
    *(("convolution", name) for name in ("uniform", "sft", "two-peaked")),
    *(("graph", name) for name in ("uniform", "log-normal")),
]
"""The 12 workloads of the promise."""


def workload(model: str, lengths: str, *, count: int = 512, longest: int = 60) -> Workload:
    """Make one of the workloads."""
    is_graph = model == "graph"
    drawn = lengths_of(lengths, count, 2 * longest if is_graph else longest)
    return Workload(
        name=f"{model}-{lengths}",
        model=MODELS[model],
        train_data=Rings(drawn) if is_graph else Tokens(drawn),
        collate=join if is_graph else pad,
        loss=node_loss if is_graph else next_token,
        optimizer=adamw,
        learning_rate=1e-3,
        size_of=lambda sample: len(sample[0]),
    )
