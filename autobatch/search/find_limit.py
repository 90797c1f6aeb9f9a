"""The largest micro-batch that fits: a search finds it, saves it, and begins at what was saved before.

saved limit ──guess──► search by runs ──► batches of the plan ──► Limit

A limit is kept in a JSON file per key, under ``profiles/<device>/limits`` of the data directory. The budget
is no part of the key, because the programs of the steps are kept as well, and say what fits in any budget.

A plan runs micro-batches of several sizes, and a size may fail although a larger one fits alone, because the
allocator cuts its memory in another way for each. If samples differ in size, batches of the run show what
fits: they run one after the other, each with the cache that those before it have left. Else the sizes of an
even split run that the replay doubts.
"""

from __future__ import annotations

import hashlib
import heapq
import logging
import math
import re
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace

from autobatch.core import __version__
from autobatch.core.errors import AutobatchError, DoesNotFitError, UserCodeError
from autobatch.core.files import UNREADABLE, write_atomic
from autobatch.core.options import Options
from autobatch.core.progress import Progress
from autobatch.core.records import Attempt, LimitedBy, Probe
from autobatch.core.text import error_text, printable
from autobatch.core.units import format_bytes
from autobatch.device.allocator import Allocator
from autobatch.device.oom import loses_context
from autobatch.footprint.explain import explain
from autobatch.footprint.program import Fitting
from autobatch.planning import micro_batches
from autobatch.rehearsal.process import ChildCrashed, SetupProcess, ThisProcess
from autobatch.rehearsal.rehearsal import Outcome, attempt, batch_of, rehearse
from autobatch.rehearsal.setup import KeyValue, Setup
from autobatch.search.probe import FIRST, Limit, SavedLimit, find_largest
from autobatch.workload.order import GlobalBatch, Split, sampler_of

_LOG = logging.getLogger(__name__)
STATE_COPIES = 4
"""Weights, gradients, and two states of each weight, as Adam has them."""
BATCHES = 3
"""First batches of a run that are run, and as many of the heaviest ones."""
TRIES = 8
"""Splits into more micro-batches that are tried if one does not survive."""
MOST_SAMPLES = 2**23
"""Samples among which the heaviest batches are looked for, which takes about 3 seconds."""


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
    info, asked = process.info, options.micro_batch
    progress.opened(info.device)
    for line in info.notes:
        progress.note(line)
    progress.doing("looking for what fits")
    if asked is None:
        limit = _largest(process, options, share, home, progress)
    else:
        outcome = run_attempt(process, asked, progress)
        if not outcome.attempt.fits:
            raise outcome.error or _nothing_fits(process, outcome)
        probe = Probe(
            micro_batch=asked,
            limited_by="max_micro_batch",
            upper_bound_by="cap",
            predicted_micro_batch=None,
            oom_count=0,
            attempts=[outcome.attempt],
            source="asked",
        )
        limit = Limit(probe, trace=outcome.trace)
    probe = replace(limit.probe, precision=options.precision)
    limit = limit._replace(probe=probe, planned=probe.micro_batch)
    return limit if share is None else limit_of_plan(process, limit, share, options.seed, progress)


def _largest(
    process: SetupProcess, options: Options, share: int | None, home: Path, progress: Progress
) -> Limit:
    """Find the largest micro-batch that fits; see `find_limit`."""
    info = process.info
    caps: dict[LimitedBy, int | None] = {
        "target_batch": options.target_batch if share is None else share,
        "max_micro_batch": options.max_micro_batch,
        "dataset": info.samples,
    }
    outcomes: dict[int, Outcome] = {}

    def run(size: int) -> Outcome:
        outcomes[size] = outcome = run_attempt(process, size, progress)
        return outcome

    # An error of a large model costs a whole run.
    is_large = STATE_COPIES * info.model_bytes > info.device.budget_bytes / 2
    search = partial(
        find_largest,
        run,
        caps,
        partial(info.new_allocator, info.device.budget_bytes),
        multiple=options.micro_batch_multiple,
        first=FIRST // 2 if is_large else FIRST,
    )
    limit = search_from_saved(search, info.key, home, progress)
    if not limit.probe.micro_batch:
        raise _nothing_fits(process, outcomes[min(outcomes)])
    return limit


