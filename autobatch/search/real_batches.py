"""The largest micro-batch that the batches of a run survive, if its samples differ in size.

The most expensive samples bound the live memory, but micro-batches of many shapes fragment a caching
allocator. So hundreds of batches are replayed in its model, in the order and the split of the run. If the
step cannot be traced, a few of them are run.

Samples that are joined end to end, as graphs are, take memory by the sum of their sizes. The largest samples
together, which a probe runs, meet in no micro-batch of most runs. If all batches of a run are known before it
starts, its own heaviest ones decide instead, and more fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from autobatch.core.largest import halving, largest
from autobatch.core.progress import Progress
from autobatch.core.records import Plan, Probe, RealBatches, RunOrder
from autobatch.footprint.size_program import Shape, SizeProgram
from autobatch.footprint.size_replay import replay_batches
from autobatch.planning import micro_batches
from autobatch.search.attempts import ask_or_none, run_attempt
from autobatch.search.curve import configured, program_of
from autobatch.search.hazards import is_padded, largest_deviation
from autobatch.setup.rehearsal import batch_of, rehearse
from autobatch.setup.session import Session, SetupProcess
from autobatch.setup.setup import Setup
from autobatch.workload.contract import WholeBatchLoss
from autobatch.workload.order import GlobalBatch, GlobalBatchSampler, LastBatch, epoch_of
from autobatch.workload.split import MicroBatchIds, Split, digest_of, heaviest_batches, size_of_part

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
"""Candidates are about a hundredth apart."""
MOST_RUNS = 8
"""Candidates that are run."""
MOST_SAMPLES = 2**23
"""Samples of the longest run whose batches are all looked at, which takes about 3 seconds."""
MOST_DEVIATION = 1e-3
"""Share by which the numbers of a sample may be off a line over its size for the size to decide on them."""
HEAVIEST_RUN = 3
"""Heaviest batches of a run that are run."""
HEAVIEST_PARTS = 4
"""Heaviest micro-batches of such a batch."""


class Survivor(NamedTuple):
    """The largest micro-batch that real batches survive."""

    micro_batch: int
    batches: int
    """Batches that were looked at."""
    by: Literal["replay", "run"]
    is_exact: bool = True
    """False if the replay bounds some allocations from above."""


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
    """True if samples are joined end to end; False if they are padded."""

    def first(self, count: int) -> Iterator[GlobalBatch]:
        """Return the first batches of the run."""
        return replace(self.sampler, steps=count, epochs=None).batches()

    def survived(self, split: Split, micro_batch: int) -> int | None:
        """Replay the first batches of the run, or run a few if the step was not traced.

        Returns:
            The number of batches; None if one does not fit.
        """
        if self.program is None:
            return None if self.run_first(split, micro_batch, RUN) else RUN
        return self.replay(split, micro_batch, self.first(REPLAYED))

    def replay(
        self,
        split: Split,
        micro_batch: int,
        batches: Iterable[GlobalBatch],
        *,
        most_events: int = MOST_EVENTS,
    ) -> int | None:
        """Replay batches in an empty allocator with the budget as its limit.

        Returns:
            The number of batches that were replayed; None if one does not fit.
        """
        assert self.program is not None
        shapes = ([self._shape(part) for part in split.parts(batch, micro_batch)] for batch in batches)
        allocator = self.setup.device.new_allocator()
        return replay_batches(self.program, shapes, allocator, most_events=most_events)

    def run(self, batches: Iterable[Sequence[MicroBatchIds]]) -> str | None:
        """Run batches, given as their micro-batches, within the budget, on copies of the weights.

        Returns:
            The out-of-memory error of a batch that does not fit; None if all fit.
        """
        chosen = (batch_of(self.setup.workload, parts) for parts in batches)
        failure = rehearse(self.setup, chosen, within_budget=True).failure
        return None if failure is None else failure.reason

    def run_first(self, split: Split, micro_batch: int, count: int) -> str | None:
        """Run the first batches; see `run`."""
        return self.run(split.parts(batch, micro_batch) for batch in self.first(count))

    def _shape(self, part: MicroBatchIds) -> Shape:
        # Joined samples have the memory of as many of their mean size, if no block grows faster.
        by_mean = self.joins and self.program is not None and self.program.is_linear
        return Shape(len(part.ids), size_of_part(self.sizes[part.ids], is_padded=not by_mean))


def survive_real_batches(
    process: SetupProcess, probe: Probe, target: int | None, seed: int, progress: Progress
) -> Probe:
    """Check a limit against the batches of the run, and lower it to one that they survive.

    A lower limit runs once, so that no answer is a size that never ran.

    Args:
        process: holds the setup.
        probe: the answer for the most expensive samples.
        target: samples of a batch; None if unknown.
        seed: of the order of the data.
        progress: receives the attempt and a note.
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
    record = RealBatches(
        batches=found.batches,
        by=found.by,
        micro_batch_alone=probe.micro_batch,
        is_exact=found.is_exact,
    )
    # A plan depends on the micro-batch only through the number of its steps.
    sizes = (found.micro_batch, probe.micro_batch)
    plans = sizes if target is None else [math.ceil(target / one) for one in sizes]
    if plans[0] == plans[1]:
        return msgspec.structs.replace(probe, real_batches=record)
    outcome = run_attempt(process, found.micro_batch)
    progress.attempted(outcome.attempt)
    if not outcome.attempt.fits:
        return probe
    progress.note(
        f"a micro-batch of {probe.micro_batch} fits on the most expensive samples alone, but samples of many "
        f"sizes fragment the memory: {found.micro_batch} survives {found.batches} batches of the run, "
        f"{'replayed' if found.by == 'replay' else 'run'}"
    )
    return msgspec.structs.replace(
        probe,
        micro_batch=found.micro_batch,
        upper_bound_by=record.by,
        attempts=[*probe.attempts, outcome.attempt],
        real_batches=record,
    )


