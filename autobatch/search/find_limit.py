"""The largest micro-batch that fits: one run confirms a saved limit, else a search finds it and saves it.

    saved limit ──► run ──► confirmed ──┐
                                        ├──► batches of the run ──► micro-batches of the plan ──► Limit
    trace ──► search, if none is saved ─┘

A saved limit that a run puts in doubt is searched again.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from autobatch.core.errors import DoesNotFitError, InputError
from autobatch.core.options import Options
from autobatch.core.progress import Progress
from autobatch.core.records import Attempt, LimitedBy, Probe
from autobatch.core.units import MiB, format_bytes
from autobatch.device.allocator.trace import FREE, Trace
from autobatch.footprint.fit import Footprint
from autobatch.footprint.fitting import Fitting
from autobatch.footprint.predict import program_on
from autobatch.footprint.program import Program, TooLong, Untraceable
from autobatch.planning import micro_batches
from autobatch.rehearsal import trace as traced_setup
from autobatch.rehearsal.attempt import ATTEMPT_STEPS, Outcome
from autobatch.rehearsal.process import Session, SetupProcess
from autobatch.rehearsal.setup import new_allocator
from autobatch.search.attempts import Attempts, ask_or_none, nothing_fits, run_attempt
from autobatch.search.cache import CachedLimit, entry_path, find_trace, lookup, save_trace, store
from autobatch.search.real_batches import survive_real_batches
from autobatch.search.replay import replay_on
from autobatch.search.search import MULTIPLES, Found, first_size, search
from autobatch.workload.user_code import describe

SUSPECT = 3
"""A size that is no multiple of any likely number, run if the step could be traced at multiples only."""
NOTABLE_GROWTH = 64 * MiB
"""Growth of other processes' memory during a probe that is worth a note: less is noise of drivers."""
AMPLE_ROOM = 0.8
"""Share of the budget below which a predicted peak leaves so much room that a saved limit is in doubt."""


