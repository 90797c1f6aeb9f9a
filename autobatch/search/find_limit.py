"""The largest micro-batch that fits: a search finds it, saves it, and begins at what was saved before.

saved limit ──guess──► search by runs ──► batches of the plan ──► Limit
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec

from autobatch.core.errors import AutobatchError, InputError
from autobatch.core.options import Options
from autobatch.core.progress import Progress
from autobatch.core.records import LimitedBy, Probe
from autobatch.rehearsal.attempt import Outcome
from autobatch.rehearsal.process import SetupProcess
from autobatch.rehearsal.setup import new_allocator
from autobatch.search.attempts import nothing_fits, run_attempt
from autobatch.search.plan_limit import limit_of_plan
from autobatch.search.probe import FIRST, Limit, find_largest
from autobatch.search.saved import keep, recall
from autobatch.workload.user_code import describe

MULTIPLE = 8
"""Number of samples whose multiples may run where others fail for another reason than memory."""
STATE_COPIES = 4
"""Weights, gradients, and two states of each weight, as Adam has them."""


def find_limit(
    process: SetupProcess, options: Options, *, share: int | None = None, home: Path, progress: Progress
) -> Limit:
    """Find the largest micro-batch that fits, or check the one that was asked for.

    Args:
        process: holds the setup.
        options: options of the run: the micro-batch that was asked for, or the caps.
        share: samples of a batch that this rank takes, whose micro-batches are checked; None without a plan.
        home: data directory, in which answers are saved.
        progress: receives each attempt and the answer.

    Raises:
        DoesNotFitError: not even a micro-batch of 1 fits, or the one that was asked for does not.
    """
    info, asked, multiple = process.info, options.micro_batch, options.micro_batch_multiple
    progress.opened(info.device)
    for line in info.notes:
        progress.note(line)
    most: dict[LimitedBy, int | None] = {
        "target_batch": options.target_batch if share is None else share,
        "max_micro_batch": options.max_micro_batch,
        "dataset": info.samples,
    }
    if asked is not None:
        most = {"max_micro_batch": asked}
    known = None if asked is not None else recall(info.key, home)
    progress.doing("looking for what fits")
    tried: dict[int, Outcome] = {}

    def run(size: int) -> Outcome:
        tried[size] = outcome = run_attempt(process, size, progress)
        if asked is not None and not outcome.attempt.fits:
            raise outcome.error or nothing_fits(process, outcome)
        return outcome

    failure: Exception | None = None
    is_order_unknown = info.allocator is not None and info.allocator.falls is None
    is_large = STATE_COPIES * info.model_bytes > info.device.budget_bytes / 2
    try:
        limit = find_largest(
            run,
            {name: size for name, size in most.items() if size is not None},
            partial(new_allocator, info),
            falling=partial(new_allocator, info, falls=True) if is_order_unknown else None,
            multiple=multiple if asked is None else 1,
            known=known,
            # An error of a large model costs a whole run.
            first=asked or (FIRST // 2 if is_large else FIRST),
        )
    except Exception as error:
        failure = error
    if failure is not None:
        refused = [outcome for _, outcome in sorted(tried.items()) if outcome.error is None]
        # A batch of 1 is a special case for some operators (batch statistics), and the last resort.
        if asked is None and min(tried, default=0) == 1 and refused:
            raise nothing_fits(process, refused[0], describe(failure)) from failure
        is_larger = asked is None and tried and not refused and min(filter(None, most.values())) >= MULTIPLE
        if is_larger and run_attempt(process, MULTIPLE, progress).attempt.fits:
            sizes = ", ".join(map(str, sorted(tried)))
            raise InputError(
                f"micro-batches of {sizes} fail, and one of {MULTIPLE} runs: give --micro-batch-multiple "
                f"{MULTIPLE}, or a smaller number whose multiples run. The first error: "
                f"{failure if isinstance(failure, AutobatchError) else describe(failure)}"
            ) from failure
        raise failure
    probe = msgspec.structs.replace(limit.probe, precision=info.precision)
    if not probe.micro_batch:
        if probe.stopped_by is not None:
            raise KeyboardInterrupt
        raise nothing_fits(process, tried[min(tried)])
    if known is not None and not probe.attempts[0].fits:
        progress.note(f"{probe.attempts[0].micro_batch} no longer fit, so the saved limit was probed again")
    note_next(probe, info.device.name, progress)
    if asked is not None:
        probe = msgspec.structs.replace(probe, source="asked")
    progress.probed(probe)
    file = keep(probe, limit.programs, info.key, home=home, progress=progress) if asked is None else None
    limit = limit._replace(probe=probe, file=file, planned=probe.micro_batch)
    return limit if share is None else limit_of_plan(process, limit, share, options.seed, progress)


def note_next(probe: Probe, device: str, progress: Progress) -> None:
    """Note what else than the budget refused sizes above the limit."""
    size = probe.micro_batch + probe.multiple
    above = next((attempt for attempt in probe.attempts if attempt.micro_batch == size), None)
    if above is not None and above.is_error:
        progress.note(
            f"a micro-batch of {size:,} does not run: {above.reason}. If only multiples of a number run, "
            "such as 2, give --micro-batch-multiple 2"
        )
    held = min((attempt.micro_batch for attempt in probe.attempts if attempt.is_below_budget), default=None)
    if held is not None:
        progress.note(
            f"{device}, not the budget, refused a micro-batch of {held:,} twice. Others may hold its memory, "
            "so the limit is not saved: free memory, or give a smaller --memory-budget"
        )
