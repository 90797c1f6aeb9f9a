"""BatchNorm in micro-batches: a note with the numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from autobatch.planning import micro_batches
from autobatch.workload.order import GlobalBatchSampler


def batch_norm_notes(model: nn.Module, sampler: GlobalBatchSampler, micro_batch: int) -> list[str]:
    """Return notes on batch statistics; empty without BatchNorm or if batches are not split.

    Args:
        model: the model that trains.
        sampler: the batches of the run.
        micro_batch: the largest micro-batch, in samples.
    """
    sizes = micro_batches(min(sampler.target_batch, sampler.size(0)), micro_batch)
    return statistics_notes([layer.momentum for layer in batch_norms(model)], sizes)


def statistics_notes(momenta: Sequence[float | None], sizes: Sequence[int]) -> list[str]:
    """Return notes on batch statistics; empty without BatchNorm or for a single micro-batch.

    Args:
        momenta: the momentum of each BatchNorm layer.
        sizes: the micro-batches of a batch, the largest first.
    """
    if not momenta or len(sizes) == 1:
        return []
    who = (
        "1 BatchNorm layer computes its"
        if len(momenta) == 1
        else f"{len(momenta)} BatchNorm layers compute their"
    )
    size = f"{sizes[-1]} to {sizes[0]}" if sizes[-1] < sizes[0] else f"{sizes[0]}"
    momentum = momenta[0]
    # n updates with 1 - (1 - m) ** (1 / n) weigh as much as one with m.
    rate = 0.0 if momentum is None else 1 - (1 - momentum) ** (1 / len(sizes))
    matching = f", which a momentum of {rate:.4g} instead of {momentum:g} would undo" if rate else ""
    return [
        f"{who} statistics over micro-batches of {size} samples, not over the batch of {sum(sizes)}: results "
        f"depend on the micro-batch, and the running averages move {len(sizes)} times per step{matching}"
    ]


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the layers that normalise by batch statistics in train mode."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def smallest_micro_batch(
    sampler: GlobalBatchSampler, micro_batch: int, share_of: Callable[[int], int] = lambda samples: samples
) -> int | None:
    """Return the fewest samples in any micro-batch of the run; only a last batch may be short.

    Args:
        sampler: the batches of the run.
        micro_batch: the largest micro-batch, in samples.
        share_of: returns the samples that this process takes of a batch of a given size.

    Returns:
        None if this process takes no sample.
    """
    indices = {0, sampler.total - 1}
    sizes = [size for index in indices for size in micro_batches(share_of(sampler.size(index)), micro_batch)]
    return min(sizes, default=None)
