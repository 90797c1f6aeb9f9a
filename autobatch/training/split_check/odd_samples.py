"""Order of samples by what a wrong loss may weigh them by: the odd ones first.

Classes that few samples have, short texts and masks that hide much are all visible in the collated tensors.
Parts of two odd samples each then differ from the other parts as much as possible.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from autobatch.planning import split_evenly
from autobatch.workload.contract import Collated
from autobatch.workload.nested import tensors_of

MOST_ODD = 8
"""Samples that are odd at most."""


def odd_samples(batch: Collated, samples: int) -> list[int]:
    """Return the places of the samples that differ most from the others, at most `MOST_ODD`.

    Args:
        batch: the collated samples; tensors without a row per sample are left out.
        samples: their number.
    """
    found: dict[int, None] = {}
    figures = [figure for figure in _figures(batch, samples) if figure.min() < figure.max()]
    # The oddest of each figure first, so that no figure takes all places.
    for ends in zip(*(_by_oddness(figure) for figure in figures), strict=False):
        found |= dict.fromkeys(ends)
        if len(found) >= MOST_ODD:
            break
    return list(found)[:MOST_ODD]


def odd_sizes(samples: int, odd: int, micro_batch: int) -> list[int]:
    """Return the sizes of parts for samples of which the first ``odd`` are odd.

    Odd samples come in pairs, because a loss may not be made for a micro-batch of 1, and the others in
    micro-batches. Parts have a single sample only if the micro-batches have.
    """
    if micro_batch == 1:
        return [1] * samples
    pairs = odd // 2
    rest = samples - 2 * pairs
    return [2] * pairs + split_evenly(rest, max(1, min(math.ceil(rest / micro_batch), rest // 2)))


def _figures(batch: Collated, samples: int) -> Iterator[Tensor]:
    """Yield figures of each sample: how rare its class is, and how many of its numbers are 0 or negative."""
    for tensor in tensors_of(batch):
        if tensor.is_complex() or not tensor.dim() or len(tensor) != samples or not tensor.numel():
            continue
        rows = tensor.detach().reshape(samples, -1)
        if rows.shape[1] == 1 and not tensor.is_floating_point():
            _, classes, counts = torch.unique(rows[:, 0], return_inverse=True, return_counts=True)
            if 2 * len(counts) <= samples:  # else numbers of samples, not classes
                yield -counts[classes]
            continue
        yield (rows == 0).sum(1)
        yield (rows < 0).sum(1) if rows.dtype != torch.bool else (~rows).sum(1)


def _by_oddness(figure: Tensor) -> list[int]:
    """Return the places of a figure by their distance from its median, the most distant first."""
    distance = (figure.double() - figure.double().median()).abs()
    return [int(place) for place in distance.argsort(descending=True, stable=True)]