def search_from_saved(
    search: Callable[..., Limit], key: Mapping[str, KeyValue], home: Path, progress: Progress
) -> Limit:
    """Search from the saved limit of a key, note what refused sizes besides the budget, and save the answer.

    ``search`` is `find_largest` without ``known``. A file that cannot be used is ignored with a logged
    reason. Nothing is saved if nothing fits.
    """
    same = {name: value for name, value in key.items() if value is not None and name != "budget_bytes"}
    same["autobatch"] = __version__  # another version may record other events
    digest = hashlib.sha256(msgspec.json.encode(same, order="deterministic")).hexdigest()
    device = re.sub(r"[^a-z0-9]+", "-", str(key["device"]).casefold()).strip("-")
    file, known = home / "profiles" / (device or "device") / "limits" / f"{digest}.json", None
    try:
        known = msgspec.json.decode(file.read_bytes(), type=SavedLimit) if file.is_file() else None
    except (OSError, *UNREADABLE) as error:
        _LOG.warning("%s", printable(f"the saved limit {file} is ignored: {error}"))
    limit = search(known=known)
    probe = limit.probe
    if not probe.micro_batch:
        return limit
    if known is not None and not probe.attempts[0].fits:
        progress.note(f"{probe.attempts[0].micro_batch} no longer fit, so the saved limit was probed again")
    size = probe.micro_batch + probe.multiple
    above = next((attempt for attempt in probe.attempts if attempt.micro_batch == size), None)
    if above is not None and above.is_error:
        progress.note(
            f"a micro-batch of {size:,} does not run: {above.reason}. If only multiples of a number run, "
            "such as 2, give --micro-batch-multiple 2"
        )
    if held := [attempt.micro_batch for attempt in probe.attempts if attempt.is_below_budget]:
        progress.note(
            f"{key['device']}, not the budget, refused a micro-batch of {min(held):,} twice. Others may hold "
            "its memory, so the limit is not saved: free memory, or give a smaller --memory-budget"
        )
        return limit
    answer = SavedLimit(micro_batch=probe.micro_batch, programs=tuple(limit.programs))
    try:
        return limit._replace(file=write_atomic(file, msgspec.json.encode(answer) + b"\n"))
    except OSError as error:
        progress.note(
            f"the limit was not saved: {file} cannot be written: {error.strerror or error}; set "
            "AUTOBATCH_HOME to a writable directory"
        )
        return limit


def _nothing_fits(process: SetupProcess, smallest: Outcome) -> DoesNotFitError:
    """Build the error that explains the memory of the smallest attempt, and lists what helps."""
    last, largest = smallest.attempt, process.info.largest_sample
    parts = [
        f"a micro-batch of {last.micro_batch} does not fit in the budget of "
        f"{format_bytes(process.info.device.budget_bytes)}: {str(last.reason).removesuffix('.')}"
        + (f" (in the {last.phase})" if last.phase else "")
    ]
    if largest is not None and last.micro_batch == 1:
        index, size = largest
        parts.append(f"It ran with sample {index} of the training data, the largest: its size is {size:g}")
    if smallest.trace is not None and smallest.trace.marks:
        parts.append(f"It took {explain(smallest.trace).text()}")
    # The memory of a loss over the whole batch depends on the target batch, not on the micro-batch.
    smaller = ", a smaller target batch" if last.phase == "loss" else ""
    shorter = ", samples cut shorter or left out" if largest is not None else ""
    parts.append(f"What helps: a larger --memory-budget{smaller}{shorter}")
    return DoesNotFitError(". ".join(parts))


def reported(attempt: Callable[[], Outcome], progress: Progress) -> Outcome:
    """Make an attempt, once more if something else than the budget refused memory, and report it."""
    outcome = attempt()
    if outcome.attempt.is_below_budget:
        outcome = attempt()
    progress.attempted(outcome.attempt)
    return outcome


def run_attempt(process: SetupProcess, micro_batch: int, progress: Progress) -> Outcome:
    """Make an attempt, and report it; see `reported`.

    Returns:
        Its outcome, with the error if the size fails for another reason than memory. A size for which the
        host ends the child process does not fit.

    Raises:
        Exception: the input is invalid at any size, or this process has lost its GPU.
    """
    progress.doing(f"running {micro_batch:,} samples at once")
    return reported(partial(_run, process, micro_batch), progress)


