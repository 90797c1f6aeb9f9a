"""The largest micro-batch that fits: a search finds it, saves it, and begins at what was saved before.

saved limit ──guess──► search by runs ──► batches of the plan ──► Limit
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec

from autobatch.core.errors import DoesNotFitError
from autobatch.core.options import Options
from autobatch.core.progress import Progress
from autobatch.core.records import LimitedBy, Probe
from autobatch.core.units import format_bytes
from autobatch.rehearsal.attempt import Outcome
from autobatch.rehearsal.process import SetupProcess
from autobatch.rehearsal.setup import new_allocator
from autobatch.search.attempts import nothing_fits, run_attempt
from autobatch.search.plan_limit import limit_of_plan
from autobatch.search.probe import FIRST, Limit, find_largest
from autobatch.search.saved import keep, recall
from autobatch.workload.user_code import describe

STATE_COPIES = 4
"""Weights, gradients, and two states of each weight, as Adam has them."""


def find_limit(
    process: SetupProcess, options: Options, *, share: int | None = None, home: Path, progress: Progress
) -> Limit:
    """Find the largest micro-batch that fits.

    Args:
        process: holds the setup.
        options: options of the run: caps and budget.
        share: samples of a batch that this rank takes, whose micro-batches are checked; None without a plan.
        home: data directory, in which answers are saved.
        progress: receives each attempt and the answer.

    Raises:
        DoesNotFitError: not even a micro-batch of 1 fits.
    """
    _announce(process, progress)
    info = process.info
    most: dict[LimitedBy, int | None] = {
        "target_batch": options.batch.target_batch if share is None else share,
        "max_micro_batch": options.search.max_micro_batch,
        "dataset": info.samples,
    }
    caps = {name: size for name, size in most.items() if size is not None}
    limit = _search(process, options, caps, home, progress)
    progress.probed(limit.probe)
    file = keep(limit.probe, limit.programs, info.key, home=home, progress=progress)
    limit = limit._replace(file=file, planned=limit.probe.micro_batch)
    return limit if share is None else limit_of_plan(process, limit, share, options.device.seed, progress)


def check_size(process: SetupProcess, micro_batch: int, *, progress: Progress) -> Probe:
    """Run one micro-batch, and leave the saved limit unchanged.

    Raises:
        DoesNotFitError: it does not fit.
    """
    _announce(process, progress)
    outcome = run_attempt(process, micro_batch, progress)
    if outcome.error is not None:
        raise outcome.error
    if not outcome.attempt.fits:
        raise DoesNotFitError(
            f"a micro-batch of {micro_batch} does not fit in "
            f"{format_bytes(process.info.device.budget_bytes)}: {outcome.attempt.reason}"
        )
    probe = Probe(
        micro_batch=micro_batch,
        limited_by="max_micro_batch",
        upper_bound_by="cap",
        predicted_micro_batch=None,
        oom_count=0,
        attempts=[outcome.attempt],
        source="asked",
        precision=process.info.precision,
    )
    progress.probed(probe)
    return probe


def _search(
    process: SetupProcess, options: Options, caps: dict[LimitedBy, int], home: Path, progress: Progress
) -> Limit:
    """Search by runs, from the saved limit if there is one."""
    info, multiple = process.info, options.search.micro_batch_multiple
    known = recall(info.key, home)
    progress.doing("looking for what fits")
    tried: dict[int, Outcome] = {}

    def run(size: int) -> Outcome:
        tried[size] = run_attempt(process, size, progress)
        return tried[size]

    is_order_unknown = info.allocator is not None and info.allocator.falls is None
    is_large = STATE_COPIES * info.model_bytes > info.device.budget_bytes / 2
    try:
        limit = find_largest(
            run,
            caps,
            partial(new_allocator, info),
            falling=partial(new_allocator, info, falls=True) if is_order_unknown else None,
            multiple=multiple,
            known=known,
            # An error of a large model costs a whole run.
            first=FIRST // 2 if is_large else FIRST,
        )
    except Exception as error:
        # A batch of 1 is a special case for some operators (batch statistics), and the last resort.
        refused = [outcome for _, outcome in sorted(tried.items()) if outcome.error is None]
        if min(tried, default=0) == 1 and refused:
            raise nothing_fits(process, refused[0], describe(error)) from error
        raise
    probe = limit.probe
    if not probe.micro_batch:
        if probe.stopped_by is not None:
            raise KeyboardInterrupt
        raise nothing_fits(process, tried[min(tried)])
    if known is not None and not probe.attempts[0].fits:
        progress.note(f"{probe.attempts[0].micro_batch} no longer fit, so the saved limit was probed again")
    _note_next(probe, info.device.name, progress)
    return limit._replace(probe=msgspec.structs.replace(probe, precision=info.precision))


def _note_next(probe: Probe, device: str, progress: Progress) -> None:
    """Note the reason that refused the next size if it is not the budget."""
    size = probe.micro_batch + probe.multiple
    above = next((attempt for attempt in probe.attempts if attempt.micro_batch == size), None)
    if above is not None and above.is_error:
        progress.note(
            f"a micro-batch of {size:,} does not run: {above.reason}. If only multiples of a number run, "
            "such as 2, give --micro-batch-multiple 2"
        )
    if above is not None and above.is_below_budget:
        progress.note(
            f"{device}, not the budget, refused a micro-batch of {size:,} twice: {above.reason}. Others may "
            "hold its memory, so the limit is not saved: free memory, or give a smaller --memory-budget"
        )


def _announce(process: SetupProcess, progress: Progress) -> None:
    """Report the device and the remarks on the setup."""
    progress.opened(process.info.device)
    for line in process.info.notes:
        progress.note(line)
