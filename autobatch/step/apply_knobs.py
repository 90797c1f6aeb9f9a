"""How what the tuner chose is applied to a model and its optimizer; the same for probe, trial and training.

What concerns the forward pass is in place only while the loss of a training micro-batch runs, so the model
that the user gets back, validates and saves is the one that they built. Layout is the exception: weights with
their channels innermost are the same values in another order, and stay so.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from autobatch.core.knobs import CHANNELS_LAST, CHECKPOINTING, COMPILE, OPTIMIZER
from autobatch.workload.contract import Collated, Loss, WholeBatchLoss
from autobatch.workload.nested import map_tensors

LossFunction = Callable[[nn.Module, Collated], "Tensor | Loss"]


IMPLEMENTATIONS: dict[object, dict[str, bool]] = {
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}
"""Settings of torch's own optimizers (torch/optim/optimizer.py, ``_foreach_doc`` and ``_fused_doc``)."""


def apply_layout(model: nn.Module, knobs: Mapping[str, object]) -> None:
    """Put 4-D weights and buffers into the layout that the knobs ask for; their values stay."""
    if not knobs.get(CHANNELS_LAST):
        return
    for tensor in {id(t): t for t in [*model.parameters(), *model.buffers()]}.values():
        if tensor.dim() == 4:
            tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)


def apply_implementation(optimizers: Iterable[torch.optim.Optimizer], knobs: Mapping[str, object]) -> None:
    """Let optimizers step as the knobs ask; those without such a setting are left as they are."""
    settings = IMPLEMENTATIONS.get(knobs.get(OPTIMIZER), {})
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.update({name: value for name, value in settings.items() if name in group})


def apply_forward(loss: LossFunction, model: nn.Module, knobs: Mapping[str, object]) -> LossFunction:
    """The loss, with its forward passes checkpointed, compiled and in the layout that the knobs ask for."""
    if isinstance(loss, WholeBatchLoss):
        represent: Any = apply_forward(loss.represent, model, knobs)
        return replace(loss, represent=represent)
    changed: list[tuple[nn.Module, Callable[..., Any]]] = []
    if knobs.get(CHECKPOINTING) == "full":
        changed += [(block, _recomputed(block)) for block in find_blocks(model)]
    if knobs.get(COMPILE, "off") != "off":
        changed.append((model, _compiled(model)))
    to_layout = bool(knobs.get(CHANNELS_LAST))
    if not changed and not to_layout:
        return loss

    def run(temporary_weights: nn.Module, batch: Collated) -> Tensor | Loss:
        if not torch.is_grad_enabled():
            return loss(temporary_weights, batch)
        if to_layout:
            batch = map_tensors(batch, _channels_last)
        with _forwards(changed):
            return loss(temporary_weights, batch)

    return run


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: children of one class in its lists and sequences, none inside another.

    Of several classes, the one with the most parameters; blocks that are no more than one layer, of which
    recomputation would save nothing, do not count.
    """
    groups: dict[object, dict[int, nn.Module]] = defaultdict(dict)
    for parent in model.modules():
        if isinstance(parent, nn.ModuleList | nn.Sequential):
            for child in parent.children():
                if any(True for _ in child.children()) and not isinstance(child, nn.ModuleList):
                    # Sequences are all of one class, so only those of one list are the same thing repeated.
                    kind = (type(child), id(parent) if type(child) is nn.Sequential else 0)
                    groups[kind][id(child)] = child
    repeated = [list(group.values()) for group in groups.values() if len(group) > 1]
    best = max(repeated, key=lambda blocks: (_parameters(blocks), len(blocks)), default=[])
    inside = {id(inner) for block in best for inner in block.modules() if inner is not block}
    return [block for block in best if id(block) not in inside]


def _parameters(blocks: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for block in blocks for parameter in block.parameters())


def _recomputed(block: nn.Module) -> Callable[..., Any]:
    """The forward of a block that keeps its input alone, and runs again for the backward pass."""
    forward = block.forward
    norms = [one for one in block.modules() if isinstance(one, _BatchNorm) and one.track_running_stats]

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), _statistics_aside(norms)

    extra: dict[str, Any] = {"context_fn": contexts} if norms else {}

    def run(*args: Any, **kwargs: Any) -> Any:
        if not block.training:
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **extra, **kwargs)

    return run


@contextmanager
def _statistics_aside(norms: list[_BatchNorm]) -> Iterator[None]:
    """Inside, running statistics are updated in copies: a forward pass that is repeated counts once."""
    kept = [(norm, dict(norm._buffers)) for norm in norms]
    try:
        for norm, buffers in kept:
            norm._buffers.update({name: None if b is None else b.clone() for name, b in buffers.items()})
        yield
    finally:
        for norm, buffers in kept:
            norm._buffers.update(buffers)


def _compiled(model: nn.Module) -> Callable[..., Any]:
    with warnings.catch_warnings():
        # Of the compiler's own imports.
        warnings.simplefilter("ignore")
        return torch.compile(model.forward)


@contextmanager
def _forwards(changed: list[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Inside, modules run these forwards; afterwards what they had comes back."""
    kept: list[tuple[nn.Module, Callable[..., Any] | None]] = [
        (module, module.__dict__.get("forward")) for module, _ in changed
    ]
    try:
        for module, forward in changed:
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, own in kept:
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = own


def _channels_last(tensor: Tensor) -> Tensor:
    if tensor.dim() != 4 or not tensor.is_floating_point():
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)
