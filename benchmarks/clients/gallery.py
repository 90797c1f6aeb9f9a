"""Programs of `examples/`: the lines that autobatch takes in them, their exactness, and their resume."""

from __future__ import annotations

import copy
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

import autobatch
from autobatch import Loss, Workload
from autobatch.workload.nested import map_tensors
from autobatch.workload.reference import find_workload

EXAMPLES = Path(__file__).parents[2] / "examples"
ADDED = "  # +"
"""Mark of the lines of an example that a plain loop does not have, or has in another form."""
TARGET, LARGEST, STEPS = 96, 37, 4
"""Batch, largest micro-batch and optimizer steps of the runs in float64 and of those that are resumed."""
GALLERY = {
    "nanoGPT": "nanogpt",
    "ImageNet ResNet, BatchNorm": "imagenet",
    "ImageNet ResNet, GroupNorm": "imagenet",
    "MAE": "mae",
    "CLIP of the gallery": "clip",
    "SFT with LoRA": "lora",
    "GIN": "gin",
    "diffusion": "diffusion",
}
"""Names of the table, and files."""


def group_norm(channels: int) -> nn.Module:
    """Normalize four groups of channels of each sample."""
    return nn.GroupNorm(4, channels)


def workload_of(name: str) -> Workload:
    """Return the workload of an example."""
    found = find_workload(f"{EXAMPLES / GALLERY[name]}.py:workload")
    if name.endswith("GroupNorm"):
        found = replace(found, model=partial(found.model, group_norm))
    return replace(found, name="gallery")


WORKLOADS: dict[str, Callable[[], Workload]] = {name: partial(workload_of, name) for name in GALLERY}


def changed_lines(name: str) -> int:
    """Count the lines that autobatch takes in an example."""
    text = (EXAMPLES / f"{GALLERY[name]}.py").read_text(encoding="utf-8")
    return sum(line.endswith(ADDED) for line in text.splitlines())


def double(value: Any) -> Any:
    """Return a sample in float64."""
    return map_tensors(value, lambda one: one.double() if one.is_floating_point() else one)


def in_float64(workload: Workload) -> Workload:
    """Return a workload whose samples are drawn once, in float64, and which is trained by SGD.

    Adam would turn the rounding of a gradient that is zero into a step.
    """
    torch.manual_seed(0)
    data: Any = workload.train_data
    samples = [double(data[index]) for index in range(len(data))]
    model = workload.model().double()
    return replace(
        workload,
        model=lambda: copy.deepcopy(model),
        train_data=samples,
        optimizer=partial(torch.optim.SGD, momentum=0.9),
        schedule=None,
        learning_rate=0.05,
    )


def mean_of(found: Any) -> Tensor:
    """Return what a loss over the whole batch minimizes."""
    return found.total / found.count if isinstance(found, Loss) else found


def trained_plainly(workload: Workload, batches: Sequence[Sequence[int]]) -> nn.Module:
    """Train with one pass over each whole batch, as a loop of torch does."""
    model = workload.model()
    optimizer: Any = workload.optimizer(model.parameters(), workload.learning_rate)
    data: Any = workload.train_data
    for ids in batches:
        batch = (workload.collate or default_collate)([data[index] for index in ids])
        optimizer.zero_grad()
        mean_of(workload.loss(model, batch)).backward()
        optimizer.step()
    return model


def weights(model: nn.Module) -> Tensor:
    """Return all weights as a vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def fitted(workload: Workload, out: Path, **options: Any) -> autobatch.Result:
    """Train a few steps in micro-batches."""
    given = {"device": "cpu", "precision": "fp32", "trials": 0, "progress": False, "steps": STEPS}
    return autobatch.fit(
        workload, target_batch=TARGET, max_micro_batch=LARGEST, out=str(out), **{**given, **options}
    )


def distance(workload: Workload, out: Path) -> float:
    """Return how far `fit` in float64 ends from a plain loop, as a share of the way that the weights went."""
    exact = in_float64(workload)
    result = fitted(exact, out)
    order = autobatch.batches(range(len(exact.train_data)), result.plan, steps=STEPS)  # type: ignore[arg-type]
    batches = [[int(one) for micro in batch for one in micro.data] for batch in order]
    plain = weights(trained_plainly(exact, batches))
    return float((weights(result.model) - plain).norm() / (plain - weights(exact.model())).norm())


def resumes(workload: Workload, out: Path) -> bool:
    """Check that a run that is resumed in its middle ends with the same bits."""
    whole = fitted(workload, out, checkpoint_every=STEPS // 2)
    shutil.rmtree(out / "checkpoints" / f"step-{STEPS}")
    again = fitted(workload, out, checkpoint_every=STEPS // 2, resume=True)
    assert again.training.resumed_from is not None
    return torch.equal(weights(whole.model), weights(again.model))


def open_gallery() -> None:
    """Let examples import each other, as they do when they are run."""
    sys.path.insert(0, str(EXAMPLES))
