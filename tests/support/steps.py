"""One optimizer step from the first samples of a workload, and the kinds of loss that it is tested with."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from autobatch import Loss, Workload
from autobatch.step.train_state import StepSettings, TrainState, build_train_state
from tests.support.training import IGNORED, apart, language_model, mean_loss, token_loss, tokens, weights

SAMPLES = 24
EXACT = 1e-12
"""Relative error of a step in float64."""


def train_state_of(workload: Workload, **options) -> TrainState:
    torch.manual_seed(0)
    rate = options.pop("learning_rate", workload.learning_rate)
    settings = StepSettings(**{"precision": "fp32", **options})
    return build_train_state(workload, workload.model(), torch.device("cpu"), settings, learning_rate=rate)


def off(train_state: TrainState, workload: Workload, expected: torch.Tensor) -> float:
    """Return the error of the step, relative to the expected one (with SGD: the error of the gradient)."""
    torch.manual_seed(0)
    start = weights(workload.model())
    return apart(weights(train_state.model) - start, expected - start)


def split(workload: Workload, sizes: list[int], first: int = 0):
    """Yield micro-batches of these sizes from sample ``first`` on, each with its size."""
    for size in sizes:
        ids = range(first, first + size)
        yield torch.utils.data.default_collate([workload.train_data[i] for i in ids]), size
        first += size


def whole_tokens(model: nn.Module, batch) -> torch.Tensor:
    ids, labels = batch
    return cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.7], dtype=torch.float64)


def weighted(model: nn.Module, batch) -> Loss:
    inputs, labels = batch
    total = cross_entropy(model(inputs), labels, weight=CLASS_WEIGHTS, reduction="sum")
    return Loss(total, CLASS_WEIGHTS[labels].sum())


def whole_weighted(model: nn.Module, batch) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1], weight=CLASS_WEIGHTS)


KINDS = {
    "mean": ({}, mean_loss),
    "tokens": ({"model": language_model, "train_data": tokens(), "loss": token_loss}, whole_tokens),
    "class weights": ({"loss": weighted}, whole_weighted),
}
"""Fields of a workload, and the loss over the whole batch as torch writes it: the oracle."""
