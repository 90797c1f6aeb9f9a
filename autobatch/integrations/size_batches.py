"""Batches that are cut by the sizes of their samples, for a training loop of the user's own.

All samples of a batch are read first, in the order in which they were drawn, so that their random draws are
those of a split by count. No size is known before, so data of any kind can be cut, streams too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from autobatch.core.records.plan import Plan, SizeCut
from autobatch.integrations.data_source import DataSource
from autobatch.workload.contract import Collated
from autobatch.workload.data import size_of_sample
from autobatch.workload.order import GlobalBatch
from autobatch.workload.size_split import SizeSplit


class CutBySize(NamedTuple):
    """Rule of a split by size, and the function that gives the size of a sample."""

    rule: SizeCut
    size_of: Callable[[Any], float] | None
    """None to count the numbers in a sample."""

    def micro_batches(
        self, source: DataSource, index: int, drawn: list[Any]
    ) -> Iterator[tuple[Collated, int]]:
        """Read the samples of a batch and yield its micro-batches, each with its number of samples.

        Raises:
            InputError: a size is invalid.
        """
        samples = source.samples_of(drawn)
        found = [size_of_sample(sample, self.size_of, place) for place, sample in enumerate(samples)]
        split = SizeSplit(sizes=np.array(found), cut=self.rule)
        for part in split.parts(GlobalBatch(index, 0, list(range(len(samples)))), split.largest):
            yield source.collate([samples[place] for place in part.ids]), len(part.ids)


def cut_of(plan: Plan, source: DataSource, size_of: Callable[[Any], float] | None) -> CutBySize | None:
    """Return how a plan cuts batches by size.

    Returns:
        None to split by count: the plan does so, the batches are collated already, or the sizes of the plan
        come from a function that is missing here.
    """
    rule = plan.size_cut
    if rule is None or source.is_batched or rule.by_size_of != (size_of is not None):
        return None
    return CutBySize(rule, size_of)
