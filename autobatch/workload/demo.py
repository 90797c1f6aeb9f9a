"""The embedded demo: a small convolutional network on real handwritten digits that ship with the package.

1,797 images of 8 by 8 pixels (E. Alpaydin and C. Kaynak 1998, UCI Machine Learning Repository,
https://doi.org/10.24432/C50P49, CC BY 4.0), every fifth of which is held out.
"""

from __future__ import annotations

from importlib import resources

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from autobatch.workload.contract import Collated, Workload

MEMORY_BUDGET = {"cpu": "3MiB", "cuda": "160MiB", "sim": "20MiB"}
"""Small per device kind, so that the first run finds a limit and plans an accumulation."""
STEPS = 36
"""Optimizer steps of the demo, unless the user gives --steps or --epochs: about 97 % held-out accuracy."""
HELD_OUT = 5
"""One image in this many is held out."""


def workload() -> Workload:
    """Build the demo workload, as a user would write one."""
    training, held_out = digits()
    return Workload(
        name="digits",
        model=network,
        train_data=training,
        validation_data=held_out,
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        metrics=accuracy,
        optimizer=lambda params, learning_rate: torch.optim.AdamW(params, lr=learning_rate),
        schedule=schedule,
        learning_rate=3e-2,
        base_batch=1024,
    )


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the held-out images, float32 in [0, 1] of shape (1, 8, 8), with labels."""
    with resources.files(__package__).joinpath("digits.npz").open("rb") as file, np.load(file) as data:
        images = torch.from_numpy(data["images"]).float().div_(16).unsqueeze_(1)
        labels = torch.from_numpy(data["labels"]).long()
    held_out = torch.arange(len(labels), device="cpu") % HELD_OUT == 0
    return TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(
        images[held_out], labels[held_out]
    )


def network() -> nn.Module:
    """Build two convolutions and two linear layers; 38 thousand parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def accuracy(model: nn.Module, batch: Collated) -> dict[str, Tensor]:
    """Return the share of images that are classified correctly."""
    images, labels = batch
    return {"accuracy": (model(images).argmax(dim=1) == labels).float().mean()}


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Build a schedule that rises for three tenths of the run and then falls to almost 0."""
    peak = optimizer.param_groups[0]["lr"]
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=peak, total_steps=steps + 1)
