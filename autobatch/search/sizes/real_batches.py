"""The check of a limit against the batches that training will run, if samples differ in size.

The most expensive samples bound the live memory, but micro-batches of many shapes fragment a caching
allocator. So hundreds of batches are replayed in its model, in the order and the split of the run. If the
step cannot be traced, a few of them are run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autobatch.core.errors import AutobatchError
from autobatch.core.knobs import PRECISION, memory_signature
from autobatch.core.records import Plan
from autobatch.footprint.size_program import Shape, SizeProgram
from autobatch.footprint.size_replay import BatchReplay, replay_batches
from autobatch.search.sizes.curve import CurvePoint, curve_of, trace_sizes
from autobatch.search.sizes.hazards import is_padded
from autobatch.setup.rehearsal import batch_of, rehearse
from autobatch.setup.session import Session
from autobatch.setup.setup import Setup, with_knobs
from autobatch.setup.trace import setting_of
from autobatch.workload.contract import WholeBatchLoss
from autobatch.workload.order import GlobalBatch, GlobalBatchSampler, LastBatch, epoch_of
from autobatch.workload.rng import preserved_random_state
from autobatch.workload.split import MicroBatchIds, Split, size_of_part

Sizes = NDArray[np.float64]
REPLAYED = 300
"""Batches that are replayed."""
MOST_EVENTS = 2_000_000
"""Allocations and frees after which a replay ends, about 4 seconds."""
RUN = 6
"""Batches that are run if a step cannot be traced."""
ASSUMED_STEPS = 4
"""Micro-batches of a batch whose size is unknown."""
STRIDE = 100
"""Candidates of a search without a target batch are a hundredth apart."""
MOST_RUNS = 8
"""Candidates that are run."""


class Order(NamedTuple):
    """The order of the data of a run: plain values."""

    target_batch: int | None
    """None if unknown."""
    seed: int
    last_batch: LastBatch = "carry"
    steps: int | None = None
    """Optimizer steps of the run; None if unknown, as are ``epochs``."""
    epochs: int | None = None


class Survivor(NamedTuple):
    """The largest micro-batch that real batches survive."""

    micro_batch: int
    batches: int
    """Batches that were replayed or run."""
    is_replayed: bool
    is_exact: bool = True
    """False if the replay bounds some allocations from above."""


@dataclass(frozen=True)
class TracedSizes:
    """The program of a setup over sizes, kept in its session; None if it cannot be traced."""

    program: SizeProgram | None


@dataclass(frozen=True, kw_only=True)
class RunBatches:
    """The first batches of a run, for replays and for runs."""

    setup: Setup
    sizes: Sizes
    """Size of each sample, by its index."""
    order: Order
    is_padded: bool = True
    """False if the mean size of a micro-batch decides on its memory."""

    @property
    def whole(self) -> GlobalBatchSampler:
        """The batches of the whole run, whose steps or epochs are known."""
        return self._sampler(self.order.steps, self.order.epochs)

    def first(self, count: int) -> Iterator[GlobalBatch]:
        """Return the first batches of the run."""
        return self._sampler(count).batches()

    def _sampler(self, steps: int | None, epochs: int | None = None) -> GlobalBatchSampler:
        target = self.order.target_batch
        assert target is not None
        samples, order = epoch_of(self.setup.workload, self.order.seed)
        # A run that drops every batch does not start, and another stage says so.
        last = "carry" if samples < target else self.order.last_batch
        return GlobalBatchSampler(
            samples=samples,
            target_batch=target,
            seed=self.order.seed,
            steps=steps,
            epochs=epochs,
            last_batch=last,
            order=order,
        )

    def replay(
        self,
        program: SizeProgram,
        split: Split,
        micro_batch: int,
        *,
        batches: Iterable[GlobalBatch] | None = None,
        most_events: int = MOST_EVENTS,
    ) -> BatchReplay:
        """Replay batches in an empty allocator with the budget as its limit; the first ones by default."""
        chosen = self.first(REPLAYED) if batches is None else batches
        shapes = ([self._shape(part) for part in split.parts(batch, micro_batch)] for batch in chosen)
        return replay_batches(program, shapes, self.setup.device.new_allocator(), most_events=most_events)

    def run(self, batches: Iterable[Sequence[MicroBatchIds]]) -> str | None:
        """Run batches, given as their micro-batches, within the budget, on copies of the weights.

        Returns:
            The out-of-memory error of a batch that does not fit; None if all fit.
        """
        chosen = (batch_of(self.setup.workload, parts) for parts in batches)
        failure = rehearse(self.setup, chosen, within_budget=True).failure
        return None if failure is None else failure.reason

    def _shape(self, part: MicroBatchIds) -> Shape:
        return Shape(len(part.ids), size_of_part(self.sizes[part.ids], is_padded=self.is_padded))

    def run_first(self, split: Split, micro_batch: int, *, count: int) -> str | None:
        """Run the first batches; see `run`."""
        return self.run(split.parts(batch, micro_batch) for batch in self.first(count))


def find_survivor(session: Session, limit: int, order: Order) -> Survivor | None:
    """Return the largest micro-batch up to a limit that real batches survive.

    Args:
        session: the open setup.
        limit: the largest micro-batch that fits on the most expensive samples.
        order: the batches of the run.

    Returns:
        None if real batches need not be tried: samples of one size, or an allocator without a cache. Also
        None if sizes are unknown, or if no candidate survives.
    """
    setup, sizes = session.setup, session.setup.worst_case.sizes()
    caches = setup.device.allocator_config is not None
    if sizes is None or sizes.min() == sizes.max() or not caches:
        return None
    if isinstance(setup.workload.loss, WholeBatchLoss):
        return None
    program, split = program_of(session, sizes), Split()
    joins = program is not None and joins_samples(setup, sizes, program)
    tries = 0
    for micro_batch, target in _candidates(limit, order.target_batch):
        batches = RunBatches(
            setup=setup, sizes=sizes, order=order._replace(target_batch=target), is_padded=not joins
        )
        if program is not None:
            found = batches.replay(program, split, micro_batch)
            if found.fits:
                return Survivor(micro_batch, found.batches, True, program.is_exact)
            continue
        tries += 1
        if batches.run_first(split, micro_batch, count=RUN) is None:
            return Survivor(micro_batch, RUN, False)
        if tries == MOST_RUNS:
            return None
    return None


def find_curve(session: Session, limit: int, cap: int) -> list[CurvePoint] | None:
    """Return the largest micro-batch of samples up to several sizes, by replay.

    Args:
        session: the open setup.
        limit: the largest micro-batch of the most expensive samples.
        cap: the largest micro-batch to try.

    Returns:
        None if the step is no exact program of micro-batch and size.
    """
    setup, sizes = session.setup, session.setup.worst_case.sizes()
    program = None if sizes is None else program_of(session, sizes)
    if sizes is None or program is None or not program.is_exact:
        return None
    return curve_of(program, sizes, setup.device.new_allocator, limit=limit, cap=cap)


def joins_samples(setup: Setup, sizes: Sizes, program: SizeProgram) -> bool:
    """Return whether a micro-batch has the memory of as many samples of their mean size.

    It has if samples are joined end to end, and no allocation grows faster than a sample.
    """
    return program.is_linear and not is_padded(setup.workload, sizes)


def program_of(session: Session, sizes: Sizes) -> SizeProgram | None:
    """Trace the setup of a session over sizes, once; None if that is not possible."""
    kept = session.find(TracedSizes)
    return (kept or session.keep(TracedSizes(trace_setup(session.setup, sizes)))).program


def program_for(session: Session, plan: Plan) -> tuple[Setup, SizeProgram | None]:
    """Return the setup of a plan's configuration, with its program over sizes; None if it has none."""
    setup = with_knobs(session.setup, {**plan.knobs, PRECISION: plan.precision})
    sizes = setup.worst_case.sizes()
    if sizes is None:
        return setup, None
    # Another precision, and every knob that changes memory, has a program of its own.
    is_other = bool(memory_signature(plan.knobs)) or plan.precision != session.setup.precision
    return setup, trace_setup(setup, sizes) if is_other else program_of(session, sizes)


def trace_setup(setup: Setup, sizes: Sizes) -> SizeProgram | None:
    """Trace a setup over sizes; None if it fails, or on a GPU, whose libraries take more than is traced."""
    if setup.device.compute_capability is not None:
        return None
    try:
        with preserved_random_state():
            return trace_sizes(setting_of(setup), sizes)
    except AutobatchError:
        return None


def _candidates(limit: int, target: int | None) -> Iterator[tuple[int, int]]:
    """Yield micro-batches to try with their target batch, the largest first."""
    if target is None:
        micro_batch = limit
        while micro_batch:
            yield micro_batch, micro_batch * ASSUMED_STEPS
            micro_batch -= max(1, micro_batch // STRIDE)
        return
    # A plan depends on the micro-batch only through the number of its steps.
    steps = math.ceil(target / limit)
    sizes: Sequence[int] = sorted({math.ceil(target / count) for count in range(steps, target + 1)})
    for micro_batch in reversed(sizes):
        yield micro_batch, target
