"""The samples of each optimizer step, and their order.

Batches of exactly ``target_batch`` sample ids are drawn from a permutation of each epoch, which depends on
the seed and the epoch alone. A batch goes on in the next epoch where one ends. The permutation is computed
for any place at once, so no large epoch is held in memory. Batches are split into micro-batches afterwards.
The order of the data therefore does not depend on the micro-batch, the number of workers, the ranks, or the
step of a resume.

A sampler of the user's takes the place of the permutation. It may be random: weighted, or grouped by length.
It is drawn with generators that are seeded by the run's seed and the epoch, so that a resume needs no state.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from autobatch.core.errors import InputError
from autobatch.workload.contract import Workload, kind_of
from autobatch.workload.rng import (
    preserved_generators,
    preserved_random_state,
    seed_everything,
    seed_generator,
)
from autobatch.workload.user_code import user_code

Integers = NDArray[np.int64]
Order: TypeAlias = Callable[[int], list[int]]
"""Returns the samples of an epoch in order, always equally many."""
ORDER_VERSION = 2
"""Version of the order of an epoch, kept in checkpoints. Raise it if `permutation` changes any order."""
BLOCK = 4096
"""Places of an epoch that are computed at once, because many small arrays cost more than a large one."""
SMALL_EPOCH = 2**16
"""Most samples of an epoch that is computed and held as a whole, in 2.5 MB at most."""
ROUNDS = 8
"""Rounds of the Feistel network; four suffice in theory (Luby and Rackoff 1988)."""
SMALL_BITS = 12
"""Bits of a domain up to which halves are so small that more rounds are needed."""
ROUNDS_IF_SMALL = 20
MOST_PASSES = 1000
"""Times the size of the data above which a sampler counts as one that never ends."""
_MASK32 = 2**32 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
"""Increment of SplitMix64."""


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The samples of one optimizer step, over all ranks."""

    index: int
    """Number of the batch in the run, from 0."""
    epoch: int
    """Epoch of the first sample, from 0."""
    ids: list[int]


