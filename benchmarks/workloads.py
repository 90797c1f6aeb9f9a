"""Small models of many kinds, as workloads for the benchmarks of the probe and of the footprint."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from autobatch import Loss, Workload

VOCABULARY, SAMPLES = 101, 4096


class Few(Dataset):
    """A dataset that repeats a few samples in memory, because their creation is not measured."""

    def __init__(self, samples: list[Any], count: int = SAMPLES) -> None:
        self.samples, self.count = samples, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.samples[index % len(self.samples)]


def vectors(width: int, classes: int = 10) -> Few:
    return Few([(torch.randn(width), torch.tensor(number % classes)) for number in range(16)])


def images(side: int, classes: int = 10) -> Few:
    return Few([(torch.randn(3, side, side), torch.tensor(number % classes)) for number in range(16)])


def texts(*lengths: int, words: int = VOCABULARY, count: int = SAMPLES) -> Few:
    """Return texts of 16 words of these lengths in turn, each with the words that follow."""
    rows = [torch.randint(1, words, (length + 1,)) for length in lengths * -(-16 // len(lengths))]
    return Few([(row[:-1], row[1:]) for row in rows], count)


def pad(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    inputs, labels = zip(*samples, strict=True)
    return (
        nn.utils.rnn.pad_sequence(list(inputs), batch_first=True),
        nn.utils.rnn.pad_sequence(list(labels), batch_first=True, padding_value=-100),
    )


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def next_token(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    logits = model(batch[0])
    total = functional.cross_entropy(
        logits.flatten(0, 1), batch[1].flatten(), reduction="sum", ignore_index=-100
    )
    return Loss(total, (batch[1] != -100).sum())


def contrast(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    """Compare all pairs of the batch: memory grows with its square."""
    features = functional.normalize(model(batch[0]), dim=1)
    scores = features @ features.T / 0.1
    targets = torch.arange(len(scores), device=scores.device)
    return Loss(functional.cross_entropy(scores, targets, reduction="sum"), len(scores))


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = (
            part.view(b, t, self.heads, w // self.heads).transpose(1, 2)
            for part in self.attention(self.norms[0](x)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, w))
        return x + self.mlp(self.norms[1](x))


class Gpt(nn.Module):
    """A small decoder."""

    def __init__(
        self, width: int = 64, layers: int = 3, *, recompute: bool = False, vocabulary: int = VOCABULARY
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width, 4) for _ in range(layers)])
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.recompute = recompute

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


class Residual(nn.Module):
    """A residual block with batch statistics."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.body(x))


class UNet(nn.Module):
    """Two levels down and up, with skips."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 2 * channels, 3, padding=1)]
        )
        self.middle = nn.Conv2d(2 * channels, 2 * channels, 3, padding=1)
        self.up = nn.ModuleList(
            [nn.Conv2d(4 * channels, channels, 3, padding=1), nn.Conv2d(2 * channels, 3, 3, padding=1)]
        )

    def forward(self, x: Tensor) -> Tensor:
        first = functional.relu(self.down[0](x))
        second = functional.relu(self.down[1](functional.max_pool2d(first, 2)))
        x = functional.relu(self.middle(functional.max_pool2d(second, 2)))
        x = functional.relu(self.up[0](torch.cat([functional.interpolate(x, scale_factor=2), second], 1)))
        return self.up[1](torch.cat([functional.interpolate(x, scale_factor=2), first], 1))


class Lstm(nn.Module):
    """A recurrent language model."""

    def __init__(
        self, inner: int = 32, width: int = 64, layers: int = 1, *, vocabulary: int = VOCABULARY
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, inner)
        self.body = nn.LSTM(inner, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids))[0])


class Experts(nn.Module):
    """A soft mixture of experts."""

    def __init__(self, width: int = 32, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, 96), nn.ReLU(), nn.Linear(96, 10)) for _ in range(experts)]
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


def adamw(params, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=learning_rate)


def sgd(params, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=learning_rate, momentum=0.9)


def mlp(width: int, layers: int, inputs: int = 32) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        sizes = [inputs] + [width] * layers
        parts: list[nn.Module] = []
        for a, b in pairwise(sizes):
            parts += [nn.Linear(a, b), nn.ReLU()]
        return nn.Sequential(*parts, nn.Linear(width, 10))

    return make


def resnet(channels: int = 8, blocks: int = 2) -> nn.Module:
    body = [Residual(channels) for _ in range(blocks)]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    return nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), *body, *head)


def plain_conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 36, 10),
    )  # fmt: skip


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 32),
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        nn.Linear(32, VOCABULARY),
    )


def reconstruct(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.mse_loss(model(batch[0]), batch[0])


Make = Callable[..., Any]


def workload(model: Make, data: Make, loss: Make = classify, **fields: Any) -> Callable[[], Workload]:
    """Return what builds a new workload in every call, the same in each."""

    def make() -> Workload:
        torch.manual_seed(0)
        known = {"optimizer": adamw, "learning_rate": 1e-3, **fields}
        return Workload(model=model, train_data=data(), loss=loss, **known)

    return make


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "mlp": workload(mlp(64, 2), partial(vectors, 32)),
    "mlp-heavy": workload(mlp(256, 3), partial(vectors, 32)),
    "mlp-deep-sgd": workload(mlp(48, 12), partial(vectors, 32), optimizer=sgd),
    "conv": workload(plain_conv, partial(images, 12)),
    "resnet-bn": workload(resnet, partial(images, 8)),
    "u-net": workload(UNet, partial(images, 8), reconstruct),
    "gpt": workload(Gpt, partial(texts, 16), next_token),
    "gpt-checkpointed": workload(partial(Gpt, recompute=True), partial(texts, 16), next_token),
    "gpt-ragged": workload(
        Gpt,
        partial(texts, *range(4, 25), count=256),
        next_token,
        collate=pad,
        size_of=lambda row: len(row[0]),
    ),
    "encoder-dropout": workload(encoder, partial(texts, 12), next_token),
    "lstm": workload(Lstm, partial(texts, 8), next_token),
    "experts": workload(Experts, partial(vectors, 32)),
    "contrastive": workload(mlp(64, 2), partial(vectors, 32), contrast),
}
"""Thirteen kinds of models."""
