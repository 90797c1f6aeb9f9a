"""BatchNorm in micro-batches: a note with the numbers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the layers that normalise by batch statistics in train mode."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def statistics_notes(momenta: Sequence[float | None], sizes: Sequence[int]) -> list[str]:
    """Return notes on batch statistics; empty without BatchNorm or for a single micro-batch."""
    if not momenta or len(sizes) == 1:
        return []
    layers, momentum = f"{len(momenta)} BatchNorm layers compute their", momenta[0]
    who = "1 BatchNorm layer computes its" if len(momenta) == 1 else layers
    size = f"{sizes[-1]} to {sizes[0]}" if sizes[-1] < sizes[0] else f"{sizes[0]}"
    # n updates with 1 - (1 - m) ** (1 / n) weigh as much as one with m.
    rate = 0.0 if momentum is None else 1 - (1 - momentum) ** (1 / len(sizes))
    matching = f", which a momentum of {rate:.4g} instead of {momentum:g} would undo" if rate else ""
    return [
        f"{who} statistics over micro-batches of {size} samples, not over the batch of {sum(sizes)}: results "
        f"depend on the micro-batch, and the running averages move {len(sizes)} times per step{matching}"
    ]
