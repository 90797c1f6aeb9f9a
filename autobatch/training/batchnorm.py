"""What a person should know before a model with BatchNorm trains in micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from autobatch.planning import micro_batches
from autobatch.workload.order import GlobalBatchSampler


def advice(model: nn.Module, sampler: GlobalBatchSampler, micro_batch: int) -> list[str]:
    """Notes on batch statistics, with the numbers; none where no layer computes any, or no window is split.

    Args:
        model: what trains.
        sampler: the windows of the run.
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
        else f"; their running averages move {len(sizes)} times a step, where a momentum of "
        f"{equivalent_momentum(momentum, len(sizes)):.4g} instead of {momentum:g} would match the whole "
        "batch (--bn-momentum auto sets it)"
    )
    return [
        f"{len(layers)} BatchNorm layers take their statistics over {sizes[-1]} to {sizes[0]} samples, not "
        f"over the {sum(sizes)} of the batch: here the micro-batch is part of the model{rate}"
    ]


def equivalent_momentum(momentum: float, num_micro_batches: int) -> float:
    """The momentum with which that many updates weigh a step as one update does with ``momentum``."""
    return 1.0 - math.pow(1.0 - momentum, 1.0 / num_micro_batches)


@contextmanager
def rescaled_momentum(layers: Sequence[_BatchNorm], num_micro_batches: int) -> Iterator[None]:
    """Inside, so many updates move the running averages as far as one would; then momenta are as they were.

    Layers without a momentum average over all that they saw, and need no other.
    """
    kept = [(layer, layer.momentum) for layer in layers]
    try:
        for layer, momentum in kept:
            if momentum is not None:
                layer.momentum = equivalent_momentum(momentum, num_micro_batches)
        yield
    finally:
        for layer, momentum in kept:
            layer.momentum = momentum


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Layers that normalise by the statistics of the batch while training."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def smallest_micro_batch(sampler: GlobalBatchSampler, micro_batch: int) -> int:
    """The fewest samples that any micro-batch of the run has; only its last windows may be short."""
    indices = {0, sampler.total - 1}
    if sampler.epochs is not None and sampler.last_batch == "flush":
        indices.add(min(-(-sampler.samples // sampler.target_batch), sampler.total) - 1)
    return min(micro_batches(sampler.size(index), micro_batch)[-1] for index in indices)
