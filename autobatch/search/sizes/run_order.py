"""The largest micro-batch of joined samples that fits in the order of one run.

Samples that are joined end to end, as graphs are, take memory by the sum of their sizes. The largest samples
together, which a probe runs, meet in no micro-batch of most runs. If all batches of a run are known before it
starts, its own heaviest micro-batches decide instead:

    heaviest batches of the run ──bisect──► fit alone ──► fit after hundreds of batches ──► run
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autobatch.core.records import Plan
from autobatch.footprint.size_program import SizeProgram
from autobatch.search.sizes.hazards import is_padded, largest_deviation
from autobatch.search.sizes.real_batches import (
    MOST_EVENTS,
    MOST_RUNS,
    REPLAYED,
    RUN,
    STRIDE,
    Order,
    RunBatches,
    program_for,
)
from autobatch.setup.session import Session
from autobatch.workload.contract import WholeBatchLoss, Workload
from autobatch.workload.order import GlobalBatch
from autobatch.workload.split import MicroBatchIds, Split, heaviest_batches

MOST_SAMPLES = 2**23
"""Samples of the longest run whose batches are all looked at, which takes about 3 seconds."""
MOST_DEVIATION = 1e-3
"""Share by which the numbers of a sample may be off a line over its size for the size to decide on them."""
RUN_PARTS = 4
"""Heaviest micro-batches of a batch that are run."""
RUN_HEAVIEST = 3
"""Heaviest batches of a run that are run."""


class InOrder(NamedTuple):
    """A micro-batch that fits in the order of a run."""

    micro_batch: int
    batches: int
    """Batches of the run, all of which were looked at."""
    by: Literal["replay", "run"]


def find_in_order(session: Session, plan: Plan, order: Order, cap: int) -> InOrder | None:
    """Return the largest micro-batch over that of a plan that fits in the order of its run.

    Args:
        session: the open setup.
        plan: its micro-batch fits in any order.
        order: the batches of the run.
        cap: the largest micro-batch to try.

    Returns:
        None if there is none: samples that are padded, or whose size does not decide on their memory, or an
        order that is not known.
    """
    run = _HeaviestBatches.of(session, plan, order, cap)
    if run is None:
        return None
    limits = sorted(run.heaviest)
    fitting = limits[: bisect_left(limits, True, key=lambda limit: not run.fits_alone(limit))]
    for limit in fitting[: -MOST_RUNS - 1 : -1]:
        if run.survives(limit):
            return InOrder(limit, run.batches.whole.total, "replay" if run.program else "run")
    return None


@dataclass(frozen=True)
class _HeaviestBatches:
    """The heaviest batches of a run, for several micro-batches."""

    batches: RunBatches
    program: SizeProgram | None
    """None if the step cannot be traced exactly: then batches run in place of replays."""
    heaviest: dict[int, list[int]]
    """Numbers of the heaviest batches, the heaviest first, for each micro-batch to try."""

    @classmethod
    def of(cls, session: Session, plan: Plan, order: Order, cap: int) -> _HeaviestBatches | None:
        """Look at all batches of a run; None if that says nothing about its memory."""
        sizes, workload = session.setup.worst_case.sizes(), session.setup.workload
        limits = _larger(plan.micro_batch, plan.target_batch, cap)
        if not limits:
            return None
        if sizes is None or sizes.min() == sizes.max() or isinstance(workload.loss, WholeBatchLoss):
            return None
        # A sampler of the user's may draw another order next time.
        if workload.sampler is not None or not _sums_decide(workload, sizes):
            return None
        batches = RunBatches(setup=session.setup, sizes=sizes, order=order, is_padded=False)
        whole = batches.whole
        if not 0 < whole.total * whole.target_batch <= MOST_SAMPLES:
            return None
        setup, program = program_for(session, plan)
        is_exact = program is not None and program.is_exact and program.is_linear
        heaviest = heaviest_batches(whole, sizes, limits)
        return cls(replace(batches, setup=setup), program if is_exact else None, heaviest)

    def fits_alone(self, limit: int) -> bool:
        """Return whether the heaviest batches fit one after the other."""
        if self.program is None:
            return self._run(limit, []) is None
        heavy = list(self._heavy(limit))
        return self.batches.replay(self.program, Split(), limit, batches=heavy * 2).fits

    def survives(self, limit: int) -> bool:
        """Return whether the first batches and the heaviest ones after them fit, and the heaviest run."""
        split = Split()
        if self.program is None:
            return self._run(limit, [split.parts(one, limit) for one in self.batches.first(RUN)]) is None
        a_batch = len(self.program.later.events) * math.ceil(self.batches.whole.target_batch / limit)
        first = self.batches.first(min(REPLAYED, max(1, MOST_EVENTS // max(1, a_batch))))
        found = self.batches.replay(
            self.program, split, limit, batches=chain(first, self._heavy(limit)), most_events=10 * MOST_EVENTS
        )
        return found.fits and self._run(limit, []) is None

    def _run(self, limit: int, before: Sequence[Sequence[MicroBatchIds]]) -> str | None:
        """Run the heaviest micro-batches after some batches; return the error, or None."""
        heavy = [self._heaviest_parts(batch, limit) for batch in self._heavy(limit, RUN_HEAVIEST)]
        return self.batches.run([*before, *heavy])

    def _heavy(self, limit: int, count: int | None = None) -> Iterator[GlobalBatch]:
        whole = self.batches.whole
        return (next(whole.batches(number)) for number in self.heaviest[limit][:count])

    def _heaviest_parts(self, batch: GlobalBatch, limit: int) -> list[MicroBatchIds]:
        sizes = self.batches.sizes
        parts = Split().parts(batch, limit)
        return sorted(parts, key=lambda part: -float(np.sum(sizes[part.ids])))[:RUN_PARTS]


def _sums_decide(workload: Workload, sizes: NDArray[np.float64]) -> bool:
    """Return whether samples are joined, and their sizes decide on every tensor of a micro-batch."""
    try:
        return not is_padded(workload, sizes) and largest_deviation(workload, sizes) <= MOST_DEVIATION
    except Exception:  # other stages report what the collate function raises
        return False


def _larger(micro_batch: int, target: int, cap: int) -> list[int]:
    """Return larger micro-batches that take fewer steps, about a hundredth apart, in ascending order."""
    steps = math.ceil(target / micro_batch)
    found: list[int] = []
    for count in range(steps - 1, 0, -1):
        larger = math.ceil(target / count)
        if larger <= cap and larger * STRIDE >= (found[-1] if found else micro_batch) * (STRIDE + 1):
            found.append(larger)
    return found
