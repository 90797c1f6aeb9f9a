"""BatchNorm in micro-batches: a note with the numbers, and the equivalent momentum."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

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
    layers = batch_norms(model)
    sizes = micro_batches(min(sampler.target_batch, sampler.size(0)), micro_batch)
    if not layers or len(sizes) == 1:
        return []
    momentum = layers[0].momentum
    rate = (
        ""
        if momentum is None
        else f". The running averages move {len(sizes)} times per step: to match the whole batch, set their "
        f"momentum to {equivalent_momentum(momentum, len(sizes)):.4g} instead of {momentum:g} "
        "(--bn-momentum auto does this)"
    )
    who = (
        "1 BatchNorm layer computes its"
        if len(layers) == 1
        else f"{len(layers)} BatchNorm layers compute their"
    )
    size = f"{sizes[-1]} to {sizes[0]}" if sizes[-1] < sizes[0] else f"{sizes[0]}"
    return [
        f"{who} statistics over micro-batches of {size} samples, not over the batch of {sum(sizes)}: results "
        f"depend on the micro-batch{rate}"
    ]


def equivalent_momentum(momentum: float, num_micro_batches: int) -> float:
    """Return the momentum at which this many updates equal one update with ``momentum``."""
    return 1.0 - math.pow(1.0 - momentum, 1.0 / max(1, num_micro_batches))


@contextmanager
def rescaled_momentum(layers: Sequence[_BatchNorm], num_micro_batches: int) -> Iterator[None]:
    """Rescale BatchNorm momentum within the block, so that a step counts as one update.

    Layers without a momentum keep a cumulative average and are left alone.
    """
    originals = [(layer, layer.momentum) for layer in layers]
    try:
        for layer, momentum in originals:
            if momentum is not None:
                layer.momentum = equivalent_momentum(momentum, num_micro_batches)
        yield
    finally:
        for layer, momentum in originals:
            layer.momentum = momentum


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
    if sampler.epochs is not None and sampler.last_batch == "flush":
        indices.add(min(-(-sampler.samples // sampler.target_batch), sampler.total) - 1)
    sizes = [size for index in indices for size in micro_batches(share_of(sampler.size(index)), micro_batch)]
    return min(sizes, default=None)
