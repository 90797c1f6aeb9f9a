"""One optimizer step from the first samples of a workload, and the kinds of loss that it is tested with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from autobatch import Loss, WholeBatchLoss, Workload
from autobatch.device.base import SilentMeter
from autobatch.step.train_state import StepSettings, build_train_state
from autobatch.step.train_step import train_step
from tests.support.training import (
    INFO_NCE,
    apart,
    language_model,
    mean_loss,
    token_loss,
    tokens,
    weights,
    whole_tokens,
)

SAMPLES = 24
EXACT = 1e-12
"""Relative error of a step in float64."""


def train_state_of(workload: Workload, **options) -> Any:
    torch.manual_seed(0)
    rate = options.pop("learning_rate", workload.learning_rate)
    settings = StepSettings(**{"precision": "fp32", **options})
    return build_train_state(workload, workload.model(), torch.device("cpu"), settings, learning_rate=rate)


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
    fed = train_state.feed(iter(split(workload, sizes, first)), SilentMeter())
    return train_step(train_state, fed, sum(sizes))


CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.7], dtype=torch.float64)


def weighted(model: nn.Module, batch) -> Loss:
    inputs, labels = batch
    total = cross_entropy(model(inputs), labels, weight=CLASS_WEIGHTS, reduction="sum")
    return Loss(total, CLASS_WEIGHTS[labels].sum())


def whole_weighted(model: nn.Module, batch) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1], weight=CLASS_WEIGHTS)


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
    "tokens": ({"model": language_model, "train_data": tokens(), "loss": token_loss}, whole_tokens),
    "class weights": ({"loss": weighted}, whole_weighted),
    "InfoNCE": ({"loss": INFO_NCE}, INFO_NCE),
    "CLIP": ({"model": lambda: Towers().double(), "loss": CLIP}, CLIP),
}
"""Fields of a workload, and the loss over the whole batch as torch writes it: the oracle."""