@dataclass(frozen=True, kw_only=True)
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

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in which an epoch ends; the last one also begins the next epoch."""
        return math.ceil(self.samples / self.target_batch)

    def size(self, index: int) -> int:
        """Return the number of samples in a batch: the target, or fewer if the run ends within it."""
        return self.seen(index + 1) - self.seen(index)

    def seen(self, index: int) -> int:
        """Return the number of samples taken before a batch."""
        taken = index * self.target_batch
        return taken if self.epochs is None else min(taken, self.epochs * self.samples)

    def batches(self, start: int = 0) -> Iterator[GlobalBatch]:
        """Draw the batches of the run, from number ``start`` on."""
        block: list[int] = []
        block_at = -1
        """Place of the block in all epochs in a row."""
        block_size = self._block_size
        for index in range(start, self.total):
            first, size = index * self.target_batch, self.size(index)
            offset = first - block_at
            # Most batches lie in the block of the one before.
            ids = block[offset : offset + size]
            while len(ids) < size:
                epoch, place = divmod(first + len(ids), self.samples)
                number, offset = divmod(place, block_size)
                block, block_at = self._block(epoch, number), first + len(ids) - offset
                ids += block[offset : offset + size - len(ids)]
            yield GlobalBatch(index, first // self.samples, ids)

    def state_dict(self) -> dict[str, Any] | None:
        """Return what else the coming batches depend on; None if the number of the next one tells all."""
        return None

    def load_state_dict(self, state: dict[str, Any] | None) -> list[str]:
        """Take over a state; return in words how the data continue, if that is worth a note."""
        return []

    def _block(self, epoch: int, number: int) -> list[int]:
        """Draw the samples of an epoch that have the places of a block."""
        start = number * self._block_size
        stop = start + self._block_size
        if self.order is not None:
            return self.order(epoch)[start:stop]
        return permutation(self.samples, seed=self.seed, epoch=epoch, start=start, stop=stop)

    @property
    def _block_size(self) -> int:
        return self.samples if self.samples <= SMALL_EPOCH else BLOCK


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
    """The order that a sampler of the user's draws for each epoch.

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
        self._last = 0, self._draw(0)
        self.samples = len(self._last[1])
        """Samples of an epoch."""

    def __call__(self, epoch: int) -> list[int]:
        """Return the samples of an epoch in order.

        Raises:
            InputError: the epoch has another number of samples than the first one.
        """
        if self._last[0] != epoch:
            self._last = epoch, self._draw(epoch)
        found = self._last[1]
        if len(found) != self.samples:
            raise InputError(
                f"the sampler drew {len(found):,} samples in epoch {epoch + 1} and {self.samples:,} in epoch "
                "1, so the steps of the run cannot be counted: let every epoch have the same number"
            )
        return found

    def _draw(self, epoch: int) -> list[int]:
        seed = mix_seed(self._seed, epoch)
        limit = MOST_PASSES * self._count
        with preserved_random_state(), preserved_generators(self._sampler) as own, user_code("sampler"):
            seed_everything(seed % 2**32)
            for generator in own:
                seed_generator(generator, seed)
            set_epoch = getattr(self._sampler, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
            found = list(islice(_flat(self._sampler), limit + 1))
        wrong = [str(one) for one in found if not 0 <= one < self._count]
        if len(found) > limit or not found or wrong:
            what = wrong[0] if wrong else "no sample" if not found else f"over {limit:,} samples"
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


def order_digest(order: Order) -> str:
    """Return a text that tells an order from others, by its first epoch."""
    return hashlib.sha256(repr(order(0)).encode()).hexdigest()[:16]


def permutation(samples: int, *, seed: int, epoch: int, start: int = 0, stop: int | None = None) -> list[int]:
    """Return the order of an epoch, or the part of it from ``start`` to ``stop``.

    The order is a permutation of ``range(samples)`` that is computed and never stored: a Feistel network
    (Black and Rogaway 2002, "Ciphers with arbitrary finite domains") on the next power of two. An image
    outside of the range is permuted again until it lies within, which takes fewer than two passes on average.

    Args:
        samples: number of samples, below 2^62.
        seed: any integer, taken modulo 2^64.
        epoch: from 0.
        start: first place.
        stop: place after the last; None for the end.
    """
    bits = (samples - 1).bit_length()
    keys = _round_keys(seed, epoch, ROUNDS_IF_SMALL if bits <= SMALL_BITS else ROUNDS)
    stop = samples if stop is None else min(stop, samples)
    # NumPy, because an order is no part of the step: a budget counts the tensors of torch.
    images: Callable[[Integers], Integers] = partial(_feistel, bits=bits, keys=keys)
    if samples <= SMALL_EPOCH:
        # One evaluation of all values, and further passes are look-ups.
        images = images(np.arange(2**bits)).__getitem__
    ids = images(np.arange(start, stop))
    outside = np.flatnonzero(ids >= samples)
    while len(outside):
        again = images(ids[outside])
        ids[outside] = again
        outside = outside[again >= samples]
    found: list[int] = ids.tolist()
    return found


def _feistel(values: Integers, bits: int, keys: list[tuple[int, int]]) -> Integers:
    """Permute integers of ``bits`` bits: hash each half in turn into the other."""
    low_bits = (bits + 1) // 2
    low_mask, high_mask = (1 << low_bits) - 1, (1 << bits - low_bits) - 1
    low = (values & low_mask).astype(np.uint32)
    high = (values >> low_bits).astype(np.uint32)
    for number, (first, second) in enumerate(keys):
        if number % 2:
            low ^= _hash32(high, first, second) & np.uint32(low_mask)
        else:
            high ^= _hash32(low, first, second) & np.uint32(high_mask)
    return (high.astype(np.int64) << low_bits) | low.astype(np.int64)


def _hash32(values: NDArray[np.uint32], first: int, second: int) -> NDArray[np.uint32]:
    """Hash integers of 32 bits under two keys of 32 bits; products wrap around.

    The constants are those of lowbias32 (Wellons, hash-prospector).
    """
    hashed = values ^ np.uint32(first)
    hashed ^= hashed >> np.uint32(16)
    hashed *= np.uint32(0x7FEB352D)
    hashed ^= np.uint32(second)
    hashed ^= hashed >> np.uint32(15)
    hashed *= np.uint32(0x846CA68B)
    hashed ^= hashed >> np.uint32(16)
    return hashed


def _round_keys(seed: int, epoch: int, rounds: int) -> list[tuple[int, int]]:
    """Return two keys of 32 bits per round, from SplitMix64 (Steele et al. 2014)."""
    state = mix_seed(seed, epoch)
    mixed = [_mix64(state + number * _GOLDEN_GAMMA) for number in range(1, rounds + 1)]
    return [(key & _MASK32, key >> 32) for key in mixed]


def mix_seed(seed: int, epoch: int) -> int:
    """Return a seed of 64 bits for an epoch of a run."""
    # The seed is mixed before the epoch is added, so that epochs of neighbouring seeds do not coincide.
    return _mix64(_mix64(seed % 2**64) + epoch)


def _mix64(value: int) -> int:
    """Return the output of SplitMix64 for a state, taken modulo 2^64."""
    value = (value + _GOLDEN_GAMMA) % 2**64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
    return value ^ (value >> 31)
