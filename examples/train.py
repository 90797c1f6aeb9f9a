"""A complete workload: a small classifier on generated data.

autobatch fit examples/train.py:workload --target-batch 256 --memory-budget 300KiB --steps 20
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from autobatch import Workload


def dataset(samples: int = 1000) -> TensorDataset:
    """Return points in 16 dimensions; the sign of their sum is the label."""
    points = torch.randn(samples, 16, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, (points.sum(dim=1) > 0).long())


def build_model() -> nn.Module:
    """Build a network with one hidden layer."""
    return nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 2))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy over the samples of a micro-batch."""
    points, labels = batch
    return cross_entropy(model(points), labels)


def optimizer(parameters: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    """Build AdamW."""
    return torch.optim.AdamW(parameters, lr=learning_rate)


def workload() -> Workload:
    """Return the model, the data and the loss."""
    return Workload(
        model=build_model,
        train_data=dataset(),
        loss=loss,
        optimizer=optimizer,
        learning_rate=3e-3,
        base_batch=256,
    )
