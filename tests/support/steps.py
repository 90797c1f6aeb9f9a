"""One optimizer step from the first samples of a workload, and the kinds of loss that it is tested with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from autobatch import Loss, WholeBatchLoss, Workload
from autobatch.step.train_step import train_step
from tests.support.detection import CLASS_WEIGHTS, DETECTION, scenes
from tests.support.detection import whole as whole_detection
from tests.support.training import (
    INFO_NCE,
    TOKENS,
    apart,
    mean_loss,
    weights,
    whole_tokens,
)

SAMPLES = 24
EXACT = 1e-12
"""Relative error of a step in float64."""


def off(train_state: Any, workload: Workload, expected: torch.Tensor) -> float:
    """Return the error of the step, relative to the expected one (with SGD: the error of the gradient)."""
    torch.manual_seed(0)
    start = weights(workload.model())
    return apart(weights(train_state.model) - start, expected - start)


def split(workload: Workload, sizes: list[int], first: int = 0) -> list[tuple[Any, int]]:
    """Return micro-batches of these sizes from sample ``first`` on, each with its size."""
    found = []
    for size in sizes:
        samples = [workload.train_data[i] for i in range(first, first + size)]
        found.append((torch.utils.data.default_collate(samples), size))
        first += size
    return found


def step_of(train_state: Any, workload: Workload, sizes: list[int], first: int = 0) -> Any:
    """Take a step over the next samples, with the micro-batches as the loop feeds them."""
    fed = train_state.feed(iter(split(workload, sizes, first)))
    return train_step(train_state, fed, sum(sizes))


def weighted(model: nn.Module, batch) -> Loss:
    scores = model(batch[0])
    weight = CLASS_WEIGHTS.to(scores.dtype)
    return Loss(cross_entropy(scores, batch[1], weight, reduction="sum"), weight[batch[1]].sum())


def whole_weighted(model: nn.Module, batch) -> torch.Tensor:
    scores = model(batch[0])
    return cross_entropy(scores, batch[1], CLASS_WEIGHTS.to(scores.dtype))


class Towers(nn.Module):
    """A small CLIP: two towers, a trained temperature, dropout, and a frozen part."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 4))
        self.text = nn.Embedding(3, 4)
        self.frozen = nn.Linear(5, 4).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.7))


def two_towers(model, batch):
    inputs, labels = batch
    return {
        "pair": (normalize(model.image(inputs)), normalize(model.text(labels))),
        "anchor": model.frozen(inputs),
        "labels": labels,
    }


def clip(model, rows) -> torch.Tensor:
    """A symmetric loss over pairs. Labels mark the right texts, and a frozen anchor attracts."""
    image, text = rows["pair"]
    logits = image @ text.T * model.scale.exp()
    same = (rows["labels"][:, None] == rows["labels"]).to(logits.dtype)
    target = same / same.sum(1, keepdim=True)
    pull = (image * rows["anchor"]).sum(1).mean()
    return (cross_entropy(logits, target) + cross_entropy(logits.T, target)) / 2 + 0.1 * pull


CLIP = WholeBatchLoss(represent=two_towers, loss=clip)
KINDS = {
    "mean": ({}, mean_loss),
    "tokens": (TOKENS, whole_tokens),
    "class weights": ({"loss": weighted}, whole_weighted),
    "InfoNCE": ({"loss": INFO_NCE}, INFO_NCE),
    "CLIP": ({"model": lambda: Towers().double(), "loss": CLIP}, CLIP),
    "terms": ({**DETECTION, "train_data": scenes(SAMPLES)}, whole_detection),
}
"""Fields of a workload, and the loss over the whole batch as torch writes it: the oracle."""
