"""The user's samples: fetch them, collate them, and find the most expensive ones.

A probe of the first samples may miss the longest one. It therefore runs the worst case: the largest
samples by the workload's `size_of`, or else by the count of numbers in a sample.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import cached_property
from itertools import chain, cycle, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from autobatch.core.errors import InputError
from autobatch.workload.contract import Collated, Workload
from autobatch.workload.nested import tensors_of
from autobatch.workload.rng import seeded
from autobatch.workload.user_code import mark_user_error, user_code

FIRST_LOOK = 64
"""Samples, spread over the data, that are read first."""
SCAN_SECONDS = 5.0
"""Time limit of a scan as long as all sizes are equal."""
LONG_SCAN_SECONDS = 60.0
"""Time limit of the scan if the sizes differ, or if a function gives them."""
MOST_SIZE = 1e15
"""Largest size of a sample: no more bytes fit anywhere, and the square of its sums is finite."""


def load_micro_batch(workload: Workload, ids: Sequence[int], *, data: Any = None) -> Collated:
    """Fetch samples by their indices and collate them, on the host.

    They are of ``data``, None for the training data.

    Raises:
        InputError: the samples cannot be collated; the message has the shapes found.
    """
    of, name = (workload.train_data, "train_data") if data is None else (data, "validation_data")
    return collate_samples(fetch(of, ids, name=name), workload.collate)


def fetch(data: Any, ids: Sequence[int], *, name: str = "train_data") -> list[Any]:
    """Read samples of map-style data, at once if it has ``__getitems__``, as torch's loader does.

    An error of the data is marked with their ``name`` and the index of the sample.
    """
    index: int | None = None
    try:  # one block for all samples, because a block of its own costs as much as reading one
        if not hasattr(data, "__getitems__"):
            samples = []
            for index in ids:
                samples.append(data[index])
            return samples
        return list(data.__getitems__(list(ids)))
    except (Exception, SystemExit) as error:
        mark_user_error(error, name if index is None else f"{name}[{index}]")
        raise


def shallow_copies(samples: Sequence[Any]) -> list[Any]:
    """Copy samples for a collate function, which may take entries out of them."""
    return [copy.copy(sample) if isinstance(sample, MutableMapping | list) else sample for sample in samples]


def collate_samples(samples: list[Any], collate: Callable[[list[Any]], Collated] | None) -> Collated:
    """Collate samples by the user's own function; None for torch's default.

    Raises:
        InputError: the samples cannot be collated; the message has the shapes found.
    """
    if collate is not None:
        with user_code("collate", collate):
            return collate(samples)
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        shapes = sorted({str([tuple(t.shape) for t in tensors_of(sample)]) for sample in samples})
        if isinstance(error, RuntimeError) and len(shapes) == 1:
            raise  # the shapes are equal, so they are not the reason; memory may be
        text = (str(error).splitlines() or [""])[0]
        raise InputError(
            f"the samples cannot be collated ({type(error).__name__}: {text}), found shapes "
            f"{', '.join(shapes[:3])}: give Workload(collate=…)"
        ) from error


class WorstCaseSampler:
    """The most expensive samples of the data, as micro-batches of any size.

    Args:
        workload: has the data, its collate function and ``size_of``.
        seed: of the data's random draws during the scan.
        clock: returns seconds, to limit the scan.
    """

    def __init__(
        self, workload: Workload, *, seed: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._workload = workload
        self._data: Any = workload.train_data
        self._seed = seed
        self._clock = clock

    @cached_property
    def _costs(self) -> dict[int, float]:
        """Cost of each sample by its index. Read once, without a trace in the caller's generators."""
        with seeded(self._seed):
            return self._scan()

    @cached_property
    def order(self) -> list[int]:
        """The samples that were read, the most expensive first."""
        return sorted(self._costs, key=lambda index: (-self._costs[index], index))

    def _scan(self) -> dict[int, float]:
        """Read some samples spread over the data, then all within the time limit.

        Raises:
            InputError: ``size_of`` returned no number from 0 to `MOST_SIZE`.
        """
        start, count, size_of = self._clock(), len(self._data), self._workload.size_of
        spread = range(0, count, max(1, count // FIRST_LOOK))[:FIRST_LOOK]
        costs: dict[int, float] = {}
        limit = SCAN_SECONDS
        for index in chain(spread, range(count)):
            if index in costs:
                continue
            if costs and self._clock() - start > limit:
                break
            with user_code(f"train_data[{index}]"):
                sample = self._data[index]
            if size_of is None:
                costs[index] = float(elements(sample))
            else:
                with user_code("size_of", size_of):
                    costs[index] = float(size_of(sample))
            if not 0 <= costs[index] <= MOST_SIZE:
                raise InputError(
                    f"Workload(size_of=…) returned {costs[index]:g} for sample {index}: it must return a "
                    f"finite number from 0 to {MOST_SIZE:g}, for example a length"
                )
            if size_of is not None or costs[index] != costs[0]:
                limit = LONG_SCAN_SECONDS
        return costs

    @property
    def notes(self) -> list[str]:
        """Remarks on the scan, one per line."""
        read, count = len(self._costs), len(self._data)
        if read == count:
            return []
        how = "Workload(size_of=…), with which all are read faster"
        if len({*self._costs.values()}) == 1:
            return [
                f"the {read:,} of {count:,} samples that were read in time have one size: else give {how}"
            ]
        return [f"the sizes of only {read:,} of {count:,} samples could be read in time: give {how}"]

    def sizes(self) -> NDArray[np.float64] | None:
        """Return the cost of each sample by its index; None if the time limit left some unread."""
        costs, count = self._costs, len(self._data)
        return np.fromiter((costs[i] for i in range(count)), float, count) if len(costs) == count else None

    def take_sizes(self, sizes: NDArray[np.float64]) -> None:
        """Take the costs that another sampler of the same data has read."""
        self._costs = dict(enumerate(sizes.tolist()))

    def largest(self) -> tuple[int, float] | None:
        """Return the index and the cost of the most expensive sample; None if all costs are equal."""
        first, last = self.order[0], self.order[-1]
        return None if self._costs[first] == self._costs[last] else (first, self._costs[first])

    def check_collate(self) -> None:
        """Collate the most expensive sample with the cheapest, unless a sampler decides what is in a batch.

        A failure shows here, before a probe takes minutes.

        Raises:
            InputError: they cannot be collated.
        """
        if self._workload.sampler is None and self.largest() is not None:
            load_micro_batch(self._workload, [self.order[0], self.order[-1]])

    def batch(self, size: int) -> Collated:
        """Collate the ``size`` most expensive samples; repeat them if the data has fewer."""
        return load_micro_batch(self._workload, list(islice(cycle(self.order), size)))


def elements(sample: Any) -> int:
    """Count the numbers in a sample: elements of tensors, arrays, images and lists, characters of text."""
    if isinstance(sample, Tensor):
        return sample.numel()
    if isinstance(sample, str | bytes):
        return len(sample)
    if isinstance(sample, Mapping | list | tuple):
        return sum(map(elements, sample.values() if isinstance(sample, Mapping) else sample))
    size = getattr(sample, "size", None)
    if isinstance(size, int):  # an array
        return size
    if isinstance(size, tuple) and all(isinstance(edge, int) for edge in size):  # an image
        return math.prod(size)
    return sum(tensor.numel() for tensor in tensors_of(sample)) or 1
