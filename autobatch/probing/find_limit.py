"""Probing a workload: what fitted before is confirmed by one run, else a search decides; then it is saved."""

from __future__ import annotations

import datetime
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from autobatch.core.errors import DoesNotFitError, InputError
from autobatch.core.options import Options, PlanOptions, SearchOptions
from autobatch.core.progress import Progress
from autobatch.core.records import Attempt, LengthLimit, LimitedBy, Plan, Probe
from autobatch.core.units import MiB, format_bytes
from autobatch.device.profiles import data_home
from autobatch.footprint.explain import explain
from autobatch.footprint.program import Untraceable
from autobatch.footprint.remedies import in_words
from autobatch.planning import make_plan, rank_share
from autobatch.probing.attempt import Outcome
from autobatch.probing.cache import CachedLimit, StaleEntry, entry_path, lookup, store
from autobatch.probing.child import Prober, SpillGuard
from autobatch.probing.limits import ReplayPredictor
from autobatch.probing.search import search
from autobatch.probing.setup import SetupInfo, new_allocator
from autobatch.workload.user_code import describe

ASKED_FOR = {
    "budget_bytes", "device", "device_kind", "total_bytes", "precision", "max_grad_norm", "ema", "window",
}  # fmt: skip
"""What a user changes by asking for it; an answer to another question is not stale."""


NOTABLE_GROWTH = 64 * MiB
"""Of what other processes hold while a probe runs: less is noise of drivers and desktops."""


CLOSE_BUDGETS = 0.05
"""Budgets that were not asked for by number follow what is free; within this share they count as the same."""


def run_probe(
    prober: Prober,
    options: Options,
    *,
    progress: Progress | None = None,
    home: Path | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Probe, Path | None]:
    """Confirm what fitted before, or search; save the answer.

    Args:
        prober: makes the attempts.
        options: the caps, and the time limit.
        progress: told of each attempt.
        home: where answers are kept.
        clock: seconds.

    Returns:
        The answer, and the file that remembers it, if one does.

    Raises:
        DoesNotFitError: not even a micro-batch of 1 fits.
    """
    progress = progress or Progress()
    home = home or data_home(os.environ)
    facts = prober.facts
    progress.opened(facts.device)
    for line in facts.notes:
        progress.note(line)
    caps = caps_of(facts, options)
    asked = getattr(options, "micro_batch", None)

    guard = SpillGuard(active=facts.device.kind == "cuda")

    def run(size: int) -> Outcome:
        outcome = guard.judge(prober.run(size))
        progress.attempted(outcome.attempt)
        return outcome

    if asked is not None:
        # An answer to another question: what is remembered stays.
        result = _single(run(asked).attempt, facts)
        progress.probed(result)
        return result, None
    saved = _saved(facts, options, home, progress)
    confirmed = _confirm(run, saved, caps, progress) if saved else None
    result = confirmed or _search(run, prober, caps, _expiry(options, clock))
    result = _with_others(result, prober, progress)
    progress.probed(result)
    if saved is not None and confirmed is not None:
        return result, entry_path(saved.key, home)
    return result, _remember(result, prober, min(caps.values()), home, progress)


def run_lengths(prober: Prober, options: Options, found: Probe, progress: Progress) -> Probe:
    """Also find what fits of shorter samples, where they differ: a table from size to micro-batch.

    The limit on tokens of a micro-batch follows from it: size times micro-batch, where that is flat.
    """
    caps = caps_of(prober.facts, options)
    if not prober.facts.size_quartiles or found.stopped_by is not None:
        return found
    *shorter, longest = prober.facts.size_quartiles
    lengths = [LengthLimit(size=longest, micro_batch=found.micro_batch, upper_bound_by=found.upper_bound_by)]
    for level in reversed(shorter):
        one = search(
            lambda size, level=level: prober.run(size, level),  # type: ignore[misc]
            cap=min(caps.values()),
            predictor=ReplayPredictor(lambda: new_allocator(prober.facts)),
        )
        lengths.append(
            LengthLimit(size=level, micro_batch=one.micro_batch, upper_bound_by=one.upper_bound_by)
        )
        progress.note(f"of samples of size {level:g} and less, {one.micro_batch:,} fit")
    return msgspec.structs.replace(found, lengths=lengths[::-1])