def _run(process: SetupProcess, micro_batch: int) -> Outcome:
    start = time.perf_counter()
    failure: Exception
    try:
        return process.call(f"an attempt at a micro-batch of {micro_batch}", attempt, micro_batch)
    except Exception as error:
        if isinstance(error, AutobatchError) and not isinstance(error, UserCodeError | ChildCrashed):
            raise
        failure = error
    # Outside of the except block, so that nothing holds the tensors of the failed attempt.
    traceback.clear_frames(failure.__traceback__)
    if isinstance(process, ThisProcess) and loses_context(failure):
        raise failure
    is_killed = isinstance(failure, ChildCrashed) and failure.out_of_memory
    reason = "the host ran out of memory and ended the child process"
    failed = Attempt(
        micro_batch=micro_batch,
        fits=False,
        peak_allocated_bytes=None,
        peak_reserved_bytes=None,
        seconds=time.perf_counter() - start,
        reason=reason if is_killed else error_text(failure, first_line=True),
        is_error=not is_killed,
    )
    return Outcome(failed, None, error=None if is_killed else failure)


def limit_of_plan(process: SetupProcess, limit: Limit, samples: int, seed: int, progress: Progress) -> Limit:
    """Lower what a plan may ask for until the micro-batches of a rank's samples fit; a note tells of it."""
    probe, info = limit.probe, process.info
    largest, multiple = probe.micro_batch, probe.multiple
    if info.new_allocator is Allocator:  # which does not fragment
        return limit
    attempts: list[Attempt] = []

    def why_not_alone(sizes: Iterable[int]) -> str | None:
        """Return the reason why a size does not fit; None if all do."""
        for size in sorted({*sizes} - {largest}, reverse=True):
            attempts.append(run_attempt(process, size, progress).attempt)
            if attempts[-1].reason is not None:
                return attempts[-1].reason
        return None

    if is_ragged := info.largest_sample is not None:
        progress.doing("running batches of the run")
        batches = process.call("the choice of real batches", batches_to_run, samples, seed)

        def why_not(size: int) -> str | None:
            """Return the reason why batches of the run do not fit in micro-batches of a size, or it alone."""
            split = Split(multiple=multiple)
            reason = process.call("a run of real batches", run_batches, batches, split, size)
            return reason or why_not_alone([size])

    else:
        doubts = Fitting(limit.programs, partial(info.new_allocator, info.device.budget_bytes))
        # A replay that is wrong about the limit tells nothing about smaller sizes.
        if not limit.programs or not doubts.fits(largest):
            return limit

        def why_not(size: int) -> str | None:
            """Return the reason why a size of the even split does not fit that the replay doubts."""
            sizes = micro_batches(samples, size, multiple)
            return why_not_alone(each for each in sizes if not doubts.fits(each))

    parts = math.ceil(samples / largest)
    more = (multiple * math.ceil(samples / (part * multiple)) for part in range(parts + 1, parts + 1 + TRIES))
    for size in dict.fromkeys([largest, *more]):
        if (reason := why_not(size)) is None:
            break
    if size < largest or reason is not None:
        so = f"The plan takes {size:,} at most, which fit"
        if reason is not None:
            so = f"{size:,} do not fit either, so steps may run again: {reason}"
        progress.note(
            f"a micro-batch of {largest:,} fits alone, but sizes that alternate fragment the memory. {so}"
        )
    errors = sum(not (run.fits or run.is_error) for run in attempts)
    probe = replace(probe, attempts=[*probe.attempts, *attempts], oom_count=probe.oom_count + errors)
    if is_ragged:
        by = probe.upper_bound_by if size == largest else "run"
        probe = replace(probe, micro_batch=size, upper_bound_by=by, micro_batch_alone=largest)
    return limit._replace(probe=probe, planned=size)


def batches_to_run(setup: Setup, samples: int, seed: int) -> list[GlobalBatch]:
    """Return the first batches of a run and its heaviest; of a stream, twice as many of the first."""
    sizes = None if setup.stream is not None else setup.worst_case.sizes()
    run = sampler_of(setup.workload, samples, seed)
    run.steps = max(2 * BATCHES, min(run.samples, MOST_SAMPLES) // samples)
    if setup.stream is not None:
        run.order = lambda _: np.arange(run.samples)
    if sizes is None:
        return list(islice(run.batches(), 2 * BATCHES))
    heaviest = heapq.nlargest(BATCHES, run.batches(BATCHES), key=lambda batch: sizes[batch.ids].sum())
    return [*islice(run.batches(), BATCHES), *heaviest]


def run_batches(setup: Setup, batches: Sequence[GlobalBatch], split: Split, micro_batch: int) -> str | None:
    """Run batches in a split within the budget. Return the reason if they do not fit, else None."""
    chosen = (batch_of(setup.workload, split.parts(batch, micro_batch)) for batch in batches)
    return rehearse(setup, chosen, within_budget=True).reason
