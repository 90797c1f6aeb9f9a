"""One optimizer step from the first samples of a workload."""

from __future__ import annotations

import torch

from autobatch.step.train_state import TrainState, build_train_state
from autobatch.workload.contract import Workload
from tests.support.training import apart, weights

SAMPLES = 24
EXACT = 1e-12
"""Relative to the step: in float64, the error of the gradient."""


def train_state_of(workload: Workload, **options) -> TrainState:
    torch.manual_seed(0)
    options = {"precision": "fp32", "learning_rate": workload.learning_rate, **options}
    return build_train_state(workload, workload.model(), torch.device("cpu"), **options)


def off(train_state: TrainState, workload: Workload, expected: torch.Tensor) -> float:
    """How far the step is from the expected one, as a share of it (with SGD: the error of the gradient)."""
    torch.manual_seed(0)
    start = weights(workload.model())
    return apart(weights(train_state.model) - start, expected - start)


def split(workload: Workload, sizes: list[int], first: int = 0):
    for size in sizes:
        ids = range(first, first + size)
        yield torch.utils.data.default_collate([workload.train_data[i] for i in ids]), size
        first += size
