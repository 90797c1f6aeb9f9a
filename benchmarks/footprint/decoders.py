"""Models of published sizes. Nothing is downloaded, and no weight is created."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from autobatch import Loss, Workload
from benchmarks.workloads import Inputs, make


class Shape(NamedTuple):
    """The shape of a decoder."""

    layers: int
    width: int
    heads: int
    shared_heads: int
    """Heads of keys and values (grouped-query attention)."""
    hidden: int
    vocabulary: int = 32000
    experts: int = 1
    """Feed-forward networks of a layer; each token takes two of several."""
    positions: int = 0
    """Learned positions, with GPT-2's block; 0 for Llama's block (RMSNorm, a gated MLP, no biases)."""

    @property
    def is_llama(self) -> bool:
        """True for Llama's block."""
        return not self.positions


GPT2_SMALL = Shape(12, 768, 12, 12, 3072, vocabulary=50257, positions=1024)
"""124M parameters: Radford et al. 2019, table 2, with the head tied to the embedding."""
SHAPES = {
    "Llama 2 7B": Shape(32, 4096, 32, 32, 11008),
    "Llama 2 13B": Shape(40, 5120, 40, 40, 13824),
    "Llama 2 70B": Shape(80, 8192, 64, 8, 28672),
    "Mixtral 8x7B": Shape(32, 4096, 32, 8, 14336, experts=8),
}
"""Touvron et al. 2023 (arXiv 2307.09288) and Jiang et al. 2024 (arXiv 2401.04088)."""
MODELS = (*SHAPES, "ViT-H")


class Mlp(nn.Module):
    """An MLP: GELU between two layers, or a gated SiLU between three."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gated = shape.is_llama
        self.up = nn.Linear(shape.width, (1 + self.gated) * shape.hidden, bias=not self.gated)
        self.down = nn.Linear(shape.hidden, shape.width, bias=not self.gated)

    def forward(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.down(functional.gelu(self.up(x)))
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * value)


class Experts(nn.Module):
    """MLPs that take as many tokens each as a balanced router gives them: two per token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.experts = nn.ModuleList([Mlp(shape) for _ in range(shape.experts)])

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
    """A pre-norm block with causal attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        norm, bias = (nn.RMSNorm, False) if shape.is_llama else (nn.LayerNorm, True)
        self.heads, self.shared = shape.heads, shape.shared_heads
        size = shape.width // shape.heads
        self.before, self.between = norm(shape.width), norm(shape.width)
        self.q = nn.Linear(shape.width, shape.width, bias=bias)
        self.kv = nn.Linear(shape.width, 2 * size * shape.shared_heads, bias=bias)
        self.out = nn.Linear(shape.width, shape.width, bias=bias)
        self.mlp = Experts(shape) if shape.experts > 1 else Mlp(shape)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.before(x)
        q = self.q(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (
            part.unflatten(-1, (self.shared, -1)).transpose(1, 2) for part in self.kv(normed).chunk(2, dim=-1)
        )
        if self.shared < self.heads:
            k, v = (one.repeat_interleave(self.heads // self.shared, 1) for one in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))


class Decoder(nn.Module):
    """Embeddings, blocks and a head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.positions, shape.width) if shape.positions else None
        self.layers = nn.ModuleList([Layer(shape) for _ in range(shape.layers)])
        self.norm = (nn.RMSNorm if shape.is_llama else nn.LayerNorm)(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if not shape.is_llama:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
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


def tokens(length: int) -> Inputs:
    """Return sequences of tokens with their successors."""

    def sample(_: torch.Generator, index: int) -> tuple[Tensor, Tensor]:
        ids = torch.arange(index, index + length + 1) % 97
        return ids[:-1], ids[1:]

    return Inputs(sample, 512)


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    logits = model(batch[0])
    total = functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum")
    return Loss(total, batch[1].numel())


def large(name: str, length: int = 2048) -> Workload:
    """Return the workload of a model by its name, with samples of a length in tokens."""
    if name == "ViT-H":
        images = Inputs(lambda _, index: (torch.zeros(3, 224, 224), torch.tensor(index % 1000)))
        return make(name, model=Vision, train_data=images)
    return make(name, model=partial(Decoder, SHAPES[name]), train_data=tokens(length), loss=token_loss)


def gpt2_small() -> Workload:
    """Return GPT-2 small, for the command line."""
    data = tokens(GPT2_SMALL.positions)
    return make("gpt2", model=partial(Decoder, GPT2_SMALL), train_data=data, loss=token_loss)


def llama2_7b() -> Workload:
    """Return Llama 2 7B, for the command line."""
    return large("Llama 2 7B", 4096)
