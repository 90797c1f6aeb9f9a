"""Decoders of published sizes, for the command line. Nothing is downloaded, and no weight is created."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from autobatch import Loss, Workload
from benchmarks.workloads import Block, Inputs, make


class Layer(nn.Module):
    """Llama's block: RMSNorm, causal attention and a gated MLP, without biases."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attention(self.before(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, value = self.up(self.between(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * value)


class Decoder(nn.Module):
    """Embeddings, blocks in a list of their own, and a head; learned positions if a number is given."""

    def __init__(self, blocks: list[nn.Module], norm: nn.Module, words: int, positions: int = 0) -> None:
        super().__init__()
        width = norm.weight.numel()  # type: ignore[operator, union-attr]
        self.embed = nn.Embedding(words, width)
        self.positions = nn.Embedding(positions, width) if positions else None
        self.blocks, self.norm = nn.ModuleList(blocks), norm
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt2() -> nn.Module:
    made = Decoder([Block(768, 12) for _ in range(12)], nn.LayerNorm(768), 50257, 1024)
    made.head.weight = made.embed.weight
    return made


def llama() -> nn.Module:
    return Decoder([Layer(4096, 32, 11008) for _ in range(32)], nn.RMSNorm(4096), 32000)


def decoder(name: str, model: Callable[[], nn.Module], length: int) -> Workload:
    """Return the workload of a decoder on sequences of tokens of a length."""

    def sample(_: torch.Generator, index: int) -> tuple[Tensor, Tensor]:
        ids = torch.arange(index, index + length + 1) % 97
        return ids[:-1], ids[1:]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        logits = model(batch[0])
        total = functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum")
        return Loss(total, batch[1].numel())

    return make(name, model=model, train_data=Inputs(sample, 512), loss=loss)


def gpt2_small() -> Workload:
    """Return GPT-2 small, 124M parameters: Radford et al. 2019, table 2."""
    return decoder("gpt2", gpt2, 1024)


def llama2_7b() -> Workload:
    """Return Llama 2 7B: Touvron et al. 2023 (arXiv 2307.09288)."""
    return decoder("llama2-7b", llama, 4096)