def caps_of(facts: SetupInfo, options: Options) -> dict[LimitedBy, int]:
    """What the micro-batch cannot exceed besides memory, in samples."""
    caps: dict[LimitedBy, int] = {}
    if isinstance(options, PlanOptions):
        caps["target_batch"] = rank_share(options.target_batch, 1, 0)
    if isinstance(options, SearchOptions) and options.max_micro_batch is not None:
        caps["max_micro_batch"] = options.max_micro_batch
    caps["dataset"] = facts.samples
    return caps


def plan_from(facts: SetupInfo, limit: int, options: PlanOptions) -> Plan:
    """Plan the batch for a limit on the micro-batch.

    Raises:
        InputError: a rule for the learning rate lacks the batch that it was tuned for.
    """
    return make_plan(
        target_batch=options.target_batch,
        micro_batch_limit=limit,
        learning_rate=facts.learning_rate,
        base_batch=options.base_batch or facts.base_batch,
        rule=options.lr_rule,
        precision=facts.precision,
    )


def _expiry(options: Options, clock: Callable[[], float]) -> Callable[[], bool]:
    start = clock()
    limit = getattr(options, "time_limit", None) or math.inf
    return lambda: clock() - start > limit


def _search(
    run: Callable[[int], Outcome], prober: Prober, caps: dict[LimitedBy, int], expired: Callable[[], bool]
) -> Probe:
    step = prober.trace_footprint()
    predictor = ReplayPredictor(
        lambda: new_allocator(prober.facts), None if step is None else step.program, prober.other_order
    )
    tried: list[Attempt] = []

    def noted(size: int) -> Outcome:
        try:
            outcome = run(size)
        except Exception as error:
            # A batch of one is a special case to some operators (batch statistics), and the last resort.
            if size == 1 and tried and not any(one.fits for one in tried):
                raise nothing_fits(tried, prober, cannot=describe(error)) from error
            raise
        tried.append(outcome.attempt)
        return outcome

    found = search(noted, cap=min(caps.values()), predictor=predictor, expired=expired)
    if not found.micro_batch:
        if found.stopped_by == "interrupt":
            raise KeyboardInterrupt
        raise nothing_fits(found.attempts, prober)
    return Probe(
        micro_batch=found.micro_batch,
        limited_by=_limit(found.micro_batch, caps),
        upper_bound_by=found.upper_bound_by,
        predicted_micro_batch=found.predicted,
        oom_count=sum(not attempt.fits for attempt in found.attempts),
        attempts=found.attempts,
        stopped_by=found.stopped_by,
    )


def _limit(micro_batch: int, caps: dict[LimitedBy, int]) -> LimitedBy:
    return next((name for name, cap in caps.items() if cap == micro_batch == min(caps.values())), "memory")


def _single(attempted: Attempt, facts: SetupInfo) -> Probe:
    """The answer to "does this one fit?"."""
    if not attempted.fits:
        raise DoesNotFitError(
            f"a micro-batch of {attempted.micro_batch} does not fit in "
            f"{format_bytes(facts.device.budget_bytes)}: {attempted.reason}"
        )
    return Probe(
        micro_batch=attempted.micro_batch,
        limited_by="max_micro_batch",
        upper_bound_by="cap",
        predicted_micro_batch=None,
        oom_count=0,
        attempts=[attempted],
        source="asked",
    )


