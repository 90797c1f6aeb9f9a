"""The largest micro-batch that the batches of a run survive, if its samples differ in size.

The most expensive samples bound the live memory, but micro-batches of many shapes fragment a caching
allocator. So hundreds of batches are replayed in its model, in the order and the split of the run. If the
step cannot be traced, a few of them are run.

Concatenated samples, for example graphs, take memory by the sum of their sizes. A probe runs the largest
samples together, but in most runs no micro-batch has all of them. If all batches of a run are known before it
starts, its own heaviest batches decide instead, and more fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import msgspec
import numpy as np
from numpy.typing import NDArray

from autobatch.core.largest import halving, largest
from autobatch.core.progress import Progress
from autobatch.core.records import Plan, Probe, RealBatches, RunOrder
from autobatch.footprint.sizes import Shape, SizeProgram, replay_batches
from autobatch.planning import micro_batches
from autobatch.rehearsal.process import Session, SetupProcess
from autobatch.rehearsal.rehearsal import batch_of, rehearse
from autobatch.rehearsal.setup import Setup
from autobatch.search.attempts import ask_or_none, run_attempt
from autobatch.search.curve import configured, program_of
from autobatch.search.hazards import is_padded, largest_deviation
from autobatch.workload.contract import WholeBatchLoss
from autobatch.workload.order import GlobalBatch, GlobalBatchSampler, LastBatch, epoch_of
from autobatch.workload.split import MicroBatchIds, Split, digest_of, heaviest_batches, size_of_part

Sizes = NDArray[np.float64]
REPLAYED = 300
"""First batches of a run that are replayed."""
MOST_EVENTS = 2_000_000
"""Allocations and frees after which a replay ends, about 4 seconds."""
RUN = 6
"""First batches of a run that are run if a step cannot be traced."""
ASSUMED_STEPS = 4
"""Micro-batches of a batch whose size is unknown."""
STRIDE = 100
"""Candidates are about a hundredth apart."""
MOST_RUNS = 8
"""Candidates that are run."""
MOST_SAMPLES = 2**23
"""Samples of the longest run whose batches are all looked at, which takes about 3 seconds."""
MOST_DEVIATION = 1e-3
"""Largest share by which numbers of samples may be off a line over their sizes, if sizes are to decide."""
HEAVIEST_RUN = 3
"""Heaviest batches of a run that are run."""
HEAVIEST_PARTS = 4
"""Heaviest micro-batches of such a batch."""


@dataclass(frozen=True, kw_only=True)
class RunBatches:
    """The batches of a run, for replays and for runs."""

    setup: Setup
    sizes: Sizes
    """Size of each sample, by its index."""
    sampler: GlobalBatchSampler
    """The batches; a run of unknown length has steps only where they are counted."""
    program: SizeProgram | None
    """The memory of a step over the sizes of its samples; None if it cannot be traced."""
    joins: bool
    """True if samples are concatenated; False if they are padded."""

    def first(self, count: int) -> Iterator[GlobalBatch]:
        """Return the first batches of the run."""
        return replace(self.sampler, steps=count, epochs=None).batches()

    def survived(self, split: Split, micro_batch: int) -> int | None:
        """Return how many first batches fit, in a replay or else in runs; None if one does not."""
        if self.program is not None:
            return self.replay(split, micro_batch, self.first(REPLAYED))
        return RUN if self.run_first(split, micro_batch, RUN) else None

    def replay(
        self,
        split: Split,
        micro_batch: int,
        batches: Iterable[GlobalBatch],
        *,
        most_events: int = MOST_EVENTS,
    ) -> int | None:
        """Replay batches in an empty allocator; as `replay_batches`."""
        assert self.program is not None
        # Concatenated samples take the memory of as many of their mean size, if no block grows faster.
        is_padded = not (self.joins and self.program.is_linear)
        shapes = (
            [
                Shape(len(part.ids), size_of_part(self.sizes[part.ids], is_padded=is_padded))
                for part in split.parts(batch, micro_batch)
            ]
            for batch in batches
        )
        allocator = self.setup.device.new_allocator()
        return replay_batches(self.program, shapes, allocator, most_events=most_events)

    def run(self, batches: Iterable[Sequence[MicroBatchIds]]) -> bool:
        """Return whether batches, given as micro-batches, run within the budget, on copies of the weights."""
        chosen = (batch_of(self.setup.workload, parts) for parts in batches)
        return rehearse(self.setup, chosen, within_budget=True).failure is None

    def run_first(self, split: Split, micro_batch: int, count: int) -> bool:
        """Return whether the first batches run within the budget."""
        return self.run(split.parts(batch, micro_batch) for batch in self.first(count))


def survive_real_batches(
    process: SetupProcess, probe: Probe, target: int | None, seed: int, progress: Progress
) -> Probe:
    """Check a limit against batches of ``target`` samples, and lower it to one that they survive.

    A lower limit runs once, so that no answer is a size that never ran.
    """
    if probe.stopped_by is not None:
        return probe
    progress.doing("replaying batches of the run")
    try:
        found = ask_or_none(
            process, "a replay of real batches", find_survivor, probe.micro_batch, target, seed
        )
    except KeyboardInterrupt:
        progress.note("interrupted: the limit was not checked against batches of the run")
        return msgspec.structs.replace(probe, stopped_by="interrupt")
    if found is None:
        return probe
    micro_batch, record = found
    checked = msgspec.structs.replace(probe, real_batches=record)
    # A plan depends on the micro-batch only through the number of its steps.
    sizes = (micro_batch, probe.micro_batch)
    plans = sizes if target is None else [math.ceil(target / one) for one in sizes]
    if plans[0] == plans[1]:
        return checked
    attempt = run_attempt(process, micro_batch).attempt
    progress.attempted(attempt)
    if not attempt.fits:
        return probe
    progress.note(
        f"a micro-batch of {probe.micro_batch} fits on the most expensive samples alone, but samples of many "
        f"sizes fragment the memory: {micro_batch} survives {record.batches} batches of the run, "
        f"{'replayed' if record.by == 'replay' else 'run'}"
    )
    attempts = [*probe.attempts, attempt]
    return msgspec.structs.replace(
        checked, micro_batch=micro_batch, upper_bound_by=record.by, attempts=attempts
    )


def find_survivor(
    session: Session, limit: int, target: int | None, seed: int
) -> tuple[int, RealBatches] | None:
    """Return the largest micro-batch up to a limit that the first batches of a run survive, and the evidence.

    None if batches need not be tried, because samples have one size or the allocator has no cache; also if
    sizes are unknown, or if no candidate survives.
    """
    setup = session.setup
    if setup.device.allocator_config is None or not _may_decide(setup):
        return None
    batches = run_batches(session, first_batches(setup, target or 1, seed))
    program = batches.program
    candidates = _smaller(limit, target)
    for micro_batch in candidates if program else candidates[:MOST_RUNS]:
        # A batch whose size is unknown has a few micro-batches.
        samples = target or micro_batch * ASSUMED_STEPS
        one = replace(batches, sampler=replace(batches.sampler, target_batch=samples))
        count = one.survived(Split(), micro_batch)
        if count is not None:
            return micro_batch, RealBatches(
                batches=count,
                by="replay" if program else "run",
                micro_batch_alone=limit,
                is_exact=program is None or program.is_exact,
            )
    return None


def plan_in_order(session: Session, plan: Plan, run: GlobalBatchSampler, cap: int) -> Plan | None:
    """Return a plan with a micro-batch up to a cap, larger than its own, that fits in the order of its run.

    None if there is none: samples that are padded, or whose size does not decide on their memory, or an order
    that is not known.
    """
    # A sampler of the user's may draw another order next time.
    if not _may_decide(session.setup) or session.setup.workload.sampler is not None:
        return None
    batches = run_batches(session, run, plan)
    if not batches.joins:
        return None
    program = batches.program
    # If the order decides what fits, only exact bytes will do.
    if program is None or not (program.is_exact and program.is_linear):
        if largest_deviation(batches.setup.workload, batches.sizes) > MOST_DEVIATION:
            return None
        batches = replace(batches, program=None)
    limits = _larger(plan.micro_batch, plan.target_batch, cap)
    if not limits or not 0 < run.total * run.target_batch <= MOST_SAMPLES:
        return None
    heaviest = heaviest_batches(run, batches.sizes, limits)
    found = largest(lambda n: _survives(batches, limits[n - 1], heaviest), 0, len(limits) + 1, halving)
    if not found:
        return None
    sizes = micro_batches(plan.target_batch, limits[found - 1])
    return msgspec.structs.replace(
        plan,
        micro_batch=sizes[0],
        accumulation_steps=len(sizes),
        micro_batches=sizes,
        run_order=RunOrder(
            batches=run.total,
            by="replay" if batches.program else "run",
            micro_batch_in_any_order=plan.micro_batch,
            digest=digest_of(batches.sizes),
        ),
    )


def first_batches(
    setup: Setup, target: int, seed: int, last_batch: LastBatch = "carry"
) -> GlobalBatchSampler:
    """Return the batches of a run of unknown length."""
    samples, order = epoch_of(setup.workload, seed)
    # A run that drops every batch does not start, and another stage says so.
    last = "carry" if samples < target else last_batch
    return GlobalBatchSampler(samples=samples, target_batch=target, seed=seed, last_batch=last, order=order)


def run_batches(session: Session, sampler: GlobalBatchSampler, plan: Plan | None = None) -> RunBatches:
    """Return the batches of a run, in the configuration of a plan if one is given; sizes must be known."""
    setup = session.setup if plan is None else configured(session.setup, plan)
    sizes, program = setup.worst_case.sizes(), program_of(session, plan)
    assert sizes is not None
    try:
        joins = not is_padded(setup.workload, sizes)
    except Exception:  # other stages report what the collate function raises
        joins = False
    return RunBatches(setup=setup, sizes=sizes, sampler=sampler, program=program, joins=joins)


def _may_decide(setup: Setup) -> bool:
    """Return whether the sizes of samples are known, differ, and decide on the memory of a micro-batch."""
    sizes = setup.worst_case.sizes()
    is_whole = isinstance(setup.workload.loss, WholeBatchLoss)
    return sizes is not None and bool(sizes.min() < sizes.max()) and not is_whole


def _survives(batches: RunBatches, limit: int, heaviest: Mapping[int, Sequence[int]]) -> bool:
    """Return whether the first batches of a run fit, and its heaviest, by number, before and after them."""
    split, program = Split(), batches.program
    heavy = [next(batches.sampler.batches(number)) for number in heaviest[limit]]
    ran: list[Sequence[MicroBatchIds]] = []
    if program is None:
        ran = [split.parts(one, limit) for one in batches.first(RUN)]
    else:
        a_batch = len(program.later.events) * math.ceil(batches.sampler.target_batch / limit)
        first = batches.first(min(REPLAYED, max(1, MOST_EVENTS // max(1, a_batch))))
        found = batches.replay(split, limit, chain(heavy, first, heavy), most_events=10 * MOST_EVENTS)
        if found is None:
            return False
    for one in heavy[:HEAVIEST_RUN]:
        parts = sorted(split.parts(one, limit), key=lambda part: -float(np.sum(batches.sizes[part.ids])))
        ran.append(parts[:HEAVIEST_PARTS])
    return batches.run(ran)


def _smaller(limit: int, target: int | None) -> list[int]:
    """Return the micro-batches up to a limit that are worth a try, the largest first."""
    if target is not None:
        # A plan depends on the micro-batch only through the number of its steps.
        steps = range(math.ceil(target / limit), target + 1)
        return sorted({math.ceil(target / count) for count in steps}, reverse=True)
    found = []
    while limit:
        found.append(limit)
        limit -= max(1, limit // STRIDE)
    return found


def _larger(micro_batch: int, target: int, cap: int) -> list[int]:
    """Return larger micro-batches that take fewer steps, about a hundredth apart, in ascending order."""
    found: list[int] = []
    for count in range(math.ceil(target / micro_batch) - 1, 0, -1):
        larger = math.ceil(target / count)
        if larger <= cap and larger * STRIDE >= (found[-1] if found else micro_batch) * (STRIDE + 1):
            found.append(larger)
    return found
