"""The largest micro-batch of smaller samples: a curve over size by replay, or a search at each quartile."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec

from autobatch.core.progress import Progress
from autobatch.core.records.probe import Attempt, LengthLimit, Probe, UpperBoundBy
from autobatch.footprint.largest import largest_micro_batch
from autobatch.footprint.scratch import in_proportion
from autobatch.search import questions
from autobatch.search.failed_sizes import FailedSizes
from autobatch.search.kept_answers import kept_answers
from autobatch.search.limits import ReplayPredictor, first_size
from autobatch.search.one_probe import ProbeLimits, caps_of
from autobatch.search.search import Found, search
from autobatch.search.sizes.curve import CurvePoint
from autobatch.search.sizes.real_batches import find_curve
from autobatch.setup.child import SetupProcess
from autobatch.setup.setup import new_allocator

LIKELY = 0.8
"""Share of the limit in proportion to the size of the samples that a search for smaller ones runs first."""
LIKELY_NEAR = 0.95
"""The same if being near the limit is enough."""
ENOUGH = 0.9
"""Share of a rough prediction at which such a search ends."""
ENOUGH_NEAR = 0.85
"""The same if being near the limit is enough."""
AIM = 0.97
"""Share of a rough prediction that runs next."""
NEAR_RUNS = 4
"""Most runs for samples up to a size if being near the limit is enough."""
CLOSE = "close to a rough prediction"


def find_limits_by_size(
    process: SetupProcess,
    limits: ProbeLimits,
    found: Probe,
    *,
    home: Path,
    progress: Progress,
    is_rough: bool = False,
) -> Probe:
    """Add the largest micro-batch of smaller samples, if sizes differ: a curve over size, by replay.

    If the step is no exact program of micro-batch and size, a search runs each quartile of the sizes. A limit
    on the tokens of a micro-batch follows: size times micro-batch, if that product is flat.

    Args:
        process: holds the setup.
        limits: caps of the micro-batch.
        found: the limit of the largest samples.
        home: data directory, in which the answer is kept.
        progress: receives notes.
        is_rough: the memory of a step follows no rule in the micro-batch, so being near a limit is enough.
    """
    if not process.info.size_quartiles or found.stopped_by is not None:
        return found
    unit = process.info.size_unit
    cap = min(caps_of(process.info, limits).values())
    progress.doing("computing the limits of smaller samples")
    kept, question = kept_answers(process.info, found, home), ("quartiles", found.micro_batch, cap)
    lengths = kept.find(question, list[LengthLimit])
    if lengths is not None:
        return msgspec.structs.replace(found, lengths=lengths, size_unit=unit)
    try:
        curve = _curve(process, found, cap, home)
    except KeyboardInterrupt:
        progress.note("interrupted: left out the micro-batches of smaller samples")
        return found
    if curve is None:
        lengths = list(_searched(process, found, cap, progress, is_rough=is_rough))[::-1]
        if not lengths:
            return found
        return msgspec.structs.replace(found, lengths=kept.keep(question, lengths), size_unit=unit)
    *points, (longest, limit) = curve
    lengths = [_length_limit(size, own, "cap" if own == cap else "replay") for size, own in points]
    lengths.append(_length_limit(longest, limit, found.upper_bound_by))
    return msgspec.structs.replace(found, lengths=lengths, size_unit=unit)


def _curve(process: SetupProcess, found: Probe, cap: int, home: Path) -> list[CurvePoint] | None:
    """Return the kept curve, or compute and keep it; None if the step is no exact program."""
    kept, question = kept_answers(process.info, found, home), ("curve", found.micro_batch, cap)
    known = kept.find(question, list[CurvePoint])
    if known is None:
        known = questions.ask_or_none(process, "a curve over size", find_curve, found.micro_batch, cap)
        if known is not None:
            kept.keep(question, known)
    return known


def _searched(
    process: SetupProcess, found: Probe, cap: int, progress: Progress, *, is_rough: bool
) -> Iterator[LengthLimit]:
    """Yield the limit of the largest samples, then those of smaller quartiles; nothing if interrupted."""
    *shorter, longest = process.info.size_quartiles
    lengths = [_length_limit(longest, found.micro_batch, found.upper_bound_by)]
    for size in reversed(shorter):
        # Memory grows with the size of the samples or faster.
        share = LIKELY_NEAR if is_rough else LIKELY
        likely = int(share * found.micro_batch * longest / size) if size > 0 else 0
        search_for = _run_near if is_rough else _search_size
        one = search_for(process, size, max(1, min(likely, cap)), cap)
        if one.stopped_by not in (None, CLOSE):
            progress.note("interrupted: left out the micro-batches of smaller samples")
            return
        lengths.append(_length_limit(size, one.micro_batch, one.upper_bound_by))
        progress.note(f"a micro-batch of {one.micro_batch:,} fits for samples up to a size of {size:g}")
    yield from lengths


def _search_size(process: SetupProcess, size: float, likely: int, cap: int) -> Found:
    """Search for samples up to a size; near the limit is enough where only runs tell how memory grows."""
    sizes = FailedSizes(partial(questions.run_attempt, process, max_size=size), process)
    first = max(first_size(process.info.compute_capability), likely)
    predictor = ReplayPredictor(lambda: new_allocator(process.info), first_size=first)

    def stopped() -> str | None:
        is_close = predictor.is_rough and sizes.largest >= ENOUGH * (predictor.largest(cap) or cap)
        return sizes.stopped_by or (CLOSE if is_close else None)

    return search(sizes, cap=cap, stopped=stopped, predictor=predictor)


def _run_near(process: SetupProcess, size: float, likely: int, cap: int) -> Found:
    """Run samples up to a size, until a micro-batch fits that is near the limit by its memory."""
    run = partial(questions.run_attempt, process, max_size=size, in_one_order=True)
    sizes = FailedSizes(run, process)
    attempts: list[Attempt] = []
    high, guess, rough = cap + 1, likely, cap

    def found(stopped_by: str) -> Found:
        return Found(sizes.largest, "cap" if sizes.largest == cap else None, likely, attempts, stopped_by)

    while len(attempts) < NEAR_RUNS:
        try:
            ran = sizes(guess)
        except KeyboardInterrupt:
            return found("interrupt")
        attempts.append(ran.attempt)
        if not ran.attempt.fits:
            high = guess
        elif ran.trace is not None:
            grown = in_proportion(guess, ran.trace)
            rough = min(
                largest_micro_batch(grown, lambda: new_allocator(process.info), cap) or guess, high - 1
            )
        if sizes.stopped_by or sizes.largest >= ENOUGH_NEAR * min(rough, high - 1):
            break
        aim = int(AIM * rough) if sizes.largest else int(LIKELY * high)
        guess = max(sizes.largest + 1, min(aim, int(AIM * high)))
    return found(sizes.stopped_by or CLOSE) if sizes.largest else _search_size(process, size, 1, cap)


def _length_limit(size: float, micro_batch: int, upper_bound_by: UpperBoundBy | None) -> LengthLimit:
    return LengthLimit(
        size=size, micro_batch=micro_batch, upper_bound_by=upper_bound_by, padded_size=size * micro_batch
    )
