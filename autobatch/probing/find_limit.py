"""The largest micro-batch that fits: confirm a cached limit with one run, else search, then save."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from autobatch.core.errors import DoesNotFitError, InputError
from autobatch.core.progress import Progress
from autobatch.core.records import Attempt, LengthLimit, LimitedBy, Probe
from autobatch.core.units import MiB, format_bytes
from autobatch.footprint.explain import explain
from autobatch.footprint.predict import Footprint
from autobatch.footprint.program import Untraceable
from autobatch.footprint.remedies import in_words
from autobatch.planning import rank_share
from autobatch.probing import questions
from autobatch.probing.attempt import Outcome
from autobatch.probing.cache import CachedLimit, StaleEntry, entry_path, lookup, store
from autobatch.probing.child import SetupProcess
from autobatch.probing.limits import ReplayPredictor, has_ample_room
from autobatch.probing.search import search
from autobatch.probing.setup import SetupInfo, new_allocator
from autobatch.probing.spill import SpillGuard
from autobatch.workload.user_code import describe

ASKED_FOR = {
    "budget_bytes", "device", "device_kind", "total_bytes", "precision", "max_grad_norm", "ema",
    "whole_batch",
}  # fmt: skip
"""Fields of the key that a user changes by asking: an answer to another question is not stale."""
NOTABLE_GROWTH = 64 * MiB
"""Growth of what other processes hold during a probe that is worth a note: less is noise of drivers."""
CLOSE_BUDGETS = 0.05
"""Share within which two budgets that follow free memory count as the same."""


@dataclass(frozen=True, kw_only=True)
class ProbeLimits:
    """Bounds of a probe: plain values."""

    target_batch: int | None = None
    """None if the probe is not for a plan."""
    max_micro_batch: int | None = None
    time_limit_s: float = math.inf
    has_own_budget: bool = False
    """The budget was asked for, and does not follow free memory."""


class Limit(NamedTuple):
    """The answer of a probe, and what later stages use of it."""

    probe: Probe
    file: Path | None = None
    """File that keeps the answer; None if nothing was kept."""
    footprint: Footprint | None = None
    """The traced step; None if nothing was traced."""


class _Probing(NamedTuple):
    """Surroundings of one probe, which all of its parts use."""

    process: SetupProcess
    limits: ProbeLimits
    caps: dict[LimitedBy, int]
    guard: SpillGuard
    progress: Progress

    def run(self, size: int) -> Outcome:
        """Make one attempt and report it."""
        outcome = self.guard.judge(questions.run_attempt(self.process, size))
        self.progress.attempted(outcome.attempt)
        return outcome


def find_limit(
    process: SetupProcess,
    limits: ProbeLimits,
    *,
    home: Path,
    progress: Progress,
    clock: Callable[[], float] = time.monotonic,
) -> Limit:
    """Find the largest micro-batch that fits.

    Args:
        process: holds the setup.
        limits: caps and time limit.
        home: data directory, in which answers are kept.
        progress: receives each attempt and the answer.
        clock: seconds.

    Raises:
        DoesNotFitError: not even a micro-batch of 1 fits.
    """
    probing = _open(process, limits, progress)
    info, cap = process.info, min(probing.caps.values())
    cached = _cached(info, limits, home, progress)
    confirmed = _confirm(probing, cached) if cached else None
    if cached is not None and confirmed is not None:
        found, footprint, file = confirmed, None, entry_path(cached.key, home)
    else:
        found, footprint = _search(probing, limits.time_limit_s, clock)
        file = None
    found = _with_others(found, process, progress)
    progress.probed(found)
    return Limit(found, file or _store(found, process, cap, home, progress), footprint)


def check_size(process: SetupProcess, micro_batch: int, *, progress: Progress) -> Probe:
    """Answer whether one micro-batch fits. What is cached stays as it is.

    Raises:
        DoesNotFitError: it does not.
    """
    probing = _open(process, ProbeLimits(), progress)
    attempted = probing.run(micro_batch).attempt
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
    )
    progress.probed(found)
    return found


def find_limits_by_size(
    process: SetupProcess, limits: ProbeLimits, found: Probe, *, progress: Progress
) -> Probe:
    """Find also the largest micro-batch of shorter samples, if sizes differ: one per quartile of the sizes.

    The limit on the tokens of a micro-batch follows from it: size times micro-batch, where that is flat.
    """
    quartiles = process.info.size_quartiles
    if not quartiles or found.stopped_by is not None:
        return found
    cap = min(caps_of(process.info, limits).values())
    *shorter, longest = quartiles
    lengths = [LengthLimit(size=longest, micro_batch=found.micro_batch, upper_bound_by=found.upper_bound_by)]
    for size in reversed(shorter):
        one = search(
            lambda micro_batch, size=size: questions.run_attempt(process, micro_batch, size),  # type: ignore[misc]
            cap=cap,
            predictor=ReplayPredictor(lambda: new_allocator(process.info)),
        )
        limit = LengthLimit(size=size, micro_batch=one.micro_batch, upper_bound_by=one.upper_bound_by)
        lengths.append(limit)
        progress.note(f"a micro-batch of {one.micro_batch:,} fits of samples up to a size of {size:g}")
    return msgspec.structs.replace(found, lengths=lengths[::-1])


def caps_of(info: SetupInfo, limits: ProbeLimits) -> dict[LimitedBy, int]:
    """Return the caps of the micro-batch besides memory, in samples, by their name."""
    caps: dict[LimitedBy, int] = {}
    if limits.target_batch is not None:
        caps["target_batch"] = rank_share(limits.target_batch, 1, 0)
    if limits.max_micro_batch is not None:
        caps["max_micro_batch"] = limits.max_micro_batch
    caps["dataset"] = info.samples
    return caps


def _open(process: SetupProcess, limits: ProbeLimits, progress: Progress) -> _Probing:
    info = process.info
    progress.opened(info.device)
    for line in info.notes:
        progress.note(line)
    guard = SpillGuard(active=info.may_spill)
    return _Probing(process, limits, caps_of(info, limits), guard, progress)


def _search(
    probing: _Probing, time_limit_s: float, clock: Callable[[], float]
) -> tuple[Probe, Footprint | None]:
    process, caps = probing.process, probing.caps
    start = clock()
    step = questions.trace(process)
    predictor = ReplayPredictor(
        lambda: new_allocator(process.info),
        None if step is None else step.program,
        lambda: questions.trace_other_order(process),
    )
    tried: list[Attempt] = []

    def run(size: int) -> Outcome:
        try:
            outcome = probing.run(size)
        except Exception as error:
            # A batch of one is a special case to some operators (batch statistics), and the last resort.
            if size == 1 and tried and not any(one.fits for one in tried):
                raise nothing_fits(tried, process, step, cannot=describe(error)) from error
            raise
        tried.append(outcome.attempt)
        return outcome

    found = search(
        run, cap=min(caps.values()), predictor=predictor, expired=lambda: clock() - start > time_limit_s
    )
    if not found.micro_batch:
        if found.stopped_by == "interrupt":
            raise KeyboardInterrupt
        raise nothing_fits(found.attempts, process, step)
    probe = Probe(
        micro_batch=found.micro_batch,
        limited_by=_limited_by(found.micro_batch, caps),
        upper_bound_by=found.upper_bound_by,
        predicted_micro_batch=found.predicted,
        oom_count=sum(not attempt.fits for attempt in found.attempts),
        attempts=found.attempts,
        stopped_by=found.stopped_by,
    )
    return probe, step


def _limited_by(micro_batch: int, caps: dict[LimitedBy, int]) -> LimitedBy:
    return next((name for name, cap in caps.items() if cap == micro_batch == min(caps.values())), "memory")


def _cached(info: SetupInfo, limits: ProbeLimits, home: Path, progress: Progress) -> CachedLimit | None:
    """Return the cached limit of this very key; name the changed fields if there is only a stale one."""
    cached = lookup(info.key, home)
    if not isinstance(cached, StaleEntry):
        return cached
    if not limits.has_own_budget and [one.field for one in cached.changed] == ["budget_bytes"]:
        old, new = cached.changed[0].old, cached.changed[0].new
        if isinstance(old, int) and isinstance(new, int) and abs(new - old) <= CLOSE_BUDGETS * new:
            return cached.limit
    if {one.field for one in cached.changed} - ASKED_FOR:
        progress.note(f"{cached}: probing again")
    return None


def _confirm(probing: _Probing, cached: CachedLimit) -> Probe | None:
    """Run the cached limit once. Return None if it answers another question, no longer fits, or is too small.

    Too small means that more fits, which a run of the limit alone does not show.
    """
    cap = min(probing.caps.values())
    if cached.limited_by != "memory" and cached.micro_batch < cap:
        return None
    size = min(cached.micro_batch, cap)
    outcome = probing.run(size)
    attempted = outcome.attempt
    if not attempted.fits:
        probing.progress.note(f"the saved micro-batch of {size} no longer fits: probing again")
        return None
    if size < cap and _is_too_small(probing.process, cached, outcome):
        probing.progress.note(f"more than the saved micro-batch of {size} seems to fit: probing again")
        return None
    return Probe(
        micro_batch=size,
        limited_by=_limited_by(size, probing.caps),
        upper_bound_by="cap" if size == cap else cached.upper_bound_by,
        predicted_micro_batch=cached.micro_batch,
        oom_count=0,
        attempts=[attempted],
        source=f"saved {cached.date}",
    )


def _is_too_small(process: SetupProcess, cached: CachedLimit, outcome: Outcome) -> bool:
    """Return whether more than a cached limit fits, according to the replay or else to the peak of its run.

    The budget is the smaller of now and then, because close budgets count as the same.
    """
    then, device = cached.key.get("budget_bytes"), process.info.device
    budget = min(then, device.budget_bytes) if isinstance(then, int) else device.budget_bytes
    info = msgspec.structs.replace(process.info, device=msgspec.structs.replace(device, budget_bytes=budget))
    step = questions.trace(process)
    predictor = ReplayPredictor(
        lambda: new_allocator(info),
        None if step is None else step.program,
        lambda: questions.trace_other_order(process),
    )
    next_fits = predictor.says_next_fits(outcome)
    return has_ample_room(outcome.attempt, budget) if next_fits is None else next_fits


def _store(found: Probe, process: SetupProcess, cap: int, home: Path, progress: Progress) -> Path | None:
    """Keep the answer of a search that ran to its end, and return its file."""
    if found.upper_bound_by is None:
        return None
    traced_bytes = questions.traced_peak(process, found.micro_batch)
    limit = CachedLimit(
        key=process.info.key,
        micro_batch=found.micro_batch,
        limited_by=found.limited_by,
        upper_bound_by=found.upper_bound_by,
        cap=cap,
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        traced_bytes=traced_bytes,
        measured_bytes=None if traced_bytes is None else _peak_of(found),
    )
    try:
        return store(limit, home)
    except InputError as error:
        progress.note(f"the limit was not saved: {error}")
        return None


def _with_others(found: Probe, process: SetupProcess, progress: Progress) -> Probe:
    """Add what other processes hold after the probe, with a note if that grew."""
    before, after = process.info.device.other_processes_bytes, questions.others_bytes(process)
    if before is not None and after is not None and after - before >= NOTABLE_GROWTH:
        progress.note(
            f"other processes held {format_bytes(before)} of the GPU before the probe and hold "
            f"{format_bytes(after)} now: what fitted may no longer fit beside them; probe again, or give "
            "--memory-budget"
        )
    return msgspec.structs.replace(found, other_processes_bytes=after)


def _peak_of(found: Probe) -> int | None:
    """Return the peak reserved bytes of the attempt that is the answer."""
    of_answer = (one for one in found.attempts if one.fits and one.micro_batch == found.micro_batch)
    return next((one.peak_reserved_bytes for one in of_answer), None)


def nothing_fits(
    attempts: list[Attempt], process: SetupProcess, step: Footprint | None, *, cannot: str | None = None
) -> DoesNotFitError:
    """Build the error that says where the memory of the smallest micro-batch goes, and what would help.

    Args:
        attempts: what ran.
        process: knows the device and its budget.
        step: the traced step; None if it could not be traced.
        cannot: the error of a micro-batch of 1 if that was not about memory.
    """
    last = attempts[-1]
    where = f" (in the {last.phase})" if last.phase else ""
    if step is not None:
        with suppress(Untraceable):
            where += f"; it takes {explain(step, last.micro_batch).text()}"
    # The memory of a loss over the whole batch follows the target batch, whatever the micro-batch.
    smaller = ", a smaller target batch" if last.phase == "loss" else ""
    one = f"; and one of 1 cannot run: {cannot}" if cannot else ""
    return DoesNotFitError(
        f"a micro-batch of {last.micro_batch} does not fit in the budget of "
        f"{format_bytes(process.info.device.budget_bytes)}: {last.reason}{where}{one}; what would help: a "
        f"larger --memory-budget{smaller}{in_words(questions.remedies(process))}"
    )
