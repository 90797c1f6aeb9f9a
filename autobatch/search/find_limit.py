"""The largest micro-batch that fits: one run confirms a cached limit, else a search finds it and saves it."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from autobatch.core.errors import DoesNotFitError, InputError
from autobatch.core.options import Options
from autobatch.core.progress import Progress
from autobatch.core.records import Probe
from autobatch.core.units import MiB, format_bytes
from autobatch.footprint.fit import Footprint
from autobatch.footprint.largest import Fitting
from autobatch.search import questions
from autobatch.search.cache import (
    CachedLimit,
    StaleEntry,
    Untraced,
    entry_path,
    find_trace,
    keep_trace,
    lookup,
    order_of,
    store,
)
from autobatch.search.one_probe import (
    FailedSizes,
    Limit,
    Probing,
    SpillGuard,
    caps_of,
    has_ample_room,
    variation_of,
)
from autobatch.search.search import MULTIPLES, Found, first_size, search
from autobatch.setup.attempt import Outcome
from autobatch.setup.session import SetupProcess
from autobatch.setup.setup import new_allocator
from autobatch.workload.user_code import describe

SUSPECT = 3
"""A size that is no multiple of any likely number, run if the step could be traced at multiples only."""
NOTABLE_GROWTH = 64 * MiB
"""Growth of other processes' memory during a probe that is worth a note: less is noise of drivers."""


def find_limit(
    process: SetupProcess,
    options: Options,
    *,
    share: int | None = None,
    home: Path,
    progress: Progress,
    clock: Callable[[], float] = time.monotonic,
) -> Limit:
    """Find the largest micro-batch that fits.

    Args:
        process: holds the setup.
        options: options of the run: caps, time limit and budget.
        share: see `autobatch.search.one_probe.caps_of`.
        home: data directory, in which answers are kept.
        progress: receives each attempt and the answer.
        clock: seconds.

    Raises:
        DoesNotFitError: not even a micro-batch of 1 fits.
    """
    probing = _open(process, options, progress, share)
    cached = _look_up(probing, home)
    confirmed = _confirm(probing, cached, entry_path(cached.key, home)) if cached else None
    limit = confirmed or _search(probing, clock)
    limit = limit._replace(probe=_with_others(limit.probe, process, progress))
    progress.probed(limit.probe)
    if confirmed:
        return limit
    file = _store(probing, limit.probe, home)
    traced = limit.footprint or limit.untraced
    if traced is not None and file is not None:
        keep_trace(traced, file)
    return limit._replace(file=file)


def check_size(process: SetupProcess, micro_batch: int, *, progress: Progress) -> Probe:
    """Run one micro-batch, and leave the cached limit unchanged.

    Raises:
        DoesNotFitError: it does not fit.
    """
    attempted = _open(process, Options(), progress).run(micro_batch).attempt
    if not attempted.fits:
        raise DoesNotFitError(
            f"a micro-batch of {micro_batch} does not fit in "
            f"{format_bytes(process.info.device.budget_bytes)}: {attempted.reason}"
        )
    found = Probe(
        micro_batch=micro_batch,
        limited_by="max_micro_batch",
        upper_bound_by="cap",
        predicted_micro_batch=None,
        oom_count=0,
        attempts=[attempted],
        source="asked",
        precision=process.info.precision,
    )
    progress.probed(found)
    return found


def _open(process: SetupProcess, options: Options, progress: Progress, share: int | None = None) -> Probing:
    """Report the device, and gather the surroundings of a probe."""
    info = process.info
    progress.opened(info.device)
    for line in info.notes:
        progress.note(line)
    return Probing(
        process, options, caps_of(info, options, share), SpillGuard(active=info.may_spill), progress
    )


