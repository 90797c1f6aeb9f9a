"""The samples of each optimizer step, and their order.

Batches of exactly ``target_batch`` sample ids are drawn from a permutation of each epoch, which depends on
the seed and the epoch alone. A batch goes on in the next epoch where one ends. Batches are split into
micro-batches afterwards. The order of the data therefore does not depend on the micro-batch, the number of
workers, the ranks, or the step of a resume.

A sampler of the user's takes the place of the permutation. It may be random: weighted, or grouped by length.
It is drawn with generators that are seeded by the run's seed and the epoch, so that a resume needs no state.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from autobatch.core.errors import InputError
from autobatch.workload.contract import Workload
from autobatch.workload.rng import mix_seed, preserved_generators, seeded
from autobatch.workload.user_code import user_code

Integers = NDArray[np.int64]
Order: TypeAlias = Callable[[int], Integers]
"""Returns the samples of an epoch in order, always equally many."""
ORDER_VERSION = 4
"""Version of the order of an epoch, kept in checkpoints. Raise it if `permutation` changes any order."""
MOST_PASSES = 100
"""Times the size of the data above which a sampler counts as one that never ends."""


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The samples of one optimizer step, over all ranks."""

    index: int
    """Number of the batch in the run, from 0."""
    ids: list[int]


@dataclass(kw_only=True)
class GlobalBatchSampler:
    """The batches of a run. Any batch can be found without drawing those before it."""

    samples: int
    """Number of samples in an epoch."""
    target_batch: int
    seed: int
    steps: int | None = None
    """Optimizer steps of the run; None for no limit. The run ends at the smaller of ``steps`` and
    ``epochs``."""
    epochs: int | None = None
    """Passes over the data; None for no limit."""
    order: Order | None = None
    """Order of an epoch; None for the permutation that the seed and the epoch give."""

    @property
    def total(self) -> int:
        """Number of batches in the whole run; the last one has the samples that are left."""
        if self.epochs is None:
            return self.steps or 0
        batches = math.ceil(self.epochs * self.samples / self.target_batch)
        return batches if self.steps is None else min(batches, self.steps)

    def size(self, index: int) -> int:
        """Return the number of samples in a batch: the target, or fewer if the run ends within it."""
        return self.seen(index + 1) - self.seen(index)

    def seen(self, index: int) -> int:
        """Return the number of samples taken before a batch."""
        taken = index * self.target_batch
        return taken if self.epochs is None else min(taken, self.epochs * self.samples)

    def batches(self, start: int = 0) -> Iterator[GlobalBatch]:
        """Draw the batches of the run, from number ``start`` on."""
        drawn: int | None = None
        order_of = self.order or partial(permutation, self.samples, self.seed)
        for index in range(start, self.total):
            first, size = index * self.target_batch, self.size(index)
            ids: list[int] = []
            while len(ids) < size:
                epoch, place = divmod(first + len(ids), self.samples)
                if epoch != drawn:
                    drawn, order = epoch, order_of(epoch)
                # As plain integers, which any data take as an index.
                ids += order[place : place + size - len(ids)].tolist()
            yield GlobalBatch(index, ids)

    def state_dict(self) -> dict[str, Any] | None:
        """Return what else the coming batches depend on; None if the number of the next one tells all."""
        return None

    def load_state_dict(self, state: dict[str, Any] | None) -> list[str]:
        """Take over a state; return in words how the data continue, if that is worth a note."""
        return []


def epoch_of(workload: Workload, seed: int) -> tuple[int, Order | None]:
    """Return the samples of an epoch, and the order that a sampler of the user's draws for each epoch.

    The order is None for a permutation per epoch.

    Raises:
        InputError: the sampler never ends, or yields nothing or no index of the data. The order raises it,
            too, if an epoch has another number of samples than the first one.
    """
    count, sampler = len(workload.train_data), workload.sampler
    if sampler is None:
        return count, None

    @lru_cache(maxsize=2)
    def order(epoch: int) -> Integers:
        indices: list[int] = []
        own_seed, limit = mix_seed(seed, epoch), MOST_PASSES * count
        with seeded(own_seed % 2**32), preserved_generators(sampler, seed=own_seed), user_code("sampler"):
            set_epoch = getattr(sampler, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
            for drawn in sampler:
                indices += map(operator.index, drawn if isinstance(drawn, list | tuple) else [drawn])
                if len(indices) > limit:
                    break
        wrong = [f"index {place}" for place in indices if not 0 <= place < count]
        if wrong or not 0 < len(indices) <= limit:
            what = wrong[0] if wrong else f"over {limit:,} samples" if indices else "no sample"
            raise InputError(
                f"the sampler drew {what} in epoch {epoch + 1}: it must draw indices from 0 to "
                f"{count - 1:,}, and end"
            )
        if epoch and len(indices) != len(order(0)):
            raise InputError(
                f"the sampler drew {len(indices):,} samples in epoch {epoch + 1} and {len(order(0)):,} in "
                "epoch 1, so the steps of the run cannot be counted: let every epoch have the same number"
            )
        return np.array(indices)

    return len(order(0)), order


def permutation(samples: int, seed: int, epoch: int) -> Integers:
    """Return the order of an epoch: ``range(samples)``, shuffled under the seed.

    NumPy keeps what `RandomState` and `MT19937` draw in all later versions (NEP 19), or a resumed run would
    repeat samples.
    """
    # NumPy, because an order is no part of the step: a budget counts the tensors of torch.
    return np.random.RandomState(np.random.MT19937(mix_seed(seed, epoch))).permutation(samples)
