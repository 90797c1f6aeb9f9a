"""DETR (Carion et al. 2020): a set of boxes, matched to the objects; each term has a divisor of its own.

python examples/detr.py
"""

from __future__ import annotations

from itertools import permutations

import torch
from torch import Tensor, nn

from autobatch import Loss, Workload, fit  # +

QUERIES, MOST, CLASSES, WIDTH = 8, 4, 3, 32
ORDERS = torch.tensor(list(permutations(range(QUERIES), MOST)))


class Detr(nn.Module):
    """Features of a picture, and queries that look for one object each."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, WIDTH, 4, 4), nn.GELU(), nn.Conv2d(WIDTH, WIDTH, 2, 2))
        self.places, self.queries = (nn.Parameter(torch.randn(n, WIDTH)) for n in (16, QUERIES))
        self.transformer = nn.Transformer(WIDTH, 4, 1, 1, 64, dropout=0.0, batch_first=True)
        self.classes, self.boxes = nn.Linear(WIDTH, CLASSES + 1), nn.Linear(WIDTH, 4)

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of the classes of each query, and its box: centre and size."""
        tokens = self.backbone(pictures).flatten(2).transpose(1, 2) + self.places
        found = self.transformer(tokens, self.queries.expand(len(pictures), -1, -1))
        return self.classes(found), self.boxes(found).sigmoid()


def scene(number: int) -> dict[str, Tensor]:
    """Draw one to four boxes in three colours; the class of a box that is not there is 3."""
    draw = torch.Generator().manual_seed(number)
    (middle, size), picture = torch.rand(2, MOST, 2, generator=draw), torch.zeros(3, 32, 32)
    boxes = torch.cat([0.2 + 0.6 * middle, 0.1 + 0.3 * size], 1)
    labels = torch.randint(3, (MOST,), generator=draw).masked_fill(torch.arange(MOST) > number % MOST, 3)
    corners = 32 * torch.cat([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], 1)
    for label, (top, left, bottom, right) in zip(labels, corners.long().tolist(), strict=True):
        picture[label % CLASSES, top : bottom + 1, left : right + 1] += label < CLASSES
    return {"picture": picture, "boxes": boxes, "labels": labels}


def match(chances: Tensor, boxes: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the query of each object. Of all 1,680 assignments, the one that costs least is taken."""
    labels, orders = batch["labels"], ORDERS.to(boxes.device)
    unlike = 1 - chances.gather(2, labels[:, None].expand(-1, QUERIES, -1))
    cost = (5 * torch.cdist(boxes, batch["boxes"], 1) + unlike) * (labels < CLASSES)[:, None]
    return orders[sum(cost[:, orders[:, place], place] for place in range(MOST)).argmin(1)]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Loss]:  # +
    """Return the error of the classes ÷ Σ weights, and that of the boxes ÷ their number."""
    scores, boxes = model(batch["picture"])
    query, there = match(scores.softmax(2).detach(), boxes.detach(), batch), batch["labels"] < CLASSES
    labels = torch.full_like(scores[..., 0], CLASSES, dtype=torch.long).scatter(1, query, batch["labels"])
    weight = scores.new_tensor([1.0] * CLASSES + [0.1])
    error = nn.functional.cross_entropy(scores.transpose(1, 2), labels, weight, reduction="sum")
    off = (boxes.gather(1, query[..., None].expand(-1, -1, 4)) - batch["boxes"]).abs().sum(2) * there
    return {"classes": Loss(error, weight[labels].sum()), "boxes": Loss(5 * off.sum(), there.sum())}  # +


def counts(batch: dict[str, Tensor]) -> dict[str, Tensor]:  # +
    """Return what each term is divided by: each object has one query, and the rest weighs a tenth."""
    there = (batch["labels"] < CLASSES).sum().double()  # +
    return {"classes": 0.9 * there + 0.1 * QUERIES * len(batch["labels"]), "boxes": there}  # +


def workload() -> Workload:  # +
    """Return the model, the data and the loss."""
    parts = {"model": Detr, "train_data": [scene(n) for n in range(384)], "loss": loss, "counts": counts}  # +
    return Workload(**parts, optimizer=torch.optim.AdamW, learning_rate=1e-3)  # +


if __name__ == "__main__":
    print(fit(workload, target_batch=96, memory_budget="3MiB", steps=20, trials=0))  # +