def _search(probing: Probing, clock: Callable[[], float]) -> Limit:
    """Search from the trace of the step, which is None if it cannot be traced."""
    process, progress, start = probing.process, probing.progress, clock()
    progress.doing("predicting what fits")
    traced = questions.trace(process)
    step = traced if isinstance(traced, Footprint) else None
    if isinstance(traced, str):
        _note_untraced(probing, traced)
    tried: dict[int, Outcome] = {}
    sizes = FailedSizes(probing.attempt, process)

    def run(size: int) -> Outcome:
        tried[size] = probing.report(sizes(size))
        return tried[size]

    options = probing.options
    limit_s = options.search.time_limit or math.inf
    world = int(process.info.key["world_size"] or 1)
    try:
        found = search(
            run,
            cap=probing.cap,
            replay=probing.replay(step, process.info.device.budget_bytes),
            first=first_size(process.info.compute_capability),
            multiple=options.multiple,
            multiples=sorted({*MULTIPLES, world} - {1}),
            suspect=SUSPECT if step is not None and step.multiple > 1 else None,
            stopped=lambda: sizes.stopped_by or ("time limit" if clock() - start > limit_s else None),
        )
    except Exception as error:
        # A batch of 1 is a special case for some operators (batch statistics), and the last resort.
        refused = [one.attempt for size, one in sorted(tried.items(), reverse=True) if one.error is None]
        if 1 in tried and refused:
            raise questions.nothing_fits(refused, process, step, single_error=describe(error)) from error
        raise
    if not found.micro_batch:
        if found.stopped_by == "interrupt":
            raise KeyboardInterrupt
        raise questions.nothing_fits(found.attempts, process, step)
    _note_search(probing, found)
    answer = tried[found.micro_batch]
    probe = Probe(
        micro_batch=found.micro_batch,
        limited_by=probing.limited_by(found.micro_batch),
        upper_bound_by=found.upper_bound_by,
        predicted_micro_batch=found.predicted,
        oom_count=sum(not (attempt.fits or attempt.is_error) for attempt in found.attempts),
        attempts=found.attempts,
        multiple=found.multiple,
        memory_variation=None if answer.trace is None else variation_of(answer.trace),
        stopped_by=found.stopped_by,
        precision=process.info.precision,
    )
    if probe.memory_variation:
        progress.note(
            f"memory varies: what equal micro-batches of {probe.micro_batch:,} allocate differs by "
            f"{probe.memory_variation:.1%} from draw to draw. Another draw of this size may not fit, and one "
            "of a larger size may"
        )
    untraced = None
    if isinstance(traced, str) and answer.trace is not None:
        untraced = Untraced(traced, order_of(answer.trace))
    return Limit(probe, None, step, untraced)


def _note_search(probing: Probing, found: Found) -> None:
    """Say why the next size does not run, if not for want of memory, and which sizes run."""
    size = found.micro_batch
    above = next((one for one in found.attempts if one.micro_batch == size + found.multiple), None)
    if found.multiple > 1 and probing.options.multiple is None:
        failed = next(one for one in found.attempts if one.is_error)
        probing.progress.note(
            f"only multiples of {found.multiple} run as micro-batches: {failed.micro_batch:,} fails with "
            f"{failed.reason} (--micro-batch-multiple {found.multiple})"
        )
    if above is not None and above.is_error:
        probing.progress.note(f"a micro-batch of {above.micro_batch:,} does not run: {above.reason}")
    if above is not None and above.is_below_budget:
        probing.progress.note(
            f"{probing.process.info.device.name}, not the budget, refused a micro-batch of "
            f"{above.micro_batch:,} twice: {above.reason}. Others may hold its memory, so the limit is not "
            "saved: free memory, or give a smaller --memory-budget"
        )


def _look_up(probing: Probing, home: Path) -> CachedLimit | None:
    """Return the cached limit of this key; note the changed fields if there is only a stale one."""
    cached = lookup(probing.process.info.key, home)
    if not isinstance(cached, StaleEntry):
        return cached
    if cached.has_close_budget and probing.options.device.memory_budget is None:
        return cached.limit
    if not cached.is_other_question:
        probing.progress.note(f"{cached}: probing again")
    return None