def _saved(facts: SetupInfo, options: Options, home: Path, progress: Progress) -> CachedLimit | None:
    """What fitted before under these very circumstances; where they differ, says which did."""
    saved = lookup(facts.key, home)
    if not isinstance(saved, StaleEntry):
        return saved
    if options.memory_budget is None and [one.field for one in saved.changed] == ["budget_bytes"]:
        old, new = saved.changed[0].old, saved.changed[0].new
        if isinstance(old, int) and isinstance(new, int) and abs(new - old) <= CLOSE_BUDGETS * new:
            return saved.fit
    if {one.field for one in saved.changed} - ASKED_FOR:
        progress.note(f"{saved}: probing anew")
    return None


def _confirm(
    run: Callable[[int], Outcome], saved: CachedLimit, caps: dict[LimitedBy, int], progress: Progress
) -> Probe | None:
    """Run what fitted before once; ``None`` where it answers another question, or fits no more."""
    cap = min(caps.values())
    if saved.limited_by != "memory" and saved.micro_batch < cap:
        return None
    size = min(saved.micro_batch, cap)
    attempted = run(size).attempt
    if not attempted.fits:
        progress.note(f"the saved micro-batch of {size} does not fit any more: probing anew")
        return None
    return Probe(
        micro_batch=size,
        limited_by=_limit(size, caps),
        upper_bound_by="cap" if size == cap else saved.upper_bound_by,
        predicted_micro_batch=saved.micro_batch,
        oom_count=0,
        attempts=[attempted],
        source=f"saved {saved.date}",
    )


def _remember(result: Probe, prober: Prober, cap: int, home: Path, progress: Progress) -> Path | None:
    """Save the answer of a search that came to its end; where it is saved."""
    if result.upper_bound_by is None:
        return None
    traced_bytes = prober.traced_peak(result.micro_batch)
    fit = CachedLimit(
        key=prober.facts.key,
        micro_batch=result.micro_batch,
        limited_by=result.limited_by,
        upper_bound_by=result.upper_bound_by,
        cap=cap,
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        traced_bytes=traced_bytes,
        measured_bytes=None if traced_bytes is None else _peak_of(result),
    )
    try:
        return store(fit, home)
    except InputError as error:
        progress.note(f"what fitted is not remembered: {error}")
        return None


def _with_others(result: Probe, prober: Prober, progress: Progress) -> Probe:
    """The answer with what others hold by now; says so where that has become more."""
    before, after = prober.facts.device.other_processes_bytes, prober.others_bytes()
    if before is not None and after is not None and after - before >= NOTABLE_GROWTH:
        progress.note(
            f"other processes held {format_bytes(before)} of the card before the probe and hold "
            f"{format_bytes(after)} now: what fitted may not fit beside them; probe again, or give "
            "--memory-budget"
        )
    return msgspec.structs.replace(result, other_processes_bytes=after)


def _peak_of(result: Probe) -> int | None:
    """Peak reserved of the attempt that is the answer."""
    of_answer = (one for one in result.attempts if one.fits and one.micro_batch == result.micro_batch)
    return next((one.peak_reserved_bytes for one in of_answer), None)


def nothing_fits(attempts: list[Attempt], prober: Prober, *, cannot: str | None = None) -> DoesNotFitError:
    """Say where the memory of the smallest micro-batch goes, and what would help, as far as it can be traced.

    Args:
        attempts: what ran.
        prober: knows the device, its budget, and what was predicted, if anything was.
        cannot: what a micro-batch of 1 raised, where that is no matter of memory.
    """
    last = attempts[-1]
    where = f" (in the {last.phase})" if last.phase else ""
    if prober.step is not None:
        with suppress(Untraceable):
            where += f"; it takes {explain(prober.step, last.micro_batch).text()}"
    # What a loss over the whole window takes follows the target batch, whatever the micro-batch.
    smaller = ", a smaller target batch" if last.phase == "loss" else ""
    one = f"; and one of 1 cannot run: {cannot}" if cannot else ""
    return DoesNotFitError(
        f"a micro-batch of {last.micro_batch} does not fit in the budget of "
        f"{format_bytes(prober.facts.device.budget_bytes)}: {last.reason}{where}{one}; what would help: a "
        f"larger --memory-budget{smaller}{in_words(prober.remedies())}"
    )
