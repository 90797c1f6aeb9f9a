"""Small models of many kinds, as workloads for the benchmarks of the probe and of the footprint."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from autobatch import Loss, Workload

VOCABULARY = 101


class Inputs(Dataset):
    """A dataset of any length; each sample depends on its index alone."""

    def __init__(
        self, make: Callable[[torch.Generator, int], tuple[Tensor, Tensor]], count: int = 4096
    ) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.make(torch.Generator().manual_seed(index), index)


class InMemory(Dataset):
    """Samples of a dataset, or the first of them, in memory, because their creation is not measured."""

    def __init__(self, data: Any, count: int | None = None) -> None:
        self.samples = [data[index] for index in range(min(count or len(data), len(data)))]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def vectors(width: int, classes: int = 10) -> Inputs:
    return Inputs(lambda g, _: (torch.randn(width, generator=g), torch.randint(classes, (), generator=g)))


def images(channels: int, size: int, classes: int = 10) -> Inputs:
    return Inputs(
        lambda g, _: (torch.randn(channels, size, size, generator=g), torch.randint(classes, (), generator=g))
    )


def tokens(length: int) -> Inputs:
    def make(g: torch.Generator, _: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(VOCABULARY, (length + 1,), generator=g)
        return ids[:-1], ids[1:]

    return Inputs(make)


def ragged(longest: int) -> Inputs:
    """Return token sequences of different lengths; few are as long as the longest."""

    def make(g: torch.Generator, index: int) -> tuple[Tensor, Tensor]:
        length = 4 + (index * 7919) % (longest - 4 + 1)
        ids = torch.randint(1, VOCABULARY, (length + 1,), generator=g)
        return ids[:-1], ids[1:]

    return Inputs(make, count=256)


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

    def __init__(self, width: int = 64, *, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 32)
        self.body = nn.LSTM(32, width, batch_first=True)
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


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        Residual(8),
        Residual(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )


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


def make(name: str, **fields) -> Workload:
    return Workload(name=name, learning_rate=1e-3, **({"loss": classify, "optimizer": adamw} | fields))


def reconstruct(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.mse_loss(model(batch[0]), batch[0])


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "mlp": lambda: make("mlp", model=mlp(64, 2), train_data=vectors(32)),
    "mlp-heavy": lambda: make("mlp-heavy", model=mlp(256, 3), train_data=vectors(32)),
    "mlp-deep-sgd": lambda: make("mlp-deep-sgd", model=mlp(48, 12), train_data=vectors(32), optimizer=sgd),
    "conv": lambda: make("conv", model=plain_conv, train_data=images(3, 12)),
    "resnet-bn": lambda: make("resnet-bn", model=resnet, train_data=images(3, 8)),
    "u-net": lambda: make("u-net", model=UNet, train_data=images(3, 8), loss=reconstruct),
    "gpt": lambda: make("gpt", model=Gpt, train_data=tokens(16), loss=next_token),
    "gpt-checkpointed": lambda: make(
        "gpt-checkpointed", model=lambda: Gpt(recompute=True), train_data=tokens(16), loss=next_token
    ),
    "gpt-ragged": lambda: make(
        "gpt-ragged",
        model=Gpt,
        train_data=ragged(24),
        collate=pad,
        loss=next_token,
        size_of=lambda s: len(s[0]),
    ),
    "encoder-dropout": lambda: make("encoder-dropout", model=encoder, train_data=tokens(12), loss=next_token),
    "lstm": lambda: make("lstm", model=Lstm, train_data=tokens(8), loss=next_token),
    "experts": lambda: make("experts", model=Experts, train_data=vectors(32)),
    "contrastive": lambda: make("contrastive", model=mlp(64, 2), train_data=vectors(32), loss=contrast),
}
"""Thirteen kinds of models; every call builds a new workload."""