def _confirm(probing: Probing, cached: CachedLimit, file: Path) -> Limit | None:
    """Run the cached limit of a file once, and look at its step.

    Returns:
        The limit, with the step if it can be traced; None if the cached limit answers another question, no
        longer fits, or is too small. Too small means that more fits, which a run of it alone does not show.
    """
    multiple = cached.multiple if probing.options.multiple is None else probing.options.multiple
    size = min(cached.micro_batch, probing.cap) // multiple * multiple
    if not size or cached.multiple % multiple or (cached.limited_by != "memory" and size < probing.cap):
        return None
    outcome = probing.run(size)
    attempted = outcome.attempt
    if not attempted.fits:
        probing.progress.note(f"the saved micro-batch of {size} no longer fits: probing again")
        return None
    probing.progress.doing("checking whether more would fit")
    step = _trace_of(probing, file, outcome)
    if size + multiple <= probing.cap and _is_too_small(probing, cached, outcome, step, multiple):
        probing.progress.note(f"more than the saved micro-batch of {size} seems to fit: probing again")
        return None
    probe = Probe(
        micro_batch=size,
        limited_by=probing.limited_by(size),
        upper_bound_by="cap" if size == probing.cap else cached.upper_bound_by,
        predicted_micro_batch=cached.micro_batch,
        oom_count=0,
        attempts=[attempted],
        multiple=multiple,
        memory_variation=None if outcome.trace is None else variation_of(outcome.trace),
        source=f"saved {cached.date}",
        precision=probing.process.info.precision,
    )
    return Limit(probe, file, step)


def _is_too_small(
    probing: Probing, cached: CachedLimit, outcome: Outcome, step: Footprint | None, multiple: int
) -> bool:
    """Return whether more than a cached limit fits, by the replay or else by the peak of its run.

    The budget is the smaller of now and then, because close budgets count as the same.
    """
    then, now = cached.key.get("budget_bytes"), probing.process.info.device.budget_bytes
    budget = min(then, now) if isinstance(then, int) else now
    fits = None
    if step is not None:
        replay = probing.replay(step, budget)
        replay.learn(outcome)
        fits = replay.says_fits(outcome.attempt.micro_batch + multiple)
    if fits:
        # What fits in one order of micro-batches may fail in the other.
        other = questions.trace_other_order(probing.process)
        alone = None if other is None else Fitting([other], lambda: new_allocator(probing.info_at(budget)))
        fits = alone is None or alone.fits(outcome.attempt.micro_batch + multiple)
    return has_ample_room(outcome.attempt, budget) if fits is None else fits


def _trace_of(probing: Probing, file: Path, outcome: Outcome) -> Footprint | None:
    """Return the step of a run: the kept one of its file if that is what ran, else a trace, which is kept.

    Returns:
        None if it cannot be traced, or would take too long.
    """
    traced = find_trace(file, outcome.attempt.micro_batch, outcome.trace)
    if traced is None:
        traced = questions.trace(probing.process)
        if isinstance(traced, Footprint):
            keep_trace(traced, file)
        elif traced is not None and outcome.trace is not None:
            keep_trace(Untraced(traced, order_of(outcome.trace)), file)
    if isinstance(traced, Footprint):
        return traced
    if traced is not None:
        _note_untraced(probing, traced)
    return None


def _note_untraced(probing: Probing, reason: str) -> None:
    probing.progress.note(f"the step was not traced, so runs alone tell what fits: {reason}")


def _store(probing: Probing, found: Probe, home: Path) -> Path | None:
    """Save the answer of a search that ran to its end, and return its file; None if it is not saved."""
    refused_elsewhere = any(one.is_below_budget for one in found.attempts)
    if found.upper_bound_by is None or refused_elsewhere:
        return None
    traced_bytes = questions.traced_peak(probing.process, found.micro_batch)
    of_answer = [one for one in found.attempts if one.fits and one.micro_batch == found.micro_batch]
    limit = CachedLimit(
        key=probing.process.info.key,
        micro_batch=found.micro_batch,
        limited_by=found.limited_by,
        upper_bound_by=found.upper_bound_by,
        multiple=found.multiple,
        cap=probing.cap,
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        traced_bytes=traced_bytes,
        measured_bytes=of_answer[0].peak_reserved_bytes if traced_bytes and of_answer else None,
    )
    try:
        return store(limit, home)
    except InputError as error:
        probing.progress.note(f"the limit was not saved: {error}")
        return None


def _with_others(found: Probe, process: SetupProcess, progress: Progress) -> Probe:
    """Add the memory that other processes hold after the probe, with a note if that grew."""
    before, after = process.info.device.other_processes_bytes, questions.others_bytes(process)
    if before is not None and after is not None and after - before >= NOTABLE_GROWTH:
        progress.note(
            f"other processes held {format_bytes(before)} of the GPU before the probe and hold "
            f"{format_bytes(after)} now. The answer may no longer fit: probe again, or give --memory-budget"
        )
    return msgspec.structs.replace(found, other_processes_bytes=after)
