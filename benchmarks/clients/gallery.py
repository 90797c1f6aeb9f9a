"""Programs of `examples/`: the lines that autobatch takes in them, their exactness, and their resume."""

from __future__ import annotations

import copy
import importlib
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

import autobatch
from autobatch import BatchFunction, Loss, Workload
from autobatch.workload.nested import map_tensors
from autobatch.workload.order import GlobalBatchSampler

EXAMPLES = Path(__file__).parents[2] / "examples"
ADDED = "  # +"
"""Mark of the lines of an example that a plain loop does not have, or has in another form."""
TARGET, LARGEST, STEPS = 100, 37, 4
"""Batch, largest micro-batch and optimizer steps of the runs in float64 and of those that are resumed."""
GIVEN: dict[str, Any] = {"device": "cpu", "memory_budget": "1GiB", "precision": "fp32", "progress": False}
GALLERY = {
    "nanoGPT": "nanogpt",
    "ImageNet ResNet, BatchNorm": "imagenet",
    "ImageNet ResNet, GroupNorm": "imagenet",
    "MAE": "mae",
    "CLIP, from scratch": "clip",
    "SFT with LoRA": "lora",
    "GIN": "gin",
    "diffusion": "diffusion",
    "DCGAN": "dcgan",
    "DINO": "dino",
    "DETR": "detr",
}
"""Names of the table, and files."""
PASSES = {"DCGAN": ("judge", "fool")}
"""Losses of examples with a loop of their own, one for each optimizer."""


def group_norm(channels: int) -> nn.Module:
    """Normalize four groups of channels of each sample."""
    return nn.GroupNorm(4, channels)


def example_of(name: str) -> Any:
    """Import an example as it is run: it may import those beside it."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(GALLERY[name])


def workload_of(name: str) -> Workload:
    """Return the workload of an example."""
    found = example_of(name).workload()
    if name.endswith("GroupNorm"):
        found = replace(found, model=partial(found.model, group_norm))
    return replace(found, name=name)


WORKLOADS: dict[str, Callable[[], Workload]] = {name: partial(workload_of, name) for name in GALLERY}


def changed_lines(name: str) -> int:
    """Count the lines that autobatch takes in an example."""
    text = (EXAMPLES / f"{GALLERY[name]}.py").read_text(encoding="utf-8")
    return sum(line.endswith(ADDED) for line in text.splitlines())


def double(value: Any) -> Any:
    """Return a sample in float64."""
    return map_tensors(value, lambda one: one.double() if one.is_floating_point() else one)


def sgd(parameters: Any, rate: float) -> torch.optim.Optimizer:
    """Build SGD. Adam would turn the rounding of a gradient that is zero into a step."""
    return torch.optim.SGD(parameters, rate, momentum=0.9)


def in_float64(workload: Workload) -> Workload:
    """Return a workload whose samples are drawn once, in float64, and which is trained by SGD."""
    torch.manual_seed(0)
    data: Any = workload.train_data
    if isinstance(data, BatchFunction):
        frozen: Any = BatchFunction(partial(drawn_batch, data))
    else:
        frozen = [double(data[index]) for index in range(len(data))]
    model = workload.model().double()
    return replace(
        workload,
        model=lambda: copy.deepcopy(model),
        train_data=frozen,
        optimizer=sgd,
        schedule=None,
        learning_rate=0.05,
    )


def drawn_batch(data: BatchFunction, size: int, step: int) -> Any:
    """Return the batch of a step, which depends on the step alone."""
    with torch.random.fork_rng():
        torch.manual_seed(step)
        return double(data.function(size, step))


def mean_of(found: Any) -> Tensor:
    """Return what a loss over the whole batch minimizes."""
    if isinstance(found, dict):
        return sum(mean_of(term) for term in found.values())  # type: ignore[return-value]
    return found.total / found.count if isinstance(found, Loss) else found


def trained_plainly(workload: Workload) -> nn.Module:
    """Train with one pass over each whole batch, as a loop of torch does."""
    model = workload.model()
    optimizer: Any = workload.optimizer(model.parameters(), workload.learning_rate)
    for batch in whole_batches(workload):
        optimizer.zero_grad()
        mean_of(workload.loss(model, batch)).backward()
        optimizer.step()
        if workload.after_step is not None:
            with torch.no_grad():
                workload.after_step(model)
    return model


def whole_batches(workload: Workload) -> Iterator[Any]:
    """Yield each batch of a run at once."""
    data: Any = workload.train_data
    if isinstance(data, BatchFunction):
        yield from (data.function(TARGET, step) for step in range(STEPS))
        return
    order = GlobalBatchSampler(samples=len(data), target_batch=TARGET, seed=0, steps=STEPS)
    for batch in order.batches():
        yield (workload.collate or default_collate)([data[index] for index in batch.ids])


def weights(model: nn.Module) -> Tensor:
    """Return all weights as a vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def fitted(workload: Workload, out: Path, **options: Any) -> autobatch.Result:
    """Train a few steps in micro-batches."""
    given = {**GIVEN, "target_batch": TARGET, "max_micro_batch": LARGEST, "steps": STEPS, "trials": 0}
    return autobatch.fit(workload, out=str(out), **{**given, **options})


