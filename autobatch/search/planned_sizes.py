"""The check that the micro-batches of a plan fit, which are a little smaller than the largest that does.

The memory that a caching allocator reserves is not monotone in the micro-batch: near the limit, a smaller
one may fragment it so that it does not fit. A replay tells which ones to doubt, and a run decides.
"""

from __future__ import annotations

import msgspec

from autobatch.core.progress import Progress
from autobatch.core.records import Attempt
from autobatch.footprint.largest import Fitting
from autobatch.footprint.program import Untraceable
from autobatch.planning import micro_batches
from autobatch.search import questions
from autobatch.search.one_probe import Limit
from autobatch.setup.session import SetupProcess
from autobatch.setup.setup import new_allocator
from autobatch.setup.trace import program_on


def limit_of_plan(process: SetupProcess, limit: Limit, samples: int, progress: Progress) -> tuple[Limit, int]:
    """Return the limit with further attempts, and the largest micro-batch that a plan may ask for.

    That is the limit itself, unless micro-batches of an even split of a batch do not fit; then a split into
    more of them is looked at.

    Args:
        process: holds the setup.
        limit: the answer of the probe. Sizes that real batches have shown to fit are not doubted.
        samples: samples of a batch.
        progress: receives the attempts and a note.
    """
    probe = limit.probe
    largest = probe.micro_batch
    if limit.footprint is None or probe.real_batches is not None or probe.stopped_by is not None:
        return limit, largest
    fitting = Fitting([program_on(limit.footprint, process.info)], lambda: new_allocator(process.info))
    attempts: list[Attempt] = []
    try:
        # A replay that does not even know the limit says nothing of the sizes below.
        asked = largest if fitting.fits(largest) else 0
        while asked > probe.multiple:
            sizes = set(micro_batches(samples, asked, probe.multiple)) - {largest}
            doubted = sorted((one for one in sizes if not fitting.fits(one)), reverse=True)
            failed = next((one for one in doubted if not _runs(process, one, attempts, progress)), None)
            if failed is None:
                break
            progress.note(
                f"a micro-batch of {failed:,} does not fit although {largest:,} does, because the allocator "
                "cuts its memory in another way: the batch is split into more"
            )
            asked = max(sizes) - probe.multiple
    except Untraceable:
        return limit, largest
    ooms = sum(not attempt.fits for attempt in attempts)
    probe = msgspec.structs.replace(
        probe, attempts=[*probe.attempts, *attempts], oom_count=probe.oom_count + ooms
    )
    return limit._replace(probe=probe), asked if ooms else largest


def _runs(process: SetupProcess, size: int, attempts: list[Attempt], progress: Progress) -> bool:
    """Run a size, and add the attempt to the others."""
    attempt = questions.run_attempt(process, size).attempt
    progress.attempted(attempt)
    attempts.append(attempt)
    return attempt.fits
