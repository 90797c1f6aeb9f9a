"""The stage after the search: the limit becomes the largest micro-batch that real batches survive."""

from __future__ import annotations

import math

import msgspec

from autobatch.core.progress import Progress
from autobatch.core.records import Probe, RealBatches
from autobatch.search import questions
from autobatch.search.one_probe import Limit
from autobatch.search.sizes.real_batches import Order, Survivor, find_survivor
from autobatch.setup.session import SetupProcess


def survive_real_batches(process: SetupProcess, limit: Limit, order: Order, *, progress: Progress) -> Limit:
    """Check a limit against the batches of the run, and lower it to one that they survive.

    A lower limit runs once, so that no answer is a size that never ran. The saved limit stays that of the
    most expensive samples, because it does not depend on the batch.

    Args:
        process: holds the setup.
        limit: the answer for the most expensive samples.
        order: the batches of the run.
        progress: receives the attempt and a note.
    """
    probe = limit.probe
    if probe.stopped_by is not None:
        return limit
    progress.doing("replaying batches of the run")
    try:
        found = questions.ask_or_none(
            process, "a replay of real batches", find_survivor, probe.micro_batch, order
        )
    except KeyboardInterrupt:
        progress.note("interrupted: the limit was not checked against batches of the run")
        return limit._replace(probe=msgspec.structs.replace(probe, stopped_by="interrupt"))
    if found is None:
        return limit
    record = RealBatches(
        batches=found.batches,
        by="replay" if found.is_replayed else "run",
        micro_batch_alone=probe.micro_batch,
        is_exact=found.is_exact,
    )
    if not _is_lower(found, probe, order):
        return limit._replace(probe=msgspec.structs.replace(probe, real_batches=record))
    outcome = questions.run_attempt(process, found.micro_batch)
    progress.attempted(outcome.attempt)
    if not outcome.attempt.fits:
        return limit
    progress.note(
        f"a micro-batch of {probe.micro_batch} fits on the most expensive samples alone, but samples of many "
        f"sizes fragment the memory: {found.micro_batch} survives {found.batches} batches of the run, "
        f"{'replayed' if found.is_replayed else 'run'}"
    )
    probe = msgspec.structs.replace(
        probe,
        micro_batch=found.micro_batch,
        upper_bound_by=record.by,
        attempts=[*probe.attempts, outcome.attempt],
        real_batches=record,
    )
    return limit._replace(probe=probe)


def _is_lower(found: Survivor, probe: Probe, order: Order) -> bool:
    """Return whether a survivor takes more steps than the limit; a plan of as many steps is the same plan."""
    if order.target_batch is None:
        return found.micro_batch < probe.micro_batch
    return math.ceil(order.target_batch / found.micro_batch) > math.ceil(
        order.target_batch / probe.micro_batch
    )
