"""Small workloads that allocate in different ways."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from autobatch.workload.contract import Loss, Workload


class Tokens(Dataset):
    """Rows of 17 token numbers."""

    rows = torch.arange(64 * 17).view(64, 17) % 61

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return self.rows[index]


class Images(Dataset):
    """Small images with a class."""

    images = torch.zeros(64, 3, 12, 12)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return self.images[index], index % 5


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = self.project(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.dropout(self.mlp(x))


class Transformer(nn.Module):
    """Two blocks, embedding and head tied."""

    def __init__(self, width: int = 16, depth: int = 2, *, recompute: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 61, bias=False)
        self.head.weight = self.embedding.weight
        self.recompute = recompute

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def token_loss(model, batch):
    logits = model(batch[:, :-1])
    total = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
    return Loss(total, batch[:, 1:].numel())


def image_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def pair_loss(model, batch):
    """Every sample against every other: m x m."""
    features = F.normalize(model(batch[0]))
    return F.cross_entropy(features @ features.T / 0.1, torch.arange(len(features)))


def adamw(parameters, learning_rate):
    return torch.optim.AdamW(parameters, lr=learning_rate)


def sgd(parameters, learning_rate):
    return torch.optim.SGD(parameters, lr=learning_rate, momentum=0.9)


def perceptron():
    return nn.Sequential(nn.Flatten(), nn.Linear(432, 48), nn.GELU(), nn.Dropout(0.1), nn.Linear(48, 5))


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5),
    )  # fmt: skip


def make(model, *, data=None, loss=image_loss, optimizer=adamw) -> Workload:
    return Workload(
        model=model, train_data=data or Images(), loss=loss, optimizer=optimizer, learning_rate=1e-3
    )


WORKLOADS = {
    "perceptron": lambda: make(perceptron),
    "convolutions": lambda: make(convolutions, optimizer=sgd),
    "transformer": lambda: make(Transformer, data=Tokens(), loss=token_loss),
    "recomputed": lambda: make(lambda: Transformer(recompute=True), data=Tokens(), loss=token_loss),
}
