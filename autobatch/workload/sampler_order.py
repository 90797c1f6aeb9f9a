"""The order of an epoch that a sampler of the user's draws.

A sampler may be random: weighted, grouped by length. It is drawn with generators that are seeded by the run's
seed and the epoch, so that the order of an epoch depends on these two alone. A resume then needs no state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch

from autobatch.core.errors import InputError
from autobatch.workload.contract import Workload, kind_of
from autobatch.workload.order import Order, mix_seed
from autobatch.workload.rng import preserved_random_state, seed_everything
from autobatch.workload.user_code import user_code

MOST_PASSES = 1000
"""Times the size of the data above which a sampler counts as one that never ends."""


def epoch_of(workload: Workload, seed: int) -> tuple[int, Order | None]:
    """Return the samples of an epoch, and their order; None for a permutation per epoch.

    Raises:
        InputError: the sampler of the workload is invalid.
    """
    count = len(workload.train_data)  # type: ignore[arg-type]
    if workload.sampler is None:
        return count, None
    order = SamplerOrder(workload.sampler, count, seed)
    return order.samples, order


class SamplerOrder:
    """The order that a sampler draws for each epoch.

    Args:
        sampler: yields indices, or lists of indices.
        count: number of samples in the data.
        seed: of the run.

    Raises:
        InputError: the sampler never ends, yields nothing, or yields no index of the data.
    """

    def __init__(self, sampler: Iterable[Any], count: int, seed: int) -> None:
        self._sampler = sampler
        self._count = count
        self._seed = seed
        self._drawn: tuple[int, list[int]] = (0, self._draw(0))
        self.samples = len(self._drawn[1])
        """Samples of an epoch."""

    def __call__(self, epoch: int) -> list[int]:
        """Return the samples of an epoch in order.

        Raises:
            InputError: the epoch has another number of samples than the first one.
        """
        if self._drawn[0] != epoch:
            self._drawn = (epoch, self._draw(epoch))
        found = self._drawn[1]
        if len(found) != self.samples:
            raise InputError(
                f"the sampler drew {len(found):,} samples in epoch {epoch + 1} and {self.samples:,} in epoch "
                "1, so the steps of the run cannot be counted: let every epoch have the same number"
            )
        return found

    def _draw(self, epoch: int) -> list[int]:
        seed = mix_seed(self._seed, epoch)
        limit = MOST_PASSES * self._count
        with preserved_random_state(), _seeded_generators(self._sampler, seed), user_code("sampler"):
            seed_everything(seed % 2**32)
            set_epoch = getattr(self._sampler, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
            found = list(islice(_flat(self._sampler), limit + 1))
        wrong = next((one for one in found if not 0 <= one < self._count), None)
        if len(found) > limit or not found or wrong is not None:
            what = (
                f"{wrong}" if wrong is not None else "no sample" if not found else f"over {limit:,} samples"
            )
            raise InputError(
                f"the sampler drew {what} in epoch {epoch + 1}: it must draw indices from 0 to "
                f"{self._count - 1:,}, and end"
            )
        return found


def _flat(sampler: Iterable[Any]) -> Iterator[int]:
    """Yield the indices of a sampler, or of the batches of a batch sampler."""
    for one in sampler:
        if isinstance(one, list | tuple):
            yield from map(int, one)
        elif hasattr(one, "__index__"):
            yield one.__index__()
        else:
            raise InputError(f"the sampler drew {kind_of(one)}: it must draw indices, or lists of indices")


@contextmanager
def _seeded_generators(sampler: object, seed: int) -> Iterator[None]:
    """Seed the generators that a sampler, or the sampler within a batch sampler, holds, within the block."""
    holders = (sampler, getattr(sampler, "sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    generators = [one for one in found if isinstance(one, torch.Generator)]
    states = [one.get_state() for one in generators]
    try:
        for one in generators:
            one.manual_seed(seed)
        yield
    finally:
        for one, state in zip(generators, states, strict=True):
            one.set_state(state)
