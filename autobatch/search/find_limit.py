"""The largest micro-batch that fits: a search finds it, saves it, and begins at what was saved before.

    saved limit ──guess──► search by runs ──► batches of the run ──► micro-batches of the plan ──► Limit

One run confirms a saved limit: it agrees with the saved programs to the byte, and their replay says that no
more fits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from autobatch.core.errors import DoesNotFitError, InputError
from autobatch.core.options import Options
from autobatch.core.progress import Progress
from autobatch.core.records import LimitedBy, Probe
from autobatch.core.units import format_bytes
from autobatch.device.allocator.trace import Trace
from autobatch.footprint.fitting import Fitting
from autobatch.footprint.program import Program, Untraceable
from autobatch.planning import micro_batches
from autobatch.rehearsal.attempt import Outcome
from autobatch.rehearsal.process import SetupProcess
from autobatch.rehearsal.setup import new_allocator
from autobatch.search.attempts import nothing_fits, run_attempt
from autobatch.search.probe import FIRST, SearchResult, find_largest
from autobatch.search.real_batches import survive_real_batches
from autobatch.search.saved import keep, recall
from autobatch.workload.user_code import describe

MULTIPLES = (8, 4, 2)
"""Numbers of samples that a workload may insist on multiples of."""
STATE_COPIES = 4
"""Weights, gradients, and two states of each weight, as Adam has them."""


class Limit(NamedTuple):
    """The answer of a probe, and what later stages take from it."""

    probe: Probe
    file: Path | None = None
    """File that keeps the answer; None if it was not saved."""
    programs: tuple[Program, ...] = ()
    """The memory of its steps at any size, in each order that ran; empty if no two runs were alike."""
    trace: Trace | None = None
    """The events of the run at the limit; None if none were recorded."""
    planned: int = 0
    """The largest micro-batch that a plan may ask for; less than the limit if an even split does not fit."""
    falls: bool = False
    """True if the runs show that the driver puts each new segment below those before it."""


def find_limit(
    process: SetupProcess, options: Options, *, share: int | None = None, home: Path, progress: Progress
) -> Limit:
    """Find the largest micro-batch that fits.

    Args:
        process: holds the setup.
        options: options of the run: caps and budget.
        share: samples of a batch that this rank takes, to check the micro-batches of their even split; None
            for a probe without a plan.
        home: data directory, in which answers are saved.
        progress: receives each attempt and the answer.

    Raises:
        DoesNotFitError: not even a micro-batch of 1 fits.
        InputError: only multiples of a number run.
    """
    _announce(process, progress)
    key = process.info.key
    batch = options.batch.target_batch if share is None else share
    most: dict[LimitedBy, int | None] = {
        "target_batch": batch,
        "max_micro_batch": options.search.max_micro_batch,
        "dataset": process.info.samples,
    }
    caps = {name: size for name, size in most.items() if size is not None}
    limit = _search(process, options, caps, home, progress)
    progress.probed(limit.probe)
    file = keep(limit.probe, limit.programs, key, home=home, progress=progress)
    probe = survive_real_batches(process, limit.probe, share, options.device.seed, progress)
    limit = limit._replace(probe=probe, file=file, planned=probe.micro_batch)
    is_alone = key["world_size"] in (None, 1)
    return limit if share is None or not is_alone else limit_of_plan(process, limit, share, progress)


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
    result = SearchResult(micro_batch, "cap", None, [outcome.attempt], None)
    probe = result.probe({"max_micro_batch": micro_batch}, multiple=1, saved_on=None)
    probe = msgspec.structs.replace(probe, source="asked", precision=process.info.precision)
    progress.probed(probe)
    return probe


def limit_of_plan(process: SetupProcess, limit: Limit, samples: int, progress: Progress) -> Limit:
    """Find the largest micro-batch that a plan of this many samples may ask for.

    The micro-batches of an even split are a little smaller than the limit and may still not fit, because the
    memory that a caching allocator reserves is not monotone in them. A replay tells which ones to doubt, and
    a run decides. If one does not fit, a split into more micro-batches is checked.
    """
    probe, largest = limit.probe, limit.probe.micro_batch
    if not limit.programs or probe.real_batches is not None or probe.stopped_by is not None:
        return limit
    fitting = Fitting(limit.programs, partial(new_allocator, process.info, falls=limit.falls))
    attempts = []
    try:
        # If the replay is wrong about the limit, it proves nothing about smaller sizes.
        planned = largest if fitting.fits(largest) else 0
        while planned > probe.multiple:
            sizes = set(micro_batches(samples, planned, probe.multiple)) - {largest}
            for size in sorted((size for size in sizes if not fitting.fits(size)), reverse=True):
                outcome = run_attempt(process, size, progress)
                if outcome.error is not None:
                    raise outcome.error
                attempts.append(outcome.attempt)
                if not outcome.attempt.fits:
                    break
            else:
                break
            progress.note(
                f"a micro-batch of {size:,} does not fit although {largest:,} does, because the allocator "
                "cuts its memory in another way: the batch is split into more"
            )
            planned = max(sizes) - probe.multiple
    except Untraceable:
        return limit
    errors = sum(not attempt.fits for attempt in attempts)
    probe = msgspec.structs.replace(
        probe, attempts=[*probe.attempts, *attempts], oom_count=probe.oom_count + errors
    )
    return limit._replace(probe=probe, planned=planned if errors else largest)


def _search(
    process: SetupProcess, options: Options, caps: Mapping[LimitedBy, int], home: Path, progress: Progress
) -> Limit:
    """Search by runs, from the saved limit if there is one."""
    info, multiple, cap = process.info, options.search.micro_batch_multiple, min(caps.values())
    saved = recall(info.key, home, may_vary=options.device.memory_budget is None)
    guess = None if saved is None or saved.micro_batch < multiple else saved.micro_batch
    progress.doing("looking for what fits")
    tried: dict[int, Outcome] = {}

    def run(size: int) -> Outcome:
        tried[size] = run_attempt(process, size, progress)
        return tried[size]

    is_order_unknown = info.allocator is not None and info.allocator.falls is None
    is_large = STATE_COPIES * info.model_bytes > info.device.budget_bytes / 2
    try:
        result = find_largest(
            run,
            cap=cap,
            new_allocator=partial(new_allocator, info),
            falling=partial(new_allocator, info, falls=True) if is_order_unknown else None,
            multiple=multiple,
            guess=guess,
            known=() if saved is None else saved.programs(),
            # An error of a large model costs a whole run.
            first=FIRST // 2 if is_large else FIRST,
        )
    except Exception as error:
        if tried and cap >= MULTIPLES[0] and all(outcome.error for outcome in tried.values()):
            _look_for_multiple(process, progress, sorted(tried), error)
        # A batch of 1 is a special case for some operators (batch statistics), and the last resort.
        refused = [outcome for _, outcome in sorted(tried.items()) if outcome.error is None]
        if min(tried, default=0) == 1 and refused:
            raise nothing_fits(process, refused[0], describe(error)) from error
        raise
    if not result.micro_batch:
        if result.stopped_by == "interrupt":
            raise KeyboardInterrupt
        raise nothing_fits(process, tried[min(tried)])
    if guess is not None and guess in tried and not tried[guess].attempt.fits:
        progress.note(f"the saved micro-batch of {guess} no longer fits, so the limit was probed again")
    _note_next(result, multiple, info.device.name, progress)
    probe = result.probe(caps, multiple=multiple, saved_on=None if saved is None else saved.date)
    probe = msgspec.structs.replace(probe, precision=info.precision)
    return Limit(probe, None, result.programs, tried[result.micro_batch].trace, falls=result.falls)


def _look_for_multiple(
    process: SetupProcess, progress: Progress, failed: list[int], error: Exception
) -> None:
    """Raise if a multiple of a number runs where all sizes failed for another reason than memory.

    Raises:
        InputError: it names the number.
    """
    if run_attempt(process, MULTIPLES[0], progress).attempt.fits:
        raise InputError(
            f"micro-batches of {', '.join(map(str, failed))} fail, and one of {MULTIPLES[0]} runs: give "
            f"--micro-batch-multiple {MULTIPLES[0]}, or a smaller number whose multiples run. The error of "
            f"{failed[-1]}: {describe(error)}"
        ) from error


def _note_next(result: SearchResult, multiple: int, device: str, progress: Progress) -> None:
    """Note the reason that refused the next size if it is not the budget."""
    next_size = result.micro_batch + multiple
    above = next((attempt for attempt in result.attempts if attempt.micro_batch == next_size), None)
    if above is not None and above.is_error:
        common = math.gcd(*(attempt.micro_batch for attempt in result.attempts if attempt.fits))
        number = next((number for number in MULTIPLES if common % number == 0 != next_size % number), None)
        hint = "" if number is None else f". If only multiples run, give --micro-batch-multiple {number}"
        progress.note(f"a micro-batch of {next_size:,} does not run: {above.reason}{hint}")
    if above is not None and above.is_below_budget:
        progress.note(
            f"{device}, not the budget, refused a micro-batch of {next_size:,} twice: {above.reason}. Others "
            "may hold its memory, so the limit is not saved: free memory, or give a smaller --memory-budget"
        )


def _announce(process: SetupProcess, progress: Progress) -> None:
    """Report the device and the remarks on the setup."""
    progress.opened(process.info.device)
    for line in process.info.notes:
        progress.note(line)
