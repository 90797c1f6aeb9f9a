"""A small detector in the manner of DETR, whose loss has a term for boxes and one for classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from autobatch import Loss, Workload
from tests.support.training import Rows, make_workload

CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.7], dtype=torch.float64)
Batch = tuple[Tensor, Tensor, Tensor, Tensor]


class Detector(nn.Module):
    """A trunk with dropout, a head for classes and one for boxes."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(dropout))
        self.classes, self.boxes = nn.Linear(8, 3), nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(inputs)
        return self.classes(hidden), self.boxes(hidden)


def scenes(samples: int = 48) -> Rows:
    """Make inputs, a class, a box and whether the box is there: 0 to 12 boxes in 12 samples."""
    generator = torch.Generator().manual_seed(7)
    inputs, boxes = (torch.randn(samples, n, generator=generator).double() for n in (5, 4))
    labels = torch.randint(3, (samples,), generator=generator)
    present = torch.rand(samples, generator=generator) < torch.linspace(0, 1, samples)
    return Rows(inputs, labels, boxes, present)


def boxes_and_logits(model: nn.Module, batch: Batch) -> tuple[Loss, Tensor]:
    inputs, _, boxes, present = batch
    logits, found = model(inputs)
    total = 5 * (found - boxes).abs().sum(1)[present].sum()
    return Loss(total, int(present.sum())), logits


def terms(model: nn.Module, batch: Batch) -> dict[str, Loss]:
    """As DETR: boxes ÷ their number, classes ÷ the sum of their weights."""
    boxes, logits = boxes_and_logits(model, batch)
    total = cross_entropy(logits, batch[1], CLASS_WEIGHTS, reduction="sum")
    return {"boxes": boxes, "classes": Loss(total, CLASS_WEIGHTS[batch[1]].sum())}


def with_mean(model: nn.Module, batch: Batch) -> dict[str, Tensor | Loss]:
    """Beside a `Loss`, a mean over samples."""
    boxes, logits = boxes_and_logits(model, batch)
    return {"boxes": boxes, "pull": logits.square().mean()}


def per_box(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the mean over the boxes as a loop without micro-batches writes it, and the logits."""
    logits, found = model(batch[0])
    errors = 5 * (found - batch[2]).abs().sum(1)[batch[3]]
    return errors.sum() / max(len(errors), 1), logits


def whole(model: nn.Module, batch: Batch) -> Tensor:
    mean, logits = per_box(model, batch)
    return mean + cross_entropy(logits, batch[1], CLASS_WEIGHTS)


def whole_with_mean(model: nn.Module, batch: Batch) -> Tensor:
    mean, logits = per_box(model, batch)
    return mean + logits.square().mean()


def counts(batch: Batch) -> dict[str, float]:
    return {"classes": float(CLASS_WEIGHTS[batch[1]].sum()), "boxes": len(batch[3].nonzero())}


def two_means(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    logits, found = model(batch[0])
    return {"classes": cross_entropy(logits, batch[1]), "boxes": mse_loss(found, batch[2])}


def drawn_terms(model: nn.Module, batch: Any) -> dict[str, Tensor | Loss]:
    """Return a mean over some rows, with weights that are drawn at random, and one over the samples."""
    scores, shown = model(batch[0]), shown_rows(batch)
    drawn = torch.rand(len(scores), 1)
    return {
        "shown": Loss((scores * drawn)[shown].square().sum(), shown.sum()),
        "labels": cross_entropy(scores, batch[1]),
    }


def shown_rows(batch: Any) -> Tensor:
    return batch[0].flatten(1)[:, 0] > 0


def count_shown(batch: Any) -> dict[str, Tensor]:
    return {"shown": shown_rows(batch).sum()}


DETECTION: dict[str, Any] = {"model": lambda: Detector().double(), "loss": terms, "counts": counts}


def detection(**fields: Any) -> Workload:
    return make_workload(**{**DETECTION, "train_data": scenes(), **fields})
