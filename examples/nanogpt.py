"""A small GPT (Radford et al. 2019) on letters of a generated text, as nanoGPT trains it.

python examples/nanogpt.py
"""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import autobatch  # +

LETTERS, LENGTH, WIDTH, HEADS = 128, 32, 48, 4
PARTS = "the a one", "red big old odd", "fox dog cat hen", "sees eats likes", "him. her. it. me."
DRAW = Random(0)
TEXT = " ".join(DRAW.choice(words.split()) for _ in range(400) for words in PARTS)
DATA = torch.tensor([ord(letter) for letter in TEXT])


class Block(nn.Module):
    """Attention to what came before, and two layers for each letter."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, bias=False) for _ in range(2))
        self.attention, self.joined = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of the next layer."""
        parts = self.attention(self.norms[0](x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        heads = scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.joined(heads.transpose(1, 2).flatten(2))
        return x + self.narrow(gelu(self.wide(self.norms[1](x))))


class Gpt(nn.Module):
    """Blocks between an embedding and the head, which share their weights."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.body = nn.Sequential(*(Block() for _ in range(layers)), nn.LayerNorm(WIDTH, bias=False))
        nn.init.normal_(self.letters.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the scores of the next letter at each place."""
        return self.body(self.letters(ids) + self.places.weight[: ids.shape[1]]) @ self.letters.weight.T


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the mean over the letters, of which every sample has as many."""
    return cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def optimizer(named_parameters: list[tuple[str, nn.Parameter]], rate: float) -> torch.optim.Optimizer:
    """Build AdamW, which shrinks matrices only."""
    groups = [[p for _, p in named_parameters if (p.dim() > 1) is matrices] for matrices in (True, False)]
    decays = [{"params": ps, "weight_decay": d} for ps, d in zip(groups, (0.1, 0.0), strict=True)]
    return torch.optim.AdamW(decays, rate, betas=(0.9, 0.95))


def workload() -> autobatch.Workload:  # +
    """Return the model, the windows that begin at each letter of the text, and the loss."""
    parts = {"model": Gpt, "loss": loss, "optimizer": optimizer, "learning_rate": 3e-3}  # +
    return autobatch.Workload(**parts, train_data=DATA.unfold(0, LENGTH + 1, 1))  # +


if __name__ == "__main__":
    options = {"target_batch": 96, "memory_budget": "6MiB", "max_grad_norm": 1.0}  # +
    print(autobatch.fit(workload, steps=20, trials=0, **options))  # +
