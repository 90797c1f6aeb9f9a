"""Programs of `examples/` in float64, against a loop of torch over whole batches."""

from __future__ import annotations

import copy
import importlib
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import default_collate

import autobatch
from autobatch import Loss, Workload
from autobatch.workload.nested import map_tensors
from autobatch.workload.order import GlobalBatchSampler

EXAMPLES = Path(__file__).parents[2] / "examples"
TARGET, LARGEST, STEPS = 100, 37, 4
"""Batch, largest micro-batch and optimizer steps."""


def distance(name: str, out: Path, *, norm: bool = False) -> float:
    """Return how far an example ends from a plain loop, as a share of the way of the weights.

    Args:
        name: of its file, without its ending.
        out: folder of the run.
        norm: normalize groups of channels in place of batches.
    """
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))  # an example may import those beside it
    workload = importlib.import_module(name).workload()
    if norm:
        workload = replace(workload, model=partial(workload.model, partial(nn.GroupNorm, 4)))
    exact = in_float64(workload)
    fitted = autobatch.fit(
        exact, target_batch=TARGET, max_micro_batch=LARGEST, steps=STEPS, trials=0, device="cpu",
        memory_budget="1GiB", precision="fp32", progress=False, out=str(out),
    ).model  # fmt: skip
    found, expected, start = (
        parameters_to_vector(model.parameters()).detach()
        for model in (fitted, trained_plainly(exact), exact.model())
    )
    return float((found - expected).norm() / (expected - start).norm())


def in_float64(workload: Workload) -> Workload:
    """Return a workload whose samples are drawn once, in float64, and which is trained by SGD.

    Adam would turn the rounding of a gradient that is zero into a step.
    """
    torch.manual_seed(0)
    data: Any = workload.train_data
    model = workload.model().double()
    double = partial(map_tensors, change=lambda one: one.double() if one.is_floating_point() else one)
    return replace(
        workload,
        model=lambda: copy.deepcopy(model),
        train_data=[double(data[index]) for index in range(len(data))],
        optimizer=lambda parameters, rate: torch.optim.SGD(parameters, rate, momentum=0.9),
        schedule=None,
        learning_rate=0.05,
    )


def mean_of(loss: Any) -> Tensor:
    """Return what a loss over the whole batch minimizes."""
    if isinstance(loss, dict):
        return sum(mean_of(term) for term in loss.values())  # type: ignore[return-value]
    return loss.total / loss.count if isinstance(loss, Loss) else loss


def trained_plainly(workload: Workload) -> nn.Module:
    """Train with one pass over each whole batch, as a loop of torch does."""
    model, data = workload.model(), workload.train_data
    optimizer: Any = workload.optimizer(model.parameters(), workload.learning_rate)
    order = GlobalBatchSampler(samples=len(data), target_batch=TARGET, seed=0, steps=STEPS)  # type: ignore[arg-type]
    for ids in (batch.ids for batch in order.batches()):
        batch = (workload.collate or default_collate)([data[index] for index in ids])  # type: ignore[index]
        optimizer.zero_grad()
        mean_of(workload.loss(model, batch)).backward()
        optimizer.step()
        if workload.after_step is not None:
            with torch.no_grad():
                workload.after_step(model)
    return model
