"""Decoders of real sizes, to time an estimate: GPT-2 small and one of 7 billion parameters.

Nothing is downloaded. They have the shapes of the published models, and their weights are never created.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from autobatch import Loss, Workload


class Shape(NamedTuple):
    """The shape of a decoder."""

    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    length: int
    gated: bool
    """True for Llama's block (RMSNorm, a gated MLP, no biases), false for GPT-2's."""


GPT2_SMALL = Shape(12, 768, 12, 3072, 50257, 1024, gated=False)
"""124M parameters: Radford et al. 2019, table 2, with the head tied to the embedding."""
LLAMA2_7B = Shape(32, 4096, 32, 11008, 32000, 4096, gated=True)
"""6.7B parameters: Touvron et al. 2023 (arXiv 2307.09288)."""


class Mlp(nn.Module):
    """An MLP: GELU between two layers, or a gated SiLU between three."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gated = shape.gated
        self.up = nn.Linear(shape.width, (1 + shape.gated) * shape.hidden, bias=not shape.gated)
        self.down = nn.Linear(shape.hidden, shape.width, bias=not shape.gated)

    def forward(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.down(functional.gelu(self.up(x)))
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * value)


class Layer(nn.Module):
    """A pre-norm block with causal attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        norm = nn.RMSNorm if shape.gated else nn.LayerNorm
        self.heads = shape.heads
        self.before, self.between = norm(shape.width), norm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=not shape.gated)
        self.out = nn.Linear(shape.width, shape.width, bias=not shape.gated)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.before(x)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))


class Decoder(nn.Module):
    """Embeddings, blocks and a head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        norm = nn.RMSNorm if shape.gated else nn.LayerNorm
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = None if shape.gated else nn.Embedding(shape.length, shape.width)
        self.layers = nn.ModuleList([Layer(shape) for _ in range(shape.layers)])
        self.norm = norm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if not shape.gated:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Rows(Dataset):
    """Rows of token numbers."""

    def __init__(self, length: int, count: int = 512) -> None:
        self.length, self.count = length, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        ids = torch.arange(index, index + self.length + 1) % 97
        return ids[:-1], ids[1:]


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    logits = model(batch[0])
    total = functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum")
    return Loss(total, batch[1].numel())


def decoder(shape: Shape, name: str) -> Workload:
    """Return the workload of a decoder. An estimate builds its model on the meta device."""
    return Workload(
        name=name,
        model=lambda: Decoder(shape),
        train_data=Rows(shape.length),
        loss=token_loss,
        optimizer=lambda params, learning_rate: torch.optim.AdamW(params, lr=learning_rate),
        learning_rate=3e-4,
    )


def gpt2_small() -> Workload:
    """Return GPT-2 small, for the command line."""
    return decoder(GPT2_SMALL, "gpt2")


def llama2_7b() -> Workload:
    """Return Llama 2 7B, for the command line."""
    return decoder(LLAMA2_7B, "7b")