def distance(name: str, out: Path) -> float:
    """Return how far an example in float64 ends from a plain loop, as a share of the way of the weights."""
    exact = in_float64(workload_of(name))
    if name in PASSES:
        ended, plain = in_passes(name, exact)
    else:
        ended, plain = fitted(exact, out).model, trained_plainly(exact)
    way = weights(plain) - weights(exact.model())
    return float((weights(ended) - weights(plain)).norm() / way.norm())


def in_passes(name: str, exact: Workload) -> tuple[nn.Module, nn.Module]:
    """Train with a step of each optimizer on each batch, in micro-batches and at once."""
    example = example_of(name)
    split, whole = exact.model(), exact.model()
    train_in_passes(
        example, exact, split, [sgd(one.parameters(), 0.05) for one in (split.discriminator, split.generator)]
    )
    optimizers = [sgd(one.parameters(), 0.05) for one in (whole.discriminator, whole.generator)]
    for batch in whole_batches(exact):
        for loss, optimizer in zip(PASSES[name], optimizers, strict=True):
            whole.zero_grad()
            getattr(example, loss)(whole, batch).backward()
            optimizer.step()
    return split, whole


def train_in_passes(example: Any, workload: Workload, model: nn.Module, both: Any, **options: int) -> None:
    """Plan for an example with a loop of its own, and run that loop."""
    plan = autobatch.plan(workload, **{**GIVEN, "target_batch": TARGET, "max_micro_batch": LARGEST})
    steps = {"steps": STEPS, **options}
    of_both = [autobatch.batches(workload, plan, optimizer=one, **steps) for one in both]
    example.train(model, zip(*of_both, strict=True))


def resumes(name: str, out: Path) -> bool:
    """Check that a run that is resumed in its middle ends with the same bits."""
    workload = workload_of(name)
    if name in PASSES:
        return resumes_in_passes(example_of(name), workload)
    whole = fitted(workload, out, checkpoint_every=STEPS // 2)
    shutil.rmtree(max((out / "checkpoints").iterdir()))
    again = fitted(workload, out, checkpoint_every=STEPS // 2, resume=True)
    assert again.training.resumed_from is not None
    return torch.equal(weights(whole.model), weights(again.model))


def resumes_in_passes(example: Any, workload: Workload) -> bool:
    """Do the same with a loop of one's own, whose state the user saves."""
    model = workload.model()
    both = example.optimizers(model, workload.learning_rate)
    train_in_passes(example, workload, model, both, steps=STEPS // 2)
    saved = copy.deepcopy([one.state_dict() for one in (model, *both)])
    random = torch.get_rng_state()
    train_in_passes(example, workload, model, both, start=STEPS // 2)
    other = workload.model()
    again = example.optimizers(other, workload.learning_rate)
    for one, state in zip((other, *again), saved, strict=True):
        one.load_state_dict(state)
    torch.set_rng_state(random)
    train_in_passes(example, workload, other, again, start=STEPS // 2)
    return torch.equal(weights(model), weights(other))
