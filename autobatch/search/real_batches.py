"""A check of a limit against batches of the run, if samples differ in size.

The longest samples bound the live memory of a micro-batch. Yet micro-batches of many shapes fragment a
caching allocator, so that one may run out of memory although a costlier one fits alone. A few batches
therefore run one after the other, each with the cache that those before it have left.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import count, groupby, islice

import msgspec

from autobatch.core.errors import AutobatchError
from autobatch.core.progress import Progress
from autobatch.core.records import Attempt, Probe, RealBatches
from autobatch.rehearsal.process import SetupProcess
from autobatch.rehearsal.rehearsal import batch_of, rehearse
from autobatch.rehearsal.setup import Setup
from autobatch.search.attempts import run_attempt
from autobatch.workload.order import GlobalBatch, GlobalBatchSampler, epoch_of
from autobatch.workload.split import Split
from autobatch.workload.user_code import describe

FIRST = 3
"""First batches of a run that are run, and as many of the heaviest ones."""
TRIES = 8
"""Smaller micro-batches that are tried if one does not survive."""
ASSUMED_STEPS = 4
"""Micro-batches of a batch whose size is unknown."""
MOST_SAMPLES = 2**23
"""Samples among which the heaviest batches are looked for, which takes about 3 seconds."""


def survive_real_batches(
    process: SetupProcess, probe: Probe, share: int | None, seed: int, progress: Progress
) -> Probe:
    """Check a limit against batches of the run, and lower it to one that they survive.

    A lower limit also runs on the longest samples alone. Notes tell of a lower limit, of one that batches of
    the run do not survive either, and of a check that failed.

    Args:
        process: holds the setup.
        probe: the limit of the longest samples.
        share: samples of a batch that this rank takes; None if unknown.
        seed: of the order of the data.
        progress: receives the attempts and the notes.
    """
    # Samples of one size have one shape, and an allocator without a cache does not fragment.
    if process.info.largest_sample is None or process.info.allocator is None or probe.stopped_by is not None:
        return probe
    progress.doing("running batches of the run")
    alone, multiple = probe.micro_batch, probe.multiple
    samples = ASSUMED_STEPS * alone if share is None else share
    # A plan depends on the limit only through its steps.
    steps = count(math.ceil(samples / alone))
    sizes = groupby(multiple * math.ceil(samples / (each * multiple)) for each in steps)
    size, reason, attempts = alone, None, list[Attempt]()
    try:
        batches = process.call("the choice of real batches", batches_to_run, samples, seed)
        for number, (size, _) in enumerate(islice(sizes, 1 + TRIES)):
            reason = process.call("a run of real batches", why_not, batches, Split(multiple=multiple), size)
            if reason is None and number:
                attempts.append(run_attempt(process, size, progress).attempt)
                reason = attempts[-1].reason
            if reason is None or size == multiple:
                break
    except KeyboardInterrupt:
        progress.note("interrupted: the limit was not checked against batches of the run")
        return msgspec.structs.replace(probe, stopped_by="interrupt")
    except Exception as error:
        line = str(error) if isinstance(error, AutobatchError) else describe(error)
        failed = (
            "was not checked against batches of the run" if reason is None else f"fails on them ({reason})"
        )
        progress.note(f"the limit {failed}: {line}")
        return probe
    checked = RealBatches(batches=0 if reason else len(batches), micro_batch_alone=alone)
    if reason is None and not attempts:
        return msgspec.structs.replace(probe, real_batches=checked)
    survives = f"{size:,} survives {len(batches)} batches of the run"
    if reason is not None:
        survives = f"not even {size:,} survives batches of the run, so that steps may run again: {reason}"
    progress.note(
        f"a micro-batch of {alone:,} fits on the longest samples alone, but many sizes fragment the memory: "
        f"{survives}"
    )
    return msgspec.structs.replace(
        probe,
        micro_batch=size,
        upper_bound_by="run",
        oom_count=probe.oom_count + sum(not (run.fits or run.is_error) for run in attempts),
        attempts=[*probe.attempts, *attempts],
        real_batches=checked,
    )


def batches_to_run(setup: Setup, samples: int, seed: int) -> list[GlobalBatch]:
    """Return the first batches of a run and its heaviest; of a stream, twice as many of the first."""
    epoch, order = epoch_of(setup.workload, seed)
    sizes = None if setup.stream is not None else setup.worst_case.sizes()
    run = GlobalBatchSampler(
        samples=epoch,
        target_batch=samples,
        seed=seed,
        steps=max(2 * FIRST, min(epoch, MOST_SAMPLES) // samples),
        order=order if setup.stream is None else lambda _: range(epoch),
    )
    if sizes is None:
        return list(islice(run.batches(), 2 * FIRST))
    heaviest = heapq.nlargest(FIRST, run.batches(FIRST), key=lambda batch: sizes[batch.ids].sum())
    return [*islice(run.batches(), FIRST), *heaviest]


def why_not(setup: Setup, batches: Sequence[GlobalBatch], split: Split, micro_batch: int) -> str | None:
    """Run batches in a split within the budget. Return the reason if they do not fit, else None."""
    chosen = (batch_of(setup.workload, split.parts(batch, micro_batch)) for batch in batches)
    rehearsal = rehearse(setup, chosen, within_budget=True)
    return setup.device.refuses(rehearsal.stats) if rehearsal.failure is None else rehearsal.failure.reason
