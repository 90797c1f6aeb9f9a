"""The largest micro-batch of a plan: a size may fail although a larger one fits alone.

The allocator cuts its memory in another way for each size. If samples differ in size, batches of the run show
what fits: they run one after the other, each with the cache that those before it have left. Else the sizes of
an even split run that the replay doubts.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from functools import partial
from itertools import islice

import msgspec
import numpy as np

from autobatch.core.progress import Progress
from autobatch.core.records import Attempt
from autobatch.device.allocator import Allocator
from autobatch.footprint.program import Fitting
from autobatch.planning import micro_batches
from autobatch.rehearsal.process import SetupProcess
from autobatch.rehearsal.rehearsal import batch_of, rehearse
from autobatch.rehearsal.setup import Setup
from autobatch.search.probe import Limit
from autobatch.search.runs import run_attempt
from autobatch.workload.order import GlobalBatch, GlobalBatchSampler, Split, epoch_of

FIRST = 3
"""First batches of a run that are run, and as many of the heaviest ones."""
TRIES = 8
"""Splits into more micro-batches that are tried if one does not survive."""
MOST_SAMPLES = 2**23
"""Samples among which the heaviest batches are looked for, which takes about 3 seconds."""


def limit_of_plan(process: SetupProcess, limit: Limit, samples: int, seed: int, progress: Progress) -> Limit:
    """Lower what a plan may ask for until the micro-batches of a rank's samples fit; a note tells of it."""
    probe, info = limit.probe, process.info
    largest, multiple = probe.micro_batch, probe.multiple
    # An allocator without a cache does not fragment.
    if info.new_allocator is Allocator:
        return limit
    is_ragged, batches = info.largest_sample is not None, list[GlobalBatch]()
    doubts = Fitting(limit.programs, partial(info.new_allocator, info.device.budget_bytes))
    if is_ragged:
        progress.doing("running batches of the run")
        batches = process.call("the choice of real batches", batches_to_run, samples, seed)
    elif not limit.programs or not doubts.fits(largest):
        return limit  # a replay that is wrong about the limit tells nothing about smaller sizes
    attempts: list[Attempt] = []

    def why_not(size: int) -> str | None:
        """Return the reason why micro-batches of at most a size do not fit; None if they do."""
        reason, sizes = None, {size}
        if is_ragged:
            split = Split(multiple=multiple)
            reason = process.call("a run of real batches", run_batches, batches, split, size)
        else:
            sizes = {each for each in micro_batches(samples, size, multiple) if not doubts.fits(each)}
        for each in sorted(sizes - {largest}, reverse=True):
            if reason is None:
                attempts.append(run_attempt(process, each, progress).attempt)
                reason = attempts[-1].reason
        return reason

    parts = math.ceil(samples / largest)
    more = (multiple * math.ceil(samples / (part * multiple)) for part in range(parts + 1, parts + 1 + TRIES))
    for size in dict.fromkeys([largest, *more]):
        if (reason := why_not(size)) is None:
            break
    if size < largest or reason is not None:
        progress.note(
            f"a micro-batch of {largest:,} fits alone, but many sizes fragment the memory: "
            f"{'not even ' if reason else ''}{size:,} survives batches of the run"
            + (f", so that steps may run again: {reason}" if reason else "")
        )
    errors = sum(not (run.fits or run.is_error) for run in attempts)
    probe = msgspec.structs.replace(
        probe, attempts=[*probe.attempts, *attempts], oom_count=probe.oom_count + errors
    )
    if is_ragged:
        by = probe.upper_bound_by if size == largest else "run"
        probe = msgspec.structs.replace(probe, micro_batch=size, upper_bound_by=by, micro_batch_alone=largest)
    return limit._replace(probe=probe, planned=size)


def batches_to_run(setup: Setup, samples: int, seed: int) -> list[GlobalBatch]:
    """Return the first batches of a run and its heaviest; of a stream, twice as many of the first."""
    epoch, order = epoch_of(setup.workload, seed)
    sizes = None if setup.stream is not None else setup.worst_case.sizes()
    run = GlobalBatchSampler(
        samples=epoch,
        target_batch=samples,
        seed=seed,
        steps=max(2 * FIRST, min(epoch, MOST_SAMPLES) // samples),
        order=order if setup.stream is None else lambda _: np.arange(epoch),
    )
    if sizes is None:
        return list(islice(run.batches(), 2 * FIRST))
    heaviest = heapq.nlargest(FIRST, run.batches(FIRST), key=lambda batch: sizes[batch.ids].sum())
    return [*islice(run.batches(), FIRST), *heaviest]


def run_batches(setup: Setup, batches: Sequence[GlobalBatch], split: Split, micro_batch: int) -> str | None:
    """Run batches in a split within the budget. Return the reason if they do not fit, else None."""
    chosen = (batch_of(setup.workload, split.parts(batch, micro_batch)) for batch in batches)
    return rehearse(setup, chosen, within_budget=True).reason