def find_survivor(session: Session, limit: int, target: int | None, seed: int) -> Survivor | None:
    """Return the largest micro-batch up to a limit that the first batches of a run survive.

    Args:
        session: the open setup.
        limit: the largest micro-batch that fits on the most expensive samples.
        target: samples of a batch; None if unknown.
        seed: of the order of the data.

    Returns:
        None if real batches need not be tried: samples of one size, or an allocator without a cache. Also
        None if sizes are unknown, or if no candidate survives.
    """
    batches = _batches_of(session, first_batches(session.setup, target or 1, seed))
    if batches is None or session.setup.device.allocator_config is None:
        return None
    program = batches.program
    candidates = _smaller(limit, target)
    for micro_batch in candidates if program else candidates[:MOST_RUNS]:
        # A batch whose size is unknown has a few micro-batches.
        samples = target or micro_batch * ASSUMED_STEPS
        one = replace(batches, sampler=replace(batches.sampler, target_batch=samples))
        count = one.survived(Split(), micro_batch)
        if count is not None:
            return Survivor(
                micro_batch, count, "replay" if program else "run", not program or program.is_exact
            )
    return None


def plan_in_order(session: Session, plan: Plan, run: GlobalBatchSampler, cap: int) -> Plan | None:
    """Return a plan with the largest micro-batch over its own that fits in the order of its run.

    Args:
        session: the open setup.
        plan: of one rank; its micro-batch fits in any order.
        run: the batches of the run.
        cap: the largest micro-batch to try.

    Returns:
        None if there is none: samples that are padded, or whose size does not decide on their memory, or an
        order that is not known.
    """
    batches = _batches_of(session, run, plan)
    # A sampler of the user's may draw another order next time.
    if batches is None or not batches.joins or session.setup.workload.sampler is not None:
        return None
    if batches.program is None and largest_deviation(batches.setup.workload, batches.sizes) > MOST_DEVIATION:
        return None
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


def _batches_of(session: Session, sampler: GlobalBatchSampler, plan: Plan | None = None) -> RunBatches | None:
    """Return the batches of a run; None if their samples have one size, or the loss sees a whole batch."""
    sizes = session.setup.worst_case.sizes()
    if sizes is None or sizes.min() == sizes.max():
        return None
    if isinstance(session.setup.workload.loss, WholeBatchLoss):
        return None
    batches = run_batches(session, sampler, plan)
    # Where the order decides, only exact bytes do.
    program = batches.program
    is_exact = program is not None and program.is_exact and program.is_linear
    return batches if plan is None or is_exact else replace(batches, program=None)


def _survives(batches: RunBatches, limit: int, heaviest: Mapping[int, Sequence[int]]) -> bool:
    """Return whether the first batches of a run fit at a micro-batch, and its heaviest before and after them.

    Args:
        batches: the batches of the run.
        limit: the micro-batch.
        heaviest: numbers of the heaviest batches for each micro-batch, the heaviest first.
    """
    split, program = Split(), batches.program
    heavy = [next(batches.sampler.batches(number)) for number in heaviest[limit]]
    before: list[Sequence[MicroBatchIds]] = []
    if program is None:
        before = [split.parts(one, limit) for one in batches.first(RUN)]
    else:
        a_batch = len(program.later.events) * math.ceil(batches.sampler.target_batch / limit)
        first = batches.first(min(REPLAYED, max(1, MOST_EVENTS // max(1, a_batch))))
        found = batches.replay(split, limit, chain(heavy, first, heavy), most_events=10 * MOST_EVENTS)
        if found is None:
            return False
    heaviest_parts = [_heaviest_parts(batches, one, limit) for one in heavy[:HEAVIEST_RUN]]
    return batches.run([*before, *heaviest_parts]) is None


def _heaviest_parts(batches: RunBatches, batch: GlobalBatch, limit: int) -> list[MicroBatchIds]:
    parts = Split().parts(batch, limit)
    return sorted(parts, key=lambda part: -float(np.sum(batches.sizes[part.ids])))[:HEAVIEST_PARTS]


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
