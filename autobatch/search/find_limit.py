"""The largest micro-batch that fits: a search finds it, saves it, and begins at what was saved before.

    saved limit ──guess──► search by runs ──► batches of the run ──► micro-batches of the plan ──► Limit

One run confirms a saved limit: it agrees with the saved programs to the byte, and their replay says that no
more fits.
"""

from __future__ import annotations

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
from autobatch.footprint.fitting import Fitting
from autobatch.footprint.program import Program, Untraceable
from autobatch.planning import micro_batches
from autobatch.rehearsal.attempt import ATTEMPT_STEPS, Outcome
from autobatch.rehearsal.process import Session, SetupProcess
from autobatch.rehearsal.setup import new_allocator
from autobatch.search.attempts import Attempts, ask_or_none, nothing_fits, run_attempt
from autobatch.search.cache import CachedLimit, entry_path, keep, load_programs, recall
from autobatch.search.probe import FIRST, Found, find_largest
from autobatch.search.real_batches import survive_real_batches
from autobatch.workload.user_code import describe

MULTIPLES = (8, 4, 2)
"""Numbers of samples that a workload may insist on multiples of."""
STATE_COPIES = 4
"""Weights, gradients, and two states of each weight, as Adam has them."""
NOTABLE_GROWTH = 64 * MiB
"""Growth of other processes' memory during a probe that is worth a note: less is noise of drivers."""


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
    limit = probing.search(clock)
    limit = limit._replace(probe=_with_others(limit.probe, process, progress))
    progress.probed(limit.probe)
    key, cap = process.info.key, probing.cap
    limit = limit._replace(file=keep(limit.probe, limit.programs, key, cap=cap, home=home, progress=progress))
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
    if not limit.programs or probe.real_batches is not None or probe.stopped_by is not None:
        return limit
    fitting = Fitting(limit.programs, lambda: new_allocator(process.info))
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

    def search(self, clock: Callable[[], float]) -> Limit:
        """Search by runs, from the saved limit if there is one.

        Raises:
            DoesNotFitError: not even a micro-batch of 1 fits.
            InputError: only multiples of a number run.
        """
        process, progress, start = self._process, self._progress, clock()
        info, attempts, multiple = process.info, self._attempts, self._options.multiple or 1
        saved = self._saved(multiple)
        progress.doing("looking for what fits")
        tried: dict[int, Outcome] = {}

        def run(size: int) -> Outcome:
            tried[size] = attempts.run(size, may_fail=True)
            return tried[size]

        limit_s = self._options.search.time_limit or math.inf
        is_large = STATE_COPIES * info.model_bytes > info.device.budget_bytes / 2
        try:
            found = find_largest(
                run,
                cap=self.cap,
                new_allocator=lambda: new_allocator(info),
                multiple=multiple,
                guess=None if saved is None else saved.micro_batch,
                known=() if saved is None else load_programs(entry_path(saved.key, self._home)),
                # An error of a large model costs a whole run.
                first=FIRST // 2 if is_large else FIRST,
                stopped=lambda: attempts.stopped_by or ("time limit" if clock() - start > limit_s else None),
            )
        except Exception as error:
            self._look_for_multiple(tried, error)
            # A batch of 1 is a special case for some operators (batch statistics), and the last resort.
            refused = [outcome for _, outcome in sorted(tried.items()) if outcome.error is None]
            if min(tried, default=0) == 1 and refused:
                raise nothing_fits(process, refused[0], describe(error)) from error
            raise
        if not found.micro_batch:
            if found.stopped_by == "interrupt":
                raise KeyboardInterrupt
            raise nothing_fits(process, tried[min(tried)])
        self._note_saved(saved, tried)
        self._note_next(found, multiple)
        trace = tried[found.micro_batch].trace
        probe = msgspec.structs.replace(
            found.probe(self._caps, multiple=multiple, saved_on=None if saved is None else saved.date),
            memory_variation=variation_of(trace),
            precision=info.precision,
        )
        if probe.memory_variation:
            progress.note(
                f"memory varies: what equal micro-batches of {probe.micro_batch:,} allocate differs by "
                f"{probe.memory_variation:.1%} from draw to draw. Another draw of this size may not fit, and "
                "one of a larger size may"
            )
        return Limit(probe, None, found.programs, trace)

    def _saved(self, multiple: int) -> CachedLimit | None:
        """Return the saved limit of this key, with a note if it is out of date."""
        may_vary = self._options.device.memory_budget is None
        saved = recall(self._process.info.key, self._home, self._progress, may_vary=may_vary)
        return None if saved is None or saved.micro_batch < multiple else saved

    def _note_saved(self, saved: CachedLimit | None, tried: dict[int, Outcome]) -> None:
        """Note that a saved limit no longer fits."""
        ran = None if saved is None else tried.get(saved.micro_batch)
        if ran is not None and not ran.attempt.fits:
            self._progress.note(
                f"the saved micro-batch of {ran.attempt.micro_batch} no longer fits, so the limit was probed "
                "again"
            )

    def _look_for_multiple(self, tried: dict[int, Outcome], error: Exception) -> None:
        """Raise if all sizes failed for another reason than memory, and a multiple of a number runs.

        Raises:
            InputError: it names the number.
        """
        if self.cap < MULTIPLES[0] or any(outcome.error is None for outcome in tried.values()):
            return
        if self._attempts.run(MULTIPLES[0], may_fail=True).attempt.fits:
            raise InputError(
                f"micro-batches of {', '.join(map(str, sorted(tried)))} fail, and one of {MULTIPLES[0]} runs"
                f": give --micro-batch-multiple {MULTIPLES[0]}, or a smaller number whose multiples run. The "
                f"error of {max(tried)}: {describe(error)}"
            ) from error

    def _note_next(self, found: Found, multiple: int) -> None:
        """Note the reason that refused the next size if it is not the budget."""
        next_size = found.micro_batch + multiple
        above = next((attempt for attempt in found.attempts if attempt.micro_batch == next_size), None)
        if above is None:
            return
        if above.is_error:
            common = math.gcd(*(attempt.micro_batch for attempt in found.attempts if attempt.fits))
            number = next(
                (number for number in MULTIPLES if common % number == 0 != next_size % number), None
            )
            hint = "" if number is None else f". If only multiples run, give --micro-batch-multiple {number}"
            self._progress.note(f"a micro-batch of {next_size:,} does not run: {above.reason}{hint}")
        if above.is_below_budget:
            self._progress.note(
                f"{self._process.info.device.name}, not the budget, refused a micro-batch of "
                f"{next_size:,} twice: {above.reason}. Others may hold its memory, so the limit is "
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


def _others_bytes(session: Session) -> int | None:
    return session.setup.device.describe().other_processes_bytes
