"""Knobs applied to a model and its optimizer, in the same way for probe, trial and training.

Changes to the forward pass hold only while the loss of a training micro-batch runs. The model that the user
gets back, validates and saves is the one that they built. The memory layout is the exception: weights in
channels-last order keep it, with the same values.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from autobatch.core.records import CHANNELS_LAST, CHECKPOINTING, COMPILE, OPTIMIZER
from autobatch.workload.contract import Collated, LossFunction, LossValue, WholeBatchLoss
from autobatch.workload.nested import map_tensors


def apply_layout(model: nn.Module, knobs: Mapping[str, object]) -> None:
    """Put 4-D weights and buffers into the layout that the knobs request, with the same values."""
    if knobs.get(CHANNELS_LAST):
        for tensor in {id(t): t for t in [*model.parameters(), *model.buffers()]}.values():
            if tensor.dim() == 4:
                tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)


def apply_implementation(optimizers: Iterable[torch.optim.Optimizer], knobs: Mapping[str, object]) -> None:
    """Set the optimizers' implementation. Those without such a setting stay unchanged.

    The settings are those of torch's own (torch/optim/optimizer.py, ``_foreach_doc`` and ``_fused_doc``).
    """
    choice = knobs.get(OPTIMIZER, "default")
    if choice != "default":
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group.update({name: name == choice for name in ("foreach", "fused") if name in group})


def apply_forward(loss: LossFunction, model: nn.Module, knobs: Mapping[str, object]) -> LossFunction:
    """Return the loss with checkpointing, compilation and layout applied to its training forward passes."""
    if isinstance(loss, WholeBatchLoss):
        represent: Any = apply_forward(loss.represent, model, knobs)
        return replace(loss, represent=represent)
    forwards: list[tuple[nn.Module, Callable[..., Any]]] = []
    if knobs.get(CHECKPOINTING) == "full":
        forwards += [(block, _checkpoint_forward(block)) for block in recomputable_blocks(model)]
    if knobs.get(COMPILE, "off") != "off":
        with warnings.catch_warnings():
            # The compiler's own imports warn.
            warnings.simplefilter("ignore")
            forwards.append((model, torch.compile(model.forward)))
    to_layout = bool(knobs.get(CHANNELS_LAST))
    if not forwards and not to_layout:
        return loss

    def run(temporary_weights: nn.Module, batch: Collated) -> LossValue:
        if to_layout:
            batch = map_tensors(batch, _to_channels_last)
        with _replaced_forwards(forwards):
            return loss(temporary_weights, batch)

    return run


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks: children of one class in the model's lists, sequences and dicts.

    No block contains another, and the towers of a dict that have blocks of their own are none. Of several
    classes, the one with the most parameters wins. Blocks of a single layer do not count, because recomputing
    them saves nothing.
    """
    groups: dict[object, dict[int, nn.Module]] = defaultdict(dict)
    for parent in model.modules():
        is_dict = isinstance(parent, nn.ModuleDict)
        for child in (
            parent.children() if isinstance(parent, nn.ModuleList | nn.Sequential) or is_dict else ()
        ):
            if is_dict and find_blocks(child):
                continue
            if any(True for _ in child.children()) and not isinstance(child, nn.ModuleList | nn.ModuleDict):
                # All sequences share one class, so only those of one list are the same block repeated.
                kind = (type(child), id(parent) if type(child) is nn.Sequential else 0)
                groups[kind][id(child)] = child

    def size(blocks: list[nn.Module]) -> tuple[int, int]:
        return sum(p.numel() for block in blocks for p in block.parameters()), len(blocks)

    repeated = [list(group.values()) for group in groups.values() if len(group) > 1]
    best = max(repeated, key=size, default=[])
    nested = {id(inner) for block in best for inner in block.modules() if inner is not block}
    return [block for block in best if id(block) not in nested]


def recomputable_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks that may run twice in a step, as BatchNorm may not: it would count twice."""
    return [
        block
        for block in find_blocks(model)
        if not any(isinstance(module, _BatchNorm) for module in block.modules())
    ]


def _checkpoint_forward(block: nn.Module) -> Callable[..., Any]:
    """Return a forward that keeps only the block's input and runs again in the backward pass."""
    forward = block.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        if not block.training:
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


@contextmanager
def _replaced_forwards(forwards: list[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Replace the forward functions of modules within the block."""
    saved = [(vars(module), vars(module).get("forward")) for module, _ in forwards]
    try:
        for module, forward in forwards:
            vars(module)["forward"] = forward
        yield
    finally:
        for attributes, own in saved:
            attributes["forward"] = own
            if own is None:
                del attributes["forward"]


def _to_channels_last(tensor: Tensor) -> Tensor:
    if tensor.dim() != 4 or not tensor.is_floating_point():
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)
