"""BatchNorm in micro-batches: a note with the numbers, and a check that no layer gets a single sample."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from autobatch.core.errors import InputError
from autobatch.core.records import Plan
from autobatch.planning import micro_batches, split_over_ranks
from autobatch.workload.order import GlobalBatchSampler


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


def check_batch_norms(model: nn.Module, plan: Plan, sampler: GlobalBatchSampler) -> list[str]:
    """Return notes on the batch statistics of a run, none of whose micro-batches may be a single sample.

    Raises:
        InputError: a BatchNorm would get a single sample.
    """
    norms, last = batch_norms(model), sampler.size(sampler.total - 1)
    for size in (sampler.target_batch, last):  # only the last batch of a run may be short
        shares = split_over_ranks(size, plan.world_size, plan.multiple)
        alone = any(1 in micro_batches(share, plan.micro_batch_of_longest) for share in shares)
        if alone and any(isinstance(norm, nn.BatchNorm1d) for norm in norms):
            raise InputError(
                f"BatchNorm needs 2 samples, and this run has a micro-batch of 1 (its last batch has {last} "
                "samples): choose a target batch that leaves no single sample, or --steps instead of --epochs"
            )
    first = micro_batches(min(sampler.target_batch, sampler.size(0)), plan.micro_batch_of_longest)
    return statistics_notes([norm.momentum for norm in norms], first)
