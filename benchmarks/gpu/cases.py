"""Workloads that are large enough for a GPU: their micro-batches reach tens of GiB."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autobatch import Workload
from autobatch.core.knobs import CHECKPOINTING
from benchmarks.footprint.decoders import GPT2_SMALL, Decoder, Shape, token_loss
from benchmarks.workloads import (
    VOCABULARY,
    Experts,
    Residual,
    adamw,
    classify,
    contrast,
    mlp,
    next_token,
    sgd,
)

SAMPLES = 1 << 17
"""More samples than any GPU can hold; they are created, not read."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A workload, and a function that creates a batch at once."""

    workload: Workload
    batch_of: Callable[[int], tuple[Tensor, Tensor]]
    knobs: dict[str, str]


class Made:
    """A stand-in for the worst-case samples: all cost the same, and a batch is created whole."""

    def __init__(self, batch_of: Callable[[int], Any]) -> None:
        self.batch = batch_of
        self.notes: list[str] = []


def tokens(size: int, *, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    ids = (torch.arange(length + 1) % vocabulary).expand(size, -1)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def vectors(size: int, *, width: int) -> tuple[Tensor, Tensor]:
    return torch.linspace(-1, 1, width).expand(size, -1).contiguous(), torch.arange(size) % 10


def images(size: int, *, side: int) -> tuple[Tensor, Tensor]:
    row = torch.linspace(-1, 1, side)
    return row.expand(size, 3, side, -1).contiguous(), torch.arange(size) % 10


def residual_net(channels: int, blocks: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        *(Residual(channels) for _ in range(blocks)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, 10),
    )


class Segmenter(nn.Module):
    """A U-Net of three levels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        widths = [channels, 2 * channels, 4 * channels]
        self.down = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1) for a, b in zip([3, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(
            nn.Conv2d(b + a, a, 3, padding=1) for a, b in zip(widths[-2::-1], widths[:0:-1], strict=True)
        )
        self.head = nn.Conv2d(channels, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = nn.functional.relu(layer(x))
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = nn.functional.interpolate(x, scale_factor=2)
        for layer, skip in zip(self.up, skips[-2::-1], strict=True):
            x = nn.functional.interpolate(x, scale_factor=2)
            x = nn.functional.relu(layer(torch.cat([x, skip], 1)))
        return self.head(x)


def encoder(width: int, layers: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.1, batch_first=True)
    body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(VOCABULARY, width), body, nn.Linear(width, VOCABULARY))


class Recurrent(nn.Module):
    """A two-layer LSTM over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 256)
        self.body = nn.LSTM(256, 512, num_layers=2, batch_first=True)
        self.head = nn.Linear(512, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids))[0])


def reconstruct(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[0])


def pairs(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
    # Its targets are created on the default device, which must be that of the batch.
    with torch.device(batch[0].device):
        return contrast(model, batch)


SMALL_GPT = Shape(8, 512, 8, 2048, 8192, 512, gated=False)
SMALL_LLAMA = Shape(8, 1024, 16, 2816, 32000, 1024, gated=True)


def case(name: str, model: Callable[[], nn.Module], batch_of: Callable[[int], Any], **fields: Any) -> Case:
    knobs = fields.pop("knobs", {})
    workload = Workload(
        name=name,
        model=model,
        train_data=range(SAMPLES),
        learning_rate=1e-4,
        **({"loss": classify, "optimizer": adamw} | fields),
    )
    return Case(workload=workload, batch_of=batch_of, knobs=knobs)


def decoder(name: str, shape: Shape, **fields: Any) -> Case:
    batch_of = partial(tokens, length=shape.length, vocabulary=shape.vocabulary)
    return case(name, partial(Decoder, shape), batch_of, loss=token_loss, **fields)


_words = partial(tokens, length=256, vocabulary=VOCABULARY)
CASES: dict[str, Callable[[], Case]] = {
    "mlp": lambda: case("mlp", mlp(4096, 8, 1024), partial(vectors, width=1024)),
    "mlp-sgd": lambda: case("mlp-sgd", mlp(8192, 4, 1024), partial(vectors, width=1024), optimizer=sgd),
    "residual": lambda: case("residual", partial(residual_net, 64, 8), partial(images, side=64)),
    "u-net": lambda: case("u-net", partial(Segmenter, 32), partial(images, side=128), loss=reconstruct),
    "gpt": lambda: decoder("gpt", SMALL_GPT),
    "gpt-checkpointed": lambda: decoder("gpt-checkpointed", SMALL_GPT, knobs={CHECKPOINTING: "full"}),
    "gpt2-small": lambda: decoder("gpt2-small", GPT2_SMALL),
    "llama-small": lambda: decoder("llama-small", SMALL_LLAMA),
    "encoder-dropout": lambda: case("encoder-dropout", partial(encoder, 512, 6), _words, loss=next_token),
    "lstm": lambda: case("lstm", Recurrent, _words, loss=next_token),
    "experts": lambda: case("experts", partial(Experts, 1024, 16), partial(vectors, width=1024)),
    "contrastive": lambda: case("contrastive", mlp(2048, 4, 512), partial(vectors, width=512), loss=pairs),
}
"""Twelve kinds of models; every call builds a new case."""
