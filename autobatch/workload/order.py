"""The samples of each optimizer step, their order, and their split into micro-batches.

Batches of exactly ``target_batch`` sample ids are drawn from a permutation of each epoch, which depends on
the seed and the epoch alone. A batch goes on in the next epoch where one ends. Batches are split into
micro-batches afterwards. The order of the data therefore does not depend on the micro-batch, the number of
workers, the ranks, or the step of a resume.

A sampler of the user's takes the place of the permutation. It may be random: weighted, or grouped by length.
It is drawn with generators that are seeded by the run's seed and the epoch, so that a resume needs no state.

A split changes no batch and no gradient, because a step divides Σ totals by Σ counts. The loop, the feeds and
the loader workers all ask it: which samples share a micro-batch, on which rank, and in what order. A process
that trains alone is the only rank. The arithmetic is in `autobatch.planning`.

A split by size sorts the samples, the largest first, and cuts the sorted list into contiguous groups, one
micro-batch of each for every rank. The largest come first, because large blocks then find the allocator
unfragmented, and because a step that runs out of memory does so at once. Each group is dealt to all ranks, so
that they work on samples of like sizes at the same time, and the rank with the least work so far takes the
most of it. Every rank cuts for all of them, so that they agree without a message.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from autobatch.core.errors import InputError
from autobatch.core.records import Plan, SizeCut
from autobatch.planning import FIXED_SHARE, cut_by_area, micro_batches, split_over_ranks
from autobatch.workload.contract import Workload
from autobatch.workload.data import digest_of
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


def sampler_of(
    workload: Workload, target_batch: int, seed: int = 0, steps: int | None = None, epochs: int | None = None
) -> GlobalBatchSampler:
    """Return the batches of a run over data with an index, in the order that a sampler of the user's draws.

    Raises:
        InputError: the sampler never ends, or yields nothing or no index of the data. The order raises it,
            too, if an epoch has another number of samples than the first one.
    """
    count, sampler = len(workload.train_data), workload.sampler
    batches = GlobalBatchSampler(
        samples=count, target_batch=target_batch, seed=seed, steps=steps, epochs=epochs
    )
    if sampler is None:
        return batches

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

    batches.samples, batches.order = len(order(0)), order
    return batches


def permutation(samples: int, seed: int, epoch: int) -> Integers:
    """Return the order of an epoch: ``range(samples)``, shuffled under the seed.

    NumPy keeps what `RandomState` and `MT19937` draw in all later versions (NEP 19), or a resumed run would
    repeat samples.
    """
    # NumPy, because an order is no part of the step: a budget counts the tensors of torch.
    return np.random.RandomState(np.random.MT19937(mix_seed(seed, epoch))).permutation(samples)


Sizes = NDArray[np.float64]


class MicroBatchIds(NamedTuple):
    """The sample ids of a micro-batch."""

    batch_index: int
    """Number of its batch in the run."""
    places: Sequence[int]
    """Place of each sample in the batch as it was drawn, which seeds its random draws."""
    ids: list[int]


@dataclass
class Split:
    """Micro-batches of equal counts, in the order of the batch; the counts differ by at most one.

    One number, ``micro_batch``, shrinks a split after an out-of-memory error.
    """

    rank: int = 0
    """This rank."""
    world: int = 1
    """Number of ranks, which share the batch."""
    multiple: int = 1
    """Number whose multiples all micro-batches are, but for the last one of a batch."""

    def parts(self, batch: GlobalBatch, micro_batch: int) -> list[MicroBatchIds]:
        """Return the micro-batches of this rank; empty if it takes no sample."""
        return self.of_ranks(batch, micro_batch)[self.rank]

    def rounds(self, batch: GlobalBatch, micro_batch: int) -> int:
        """Return the most micro-batches that any rank runs of a batch."""
        return max(map(len, self.of_ranks(batch, micro_batch)))

    def of_ranks(self, batch: GlobalBatch, micro_batch: int) -> list[list[MicroBatchIds]]:
        """Return the micro-batches of every rank, each of at most ``micro_batch`` samples."""
        of_ranks: list[list[MicroBatchIds]] = []
        first = 0
        for share in split_over_ranks(len(batch.ids), self.world, self.multiple):
            of_ranks.append([])
            for size in micro_batches(share, micro_batch, self.multiple):
                places = range(first, first + size)
                of_ranks[-1].append(MicroBatchIds(batch.index, places, batch.ids[first : first + size]))
                first += size
        return of_ranks

    def halved(self, part: MicroBatchIds, micro_batch: int) -> int:
        """Return the ``micro_batch`` that halves a part, which ran out of memory."""
        del micro_batch
        return self.multiple * math.ceil(len(part.ids) / self.multiple / 2)

    def of_longest(self, micro_batch: int) -> int:
        """Return the largest micro-batch of the most expensive samples."""
        return micro_batch


@dataclass(kw_only=True)
class SizeSplit(Split):
    """A split by size.

    Its ``micro_batch`` is the largest micro-batch of samples of any size. If it shrinks, the limits for all
    sizes shrink in proportion.
    """

    sizes: Sizes
    """Size of each sample of the data, by its index."""
    cut: SizeCut
    """The limit of the longest samples, whose padded size bounds that of every micro-batch."""

    @property
    def largest(self) -> int:
        """The ``micro_batch`` of a split that has not shrunk."""
        return self.cut.max_micro_batch

    def of_ranks(self, batch: GlobalBatch, micro_batch: int) -> list[list[MicroBatchIds]]:
        """See `Split.of_ranks`."""
        return [
            [MicroBatchIds(batch.index, part, [batch.ids[place] for place in part]) for part in own]
            for own in self._places(self.sizes[batch.ids], micro_batch)
        ]

    def halved(self, part: MicroBatchIds, micro_batch: int) -> int:
        """See `Split.halved`."""
        limit = int(self._limits_at(self.sizes[part.ids].max(keepdims=True), self.largest)[0])
        return min(micro_batch, math.ceil(len(part.ids) * self.largest / (2 * limit)))

    def of_longest(self, micro_batch: int) -> int:
        """See `Split.of_longest`."""
        return int(self._limits_at(np.array([self.cut.longest]), micro_batch)[0])

    def fixed_area(self, micro_batch: int) -> float:
        """Return the cost of a micro-batch besides its area, in the same unit."""
        return FIXED_SHARE * self.of_longest(micro_batch) * self.cut.longest

    def _limits_at(self, sizes: Sizes, micro_batch: int) -> NDArray[np.int64]:
        """Return the largest micro-batch of samples up to each size."""
        # A sample may have no size.
        fitting = self.cut.micro_batch * (self.cut.longest / np.maximum(sizes, 1e-9))
        limits = np.clip(fitting, 1, self.largest).astype(np.int64) * micro_batch // self.largest
        return np.maximum(limits, np.int64(1))

    def _places(self, own: Sizes, micro_batch: int) -> list[list[list[int]]]:
        """Return the places of the samples in each micro-batch of every rank."""
        # A stable sort: samples of one size keep their order.
        order = np.argsort(-own, kind="stable").tolist()
        together = self.world * self._limits_at(own[order], micro_batch)
        fixed = self.fixed_area(micro_batch)
        ends = accumulate(cut_by_area(own[order], together, fixed=fixed, ranks=self.world))
        places: list[list[list[int]]] = [[] for _ in range(self.world)]
        work = [0.0] * self.world
        for start, end in pairwise([0, *ends]):
            # The rank with the least work so far takes the largest sample, and the most of the group.
            for turn, rank in enumerate(sorted(range(self.world), key=work.__getitem__)):
                if hand := order[start + turn : end : self.world]:
                    places[rank].append(hand)
                    work[rank] += fixed + len(hand) * float(own[hand[0]])
        # There is nothing to sort for in one micro-batch.
        return [[list(range(len(own)))]] if list(map(len, places)) == [1] else places


def split_of(plan: Plan, read_sizes: Callable[[], Sizes | None], *, rank: int, world: int) -> Split:
    """Return the split of a rank in a plan.

    ``read_sizes`` returns the sizes of all samples, None if that takes too long.

    Raises:
        InputError: the plan cuts by size, and the sizes of the samples are not those that it was made for.
    """
    cut = plan.size_cut
    if cut is None:
        return Split(rank=rank, world=world, multiple=plan.multiple)
    sizes = read_sizes()
    if sizes is None or digest_of(sizes) != cut.digest:
        raise InputError(
            "the sizes of the training samples are not those that the plan was made for, so its batches "
            "would be cut at other places: give the same data, or use --split count"
        )
    return SizeSplit(sizes=sizes, cut=cut, rank=rank, world=world)