class Limit(NamedTuple):
    """The answer of a probe, and what later stages take from it."""

    probe: Probe
    file: Path | None = None
    """File that keeps the answer; None if it was not saved."""
    footprint: Footprint | None = None
    """The traced step; None if nothing was traced."""
    planned: int = 0
    """The largest micro-batch that a plan may ask for; less than the limit if an even split does not fit."""


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
        share: samples of a batch that this rank takes, to check the micro-batches of their even split; None
            for a probe without a plan.
        home: data directory, in which answers are saved.
        progress: receives each attempt and the answer.
        clock: seconds.

    Raises:
        DoesNotFitError: not even a micro-batch of 1 fits.
    """
    _open(process, progress)
    probing = _Probing(process, options, share, home, progress)
    confirmed = probing.confirm()
    limit = confirmed or probing.search(clock)
    limit = limit._replace(probe=_with_others(limit.probe, process, progress))
    progress.probed(limit.probe)
    limit = limit if confirmed else probing.save(limit)
    probe = survive_real_batches(process, limit.probe, share, options.device.seed, progress)
    limit = limit._replace(probe=probe, planned=probe.micro_batch)
    is_alone = process.info.key["world_size"] in (None, 1)
    return limit if share is None or not is_alone else limit_of_plan(process, limit, share, progress)


def check_size(process: SetupProcess, micro_batch: int, *, progress: Progress) -> Probe:
    """Run one micro-batch, and leave the saved limit unchanged.

    Raises:
        DoesNotFitError: it does not fit.
    """
    _open(process, progress)
    attempted = Attempts(process, progress).run(micro_batch).attempt
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


def limit_of_plan(process: SetupProcess, limit: Limit, samples: int, progress: Progress) -> Limit:
    """Find the largest micro-batch that a plan of this many samples may ask for.

    The micro-batches of an even split are a little smaller than the limit and may still not fit, because the
    memory that a caching allocator reserves is not monotone in them. A replay tells which ones to doubt, and
    a run decides. If one does not fit, a split into more micro-batches is checked.
    """
    probe = limit.probe
    largest = probe.micro_batch
    if limit.footprint is None or probe.real_batches is not None or probe.stopped_by is not None:
        return limit
    program = program_on(limit.footprint, process.info.libraries)
    fitting = Fitting([program], lambda: new_allocator(process.info))
    attempts: list[Attempt] = []

    def runs(size: int) -> bool:
        attempts.append(run_attempt(process, size).attempt)
        progress.attempted(attempts[-1])
        return attempts[-1].fits

    try:
        # If the replay is wrong about the limit, it proves nothing about smaller sizes.
        asked = largest if fitting.fits(largest) else 0
        while asked > probe.multiple:
            sizes = set(micro_batches(samples, asked, probe.multiple)) - {largest}
            doubted = sorted((one for one in sizes if not fitting.fits(one)), reverse=True)
            failed = next((one for one in doubted if not runs(one)), None)
            if failed is None:
                break
            progress.note(
                f"a micro-batch of {failed:,} does not fit although {largest:,} does, because the allocator "
                "cuts its memory in another way: the batch is split into more"
            )
            asked = max(sizes) - probe.multiple
    except Untraceable:
        return limit
    ooms = sum(not attempt.fits for attempt in attempts)
    probe = msgspec.structs.replace(
        probe, attempts=[*probe.attempts, *attempts], oom_count=probe.oom_count + ooms
    )
    return limit._replace(probe=probe, planned=asked if ooms else largest)


class _Probing:
    """One probe, with its process, its options and its caps."""

    def __init__(
        self, process: SetupProcess, options: Options, share: int | None, home: Path, progress: Progress
    ) -> None:
        self._process = process
        self._options = options
        batch = options.batch.target_batch if share is None else share
        limits = (batch, options.search.max_micro_batch, process.info.samples)
        names: tuple[LimitedBy, ...] = ("target_batch", "max_micro_batch", "dataset")
        self._caps = {name: limit for name, limit in zip(names, limits, strict=True) if limit is not None}
        """The limits of the micro-batch besides memory, in samples."""
        self.cap = min(self._caps.values())
        self._home = home
        self._progress = progress
        self._attempts = Attempts(process, progress)

    def confirm(self) -> Limit | None:
        """Run the saved limit of this key once, and check that no more fits.

        Returns:
            None if no limit is saved, if it was saved for other caps or multiples, if it no longer fits, or
            if more fits.
        """
        may_vary = self._options.device.memory_budget is None
        cached, stale = lookup(self._process.info.key, self._home, may_vary=may_vary)
        if stale is not None:
            self._progress.note(f"{stale}. It is probed again")
        if cached is None:
            return None
        asked = self._options.multiple
        multiple = cached.multiple if asked is None else asked
        size = min(cached.micro_batch, self.cap) // multiple * multiple
        if not size or cached.multiple % multiple or (cached.limited_by != "memory" and size < self.cap):
            return None
        outcome = self._attempts.run(size)
        if not outcome.attempt.fits:
            self._progress.note(
                f"the saved micro-batch of {size} no longer fits, so the limit is probed again"
            )
            return None
        self._progress.doing("checking whether more would fit")
        file = entry_path(cached.key, self._home)
        step = find_trace(file, size, outcome.trace)
        if step is None:
            step = self._trace()
            save_trace(step, file)
        if size + multiple <= self.cap and self._is_too_small(cached, outcome, step, multiple):
            self._progress.note(
                f"more than the saved micro-batch of {size} seems to fit, so the limit is probed again"
            )
            return None
        probe = Probe(
            micro_batch=size,
            limited_by=self._limited_by(size),
            upper_bound_by="cap" if size == self.cap else cached.upper_bound_by,
            predicted_micro_batch=cached.micro_batch,
            oom_count=0,
            attempts=[outcome.attempt],
            multiple=multiple,
            memory_variation=variation_of(outcome.trace),
            source=f"saved {cached.date}",
            precision=self._process.info.precision,
        )
        return Limit(probe, file, step)

    def search(self, clock: Callable[[], float]) -> Limit:
        """Search from the trace of the step, or without one if it cannot be traced.

        Raises:
            DoesNotFitError: not even a micro-batch of 1 fits.
        """
        process, progress, start = self._process, self._progress, clock()
        info, options, attempts = process.info, self._options, self._attempts
        progress.doing("predicting what fits")
        step = self._trace()
        tried: dict[int, Outcome] = {}

        def run(size: int) -> Outcome:
            tried[size] = attempts.run(size, may_fail=True)
            return tried[size]

        limit_s = options.search.time_limit or math.inf
        world = int(info.key["world_size"] or 1)
        try:
            found = search(
                run,
                cap=self.cap,
                replay=replay_on(info, step, self._other_order),
                first=first_size(info.compute_capability),
                multiple=options.multiple,
                multiples=sorted({*MULTIPLES, world} - {1}),
                suspect=SUSPECT if step is not None and step.multiple > 1 else None,
                stopped=lambda: attempts.stopped_by or ("time limit" if clock() - start > limit_s else None),
            )
        except Exception as error:
            # A batch of 1 is a special case for some operators (batch statistics), and the last resort.
            refused = [one.attempt for size, one in sorted(tried.items(), reverse=True) if one.error is None]
            if 1 in tried and refused:
                raise nothing_fits(refused, process, step, single_error=describe(error)) from error
            raise
        if not found.micro_batch:
            if found.stopped_by == "interrupt":
                raise KeyboardInterrupt
            raise nothing_fits(found.attempts, process, step)
        self._note_next(found)
        probe = Probe(
            micro_batch=found.micro_batch,
            limited_by=self._limited_by(found.micro_batch),
            upper_bound_by=found.upper_bound_by,
            predicted_micro_batch=found.predicted,
            oom_count=sum(not (attempt.fits or attempt.is_error) for attempt in found.attempts),
            attempts=found.attempts,
            multiple=found.multiple,
            memory_variation=variation_of(tried[found.micro_batch].trace),
            stopped_by=found.stopped_by,
            precision=info.precision,
        )
        if probe.memory_variation:
            progress.note(
                f"memory varies: what equal micro-batches of {probe.micro_batch:,} allocate differs by "
                f"{probe.memory_variation:.1%} from draw to draw. Another draw of this size may not fit, and "
                "one of a larger size may"
            )
        return Limit(probe, None, step)

    def save(self, limit: Limit) -> Limit:
        """Save the answer and the trace of a search that ran to its end, and return it with its file."""
        found = limit.probe
        refused_elsewhere = any(one.is_below_budget for one in found.attempts)
        if found.upper_bound_by is None or refused_elsewhere:
            return limit
        entry = CachedLimit(
            key=self._process.info.key,
            micro_batch=found.micro_batch,
            limited_by=found.limited_by,
            upper_bound_by=found.upper_bound_by,
            multiple=found.multiple,
            cap=self.cap,
            date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        )
        try:
            file = store(entry, self._home)
        except InputError as error:
            self._progress.note(f"the limit was not saved: {error}")
            return limit
        save_trace(limit.footprint, file)
        return limit._replace(file=file)

    def _limited_by(self, micro_batch: int) -> LimitedBy:
        """Return what limits an answer: the first cap that it reaches, else memory."""
        return next((name for name, cap in self._caps.items() if cap == micro_batch == self.cap), "memory")

    def _is_too_small(
        self, cached: CachedLimit, outcome: Outcome, step: Footprint | None, multiple: int
    ) -> bool:
        """Return whether more than a saved limit fits, by the replay or else by the peak of its run.

        The budget is the smaller of now and then, because close budgets count as the same.
        """
        info, ran, fits = self._process.info, outcome.attempt, None
        then, budget = cached.key.get("budget_bytes"), info.device.budget_bytes
        budget = min(then, budget) if isinstance(then, int) else budget
        if step is not None:
            info = msgspec.structs.replace(
                info, device=msgspec.structs.replace(info.device, budget_bytes=budget)
            )
            replay = replay_on(info, step, self._other_order)
            replay.learn(outcome)
            fits = replay.says_fits(ran.micro_batch + multiple)
            if fits:
                # What fits in one order of micro-batches may fail in the other.
                replay.add_other_order()
                fits = replay.says_fits(ran.micro_batch + multiple)
        if fits is not None:
            return fits
        # Memory has a fixed part, so one sample more takes at most its share of the peak.
        peak = ran.peak_reserved_bytes or ran.peak_allocated_bytes
        return peak is not None and peak + peak / ran.micro_batch < AMPLE_ROOM * budget

    def _trace(self) -> Footprint | None:
        """Trace the step. Note the reason if that would take too long."""
        traced = ask_or_none(self._process, "tracing the step", _trace)
        if isinstance(traced, str):
            self._progress.note(
                f"the memory of a step could not be predicted ({traced}), so only test runs show what fits"
            )
            return None
        return traced

    def _other_order(self) -> Program | None:
        return ask_or_none(self._process, "tracing the step", _trace_other_order)

    def _note_next(self, found: Found) -> None:
        """Note which sizes run, and the reason that refused the next size if it is not the budget."""
        above = next((one for one in found.attempts if one.micro_batch == found.next_size), None)
        if found.multiple > 1 and self._options.multiple is None:
            failed = next(one for one in found.attempts if one.is_error)
            self._progress.note(
                f"only multiples of {found.multiple} run as micro-batches: {failed.micro_batch:,} fails with "
                f"{failed.reason} (--micro-batch-multiple {found.multiple})"
            )
        if above is not None and above.is_error:
            self._progress.note(f"a micro-batch of {above.micro_batch:,} does not run: {above.reason}")
        if above is not None and above.is_below_budget:
            self._progress.note(
                f"{self._process.info.device.name}, not the budget, refused a micro-batch of "
                f"{above.micro_batch:,} twice: {above.reason}. Others may hold its memory, so the limit is "
                "not saved: free memory, or give a smaller --memory-budget"
            )


def variation_of(trace: Trace | None) -> float | None:
    """Return the share by which equal micro-batches of an attempt differ in what they allocate.

    The micro-batches of its later steps do the same work. They differ only if the data or the model draw at
    random, or depend on weights that have changed.

    Returns:
        None if they do not differ, or if no events with phases are known.
    """
    if trace is None:
        return None
    starts = [position for position, phase in trace.marks if phase == "forward"]
    if len(starts) != sum(ATTEMPT_STEPS):
        return None
    ends = [position for position, phase in trace.marks if phase in ("forward", "optimizer")]
    allocated = [
        sum(size for _, size in trace.events[start : min(end for end in ends if end > start)] if size != FREE)
        for start in starts
    ]
    _, first, second = ATTEMPT_STEPS
    pairs = zip(allocated[-first - second : -second], allocated[-second:], strict=True)
    return max(max(pair) / max(min(pair), 1) - 1 for pair in pairs) or None


def _open(process: SetupProcess, progress: Progress) -> None:
    """Report the device and the remarks on the setup."""
    progress.opened(process.info.device)
    for line in process.info.notes:
        progress.note(line)


def _with_others(found: Probe, process: SetupProcess, progress: Progress) -> Probe:
    """Add the memory that other processes hold after the probe, with a note if that grew."""
    before = process.info.device.other_processes_bytes
    if before is None:
        return found
    after = ask_or_none(process, "reading the GPU", _others_bytes)
    if after is not None and after - before >= NOTABLE_GROWTH:
        progress.note(
            f"other processes held {format_bytes(before)} of the GPU before the probe and hold "
            f"{format_bytes(after)} now. The answer may no longer fit: probe again, or give --memory-budget"
        )
    return msgspec.structs.replace(found, other_processes_bytes=after)


def _trace(session: Session) -> Footprint | str | None:
    """Return the step, the reason if its trace would take too long, or None if it cannot be traced."""
    try:
        return traced_setup.trace_footprint(session.setup, says_why=True)
    except TooLong as error:
        return str(error)


def _trace_other_order(session: Session) -> Program | None:
    return traced_setup.other_order(session.setup)


def _others_bytes(session: Session) -> int | None:
    return session.setup.device.describe().other_processes_bytes
