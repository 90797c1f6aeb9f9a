"""Counts of items: what a `Loss` counts, and what the data of a batch tell before it trains."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Real
from typing import Any

from torch import Tensor

from autobatch.core.errors import InputError
from autobatch.workload.contract import Collated, kind_of
from autobatch.workload.nested import form_of
from autobatch.workload.user_code import user_code


class CountsAhead:
    """Counts that follow from the data alone, summed over the micro-batches of a batch before they train.

    Args:
        function: the ``counts`` of `autobatch.Workload`.
    """

    def __init__(self, function: Callable[[Collated], Any]) -> None:
        self._function = function
        self.sums: dict[str, float] | None = None
        """Counts of the batch by term, over all ranks; None if a step is only traced."""
        self.sum_over_ranks: Callable[[dict[str, float] | None], dict[str, float]] = lambda own: own or {}
        """Returns the sums of the counts of all ranks; all of them call it, one that has failed with None."""

    def ahead(self, fetched: Iterable[tuple[Collated, int]]) -> Iterator[tuple[Collated, int]]:
        """Count micro-batches of the host, then return them; hold none."""
        try:
            kept = deque(fetched)
            own = self._count(batch for batch, _ in kept)
        except Exception:
            self.sum_over_ranks(None)
            raise
        self.sums = self.sum_over_ranks(own)
        return _drained(kept)

    def _count(self, batches: Iterable[Collated]) -> dict[str, float]:
        sums: dict[str, float] = {}
        for batch in batches:
            with user_code("counts", self._function):
                counts = self._function(batch)
                if not isinstance(counts, Mapping) or not counts:
                    found = "an empty one" if isinstance(counts, Mapping) else kind_of(counts)
                    raise InputError(
                        f"counts=… must return a mapping of the names of terms to their counts, found {found}"
                    )
                for name, count in counts.items():
                    check_count(count, f"{name!r} in counts=…")
                    check_count(value := float(count), f"{name!r} in counts=…")
                    sums[name] = sums.get(name, 0.0) + value
        return sums


def _drained(kept: deque[tuple[Collated, int]]) -> Iterator[tuple[Collated, int]]:
    while kept:
        yield kept.popleft()


def check_count(count: Any, whose: str) -> None:
    """Check that a count is a number of items, or a 0-d tensor, which is read after the batch.

    Raises:
        InputError: it is neither.
    """
    if not (count.dim() == 0 if isinstance(count, Tensor) else isinstance(count, Real)):
        raise InputError(f"the count of {whose} must be a number or a 0-d tensor, found {form_of(count)}")
    if not isinstance(count, Tensor) and not 0 <= count < math.inf:
        raise InputError(
            f"the count of {whose} must be finite and at least 0, found {count:g}, so no step was taken: "
            "return the number of items that its total sums over"
        )
