"""Models of the sizes that are shared among GPUs, with the shapes of published ones. No weight is created."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from autobatch import Workload
from benchmarks.footprint.decoders import Rows, token_loss

LENGTH = 2048
"""Tokens of a sample."""


class Shape(NamedTuple):
    """The shape of a Llama-like decoder."""

    layers: int
    width: int
    heads: int
    shared_heads: int
    """Heads of keys and values (grouped-query attention)."""
    hidden: int
    experts: int = 1
    """Feed-forward networks of a layer; each token takes two of several."""


SHAPES = {
    "Llama 2 7B": Shape(32, 4096, 32, 32, 11008),
    "Llama 2 13B": Shape(40, 5120, 40, 40, 13824),
    "Llama 2 70B": Shape(80, 8192, 64, 8, 28672),
    "Mixtral 8x7B": Shape(32, 4096, 32, 8, 14336, experts=8),
}
"""Touvron et al. 2023 (arXiv 2307.09288) and Jiang et al. 2024 (arXiv 2401.04088)."""


class Feed(nn.Module):
    """A gated feed-forward network."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Feed-forward networks that take as many tokens each as a balanced router gives them: two per token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.experts = nn.ModuleList([Feed(shape) for _ in range(shape.experts)])

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        share = 2 * len(tokens) // len(self.experts)
        weights, chosen = self.router(tokens).softmax(-1).t().topk(share)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            made = expert(tokens[chosen[number]]) * weights[number, :, None]
            out = out.index_add(0, chosen[number], made.to(out.dtype))
        return out.view_as(x)


class Layer(nn.Module):
    """A pre-norm block with grouped-query attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.shared = shape.heads, shape.shared_heads
        size = shape.width // shape.heads
        self.before, self.between = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.q = nn.Linear(shape.width, shape.width, bias=False)
        self.k = nn.Linear(shape.width, size * shape.shared_heads, bias=False)
        self.v = nn.Linear(shape.width, size * shape.shared_heads, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.feed = Experts(shape) if shape.experts > 1 else Feed(shape)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.before(x)
        q = self.q(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (part(normed).unflatten(-1, (self.shared, -1)).transpose(1, 2) for part in (self.k, self.v))
        if self.shared < self.heads:
            k, v = (one.repeat_interleave(self.heads // self.shared, 1) for one in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.feed(self.between(x))


class Decoder(nn.Module):
    """Embedding, blocks and a head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(32000, shape.width)
        self.layers = nn.ModuleList([Layer(shape) for _ in range(shape.layers)])
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, 32000, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Vision(nn.Module):
    """ViT-H/14: Dosovitskiy et al. 2021, table 1, on images of 224 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 1280, 14, stride=14)
        self.positions = nn.Parameter(torch.zeros(256, 1280))
        self.layers = nn.ModuleList(
            [
                nn.TransformerEncoderLayer(1280, 16, 5120, 0.0, "gelu", batch_first=True, norm_first=True)
                for _ in range(32)
            ]
        )
        self.norm = nn.LayerNorm(1280)
        self.head = nn.Linear(1280, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


class Images(Dataset):
    """Images with a class."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(3, 224, 224), index % 1000


def _workload(name: str, model: Callable[[], nn.Module], data: Dataset, loss: Callable) -> Workload:
    return Workload(
        name=name,
        model=model,
        train_data=data,
        loss=loss,
        optimizer=lambda params, learning_rate: torch.optim.AdamW(params, lr=learning_rate),
        learning_rate=3e-4,
    )


def _image_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def large(name: str) -> Workload:
    """Return the workload of a model by its name in the table."""
    if name == "ViT-H":
        return _workload(name, Vision, Images(), _image_loss)
    return _workload(name, lambda: Decoder(SHAPES[name]), Rows(LENGTH), token_loss)


MODELS = (*SHAPES, "ViT-H")
