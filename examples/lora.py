"""SFT with LoRA (Hu et al. 2021): adapters of a frozen GPT learn to answer, on texts of many lengths.

python examples/lora.py
"""

from __future__ import annotations

import torch
from nanogpt import Block, Gpt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

import autobatch  # +

IGNORED = -100


class Adapter(nn.Module):
    """A frozen layer, and beside it a product of two thin matrices."""

    def __init__(self, layer: nn.Linear, rank: int = 4, scale: float = 2.0) -> None:
        super().__init__()
        self.layer, self.scale = layer, scale
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / rank)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + s B A x."""
        return self.layer(x) + self.scale * (x @ self.down.T) @ self.up.T


def build_model() -> nn.Module:
    """Build a GPT, freeze it, and put adapters beside the layers of its attention."""
    model = Gpt().requires_grad_(False)
    for block in model.modules():
        if isinstance(block, Block):
            block.attention, block.joined = Adapter(block.attention), Adapter(block.joined)
    return model


def chats(samples: int = 512) -> list[dict[str, Tensor]]:
    """Ask for a word in capitals: the labels of the question are ignored."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for length in torch.randint(2, 12, (samples,), generator=draw).tolist():
        word = torch.randint(ord("a"), ord("z") + 1, (length,), generator=draw)
        ids = torch.cat([word, torch.tensor([ord("?")]), word - 32, torch.tensor([ord(".")])])
        found.append({"ids": ids, "labels": ids.masked_fill(torch.arange(len(ids)) <= length, IGNORED)})
    return found


def pad(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad to the longest text of the micro-batch."""
    columns = {name: [sample[name] for sample in samples] for name in samples[0]}
    fill = {"ids": 0, "labels": IGNORED}
    return {name: pad_sequence(column, True, fill[name]) for name, column in columns.items()}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> autobatch.Loss:  # +
    """Return the sum over the letters of the answers, and their number."""
    scores, labels = model(batch["ids"][:, :-1]).flatten(0, 1), batch["labels"][:, 1:].flatten()
    total = cross_entropy(scores, labels, ignore_index=IGNORED, reduction="sum")
    return autobatch.Loss(total, (labels != IGNORED).sum())  # +


def adapters_only(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """Build AdamW for the adapters. The name ``model`` asks for the model itself."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], rate)


def workload() -> autobatch.Workload:  # +
    """Return the model, the chats and the loss."""
    parts = {"model": build_model, "train_data": chats(), "collate": pad, "loss": loss}  # +
    return autobatch.Workload(**parts, optimizer=adapters_only, learning_rate=2e-2)  # +


if __name__ == "__main__":
    print(autobatch.fit(workload, target_batch=96, memory_budget="4MiB", steps=20, trials=0))  # +
