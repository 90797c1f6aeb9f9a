"""The user's samples: fetching and joining them, and finding the costliest.

A probe that runs the first samples of the data says nothing of the longest one, so it runs the costliest: by
the workload's `size_of`, else by the elements of the tensors that a sample holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from torch.utils.data import default_collate

from autobatch.errors import InputError
from autobatch.step import tensors_of
from autobatch.workload import Batch, Workload, user_code

FIRST_LOOK = 64
"""Samples, spread over the data, whose sizes say whether they differ at all."""
SCAN_SECONDS = 5.0
"""A scan of all samples may take this long where the first look saw no difference."""
LONG_SCAN_SECONDS = 60.0
"""… and this long where it did."""


def join(workload: Workload, ids: Sequence[int], *, data: Any = None) -> Batch:
    """Fetch samples and join them to a batch, on the host.

    Raises:
        InputError: the samples cannot be joined; says which sizes were found.
    """
    source = workload.train_data if data is None else data
    with user_code("data"):
        samples = [source[index] for index in ids]
    if workload.collate is not None:
        with user_code("collate"):
            return workload.collate(samples)
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError, ValueError) as error:
        shapes = sorted({str([tuple(t.shape) for t in tensors_of(sample)]) for sample in samples})
        raise InputError(
            f"the samples cannot be joined to a batch ({type(error).__name__}: {str(error).splitlines()[0]}); "
            f"shapes found: {', '.join(shapes[:3])}; give Workload(collate=…)"
        ) from error


class Costliest:
    """The costliest samples of the data, as batches of any size.

    Args:
        workload: what the user handed over.
        clock: seconds; bounds the scan.
    """

    def __init__(self, workload: Workload, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._workload = workload
        self.notes: list[str] = []
        self._order = self._ranked(clock)

    def batch(self, size: int) -> Batch:
        """Join the ``size`` costliest samples, over again from the first where the data has fewer."""
        count = len(self._order)
        return join(self._workload, [self._order[i % count] for i in range(size)])

    def _ranked(self, clock: Callable[[], float]) -> list[int]:
        count = len(self._workload.train_data)  # type: ignore[arg-type]
        stride = max(1, count // FIRST_LOOK)
        start = clock()
        looked = {index: self._cost(index) for index in islice(range(0, count, stride), FIRST_LOOK)}
        differ = len(set(looked.values())) > 1
        limit = LONG_SCAN_SECONDS if differ or self._workload.size_of is not None else SCAN_SECONDS
        costs = dict(looked)
        for index in range(count):
            if index not in costs:
                if clock() - start > limit:
                    self.notes.append(
                        f"the sizes of {len(costs):,} of {count:,} samples were read in {limit:.0f} s: "
                        "give Workload(size_of=…) for a quicker and complete answer"
                    )
                    break
                costs[index] = self._cost(index)
        return sorted(costs, key=lambda index: (-costs[index], index))

    def _cost(self, index: int) -> float:
        with user_code("data"):
            sample = self._workload.train_data[index]
        if self._workload.size_of is not None:
            with user_code("size_of"):
                return float(self._workload.size_of(sample))
        return float(sum(tensor.numel() for tensor in tensors_of(sample)) or _length(sample))


def _length(sample: Any) -> int:
    """Elements of a sample that holds no tensor: arrays, lists of ids, text."""
    if isinstance(sample, str | bytes):
        return len(sample)
    if isinstance(sample, dict):
        return sum(_length(value) for value in sample.values())
    size = getattr(sample, "size", None)
    if isinstance(size, int):
        return size
    if isinstance(sample, list | tuple):
        return sum(_length(value) for value in sample)
    return 1
