"""The search for the largest micro-batch that fits: which sizes are tried, and when it ends.

Predict, run, confirm. The answer m ran and fits, and m + 1 does not: a run showed it, the replay of a
footprint that runs have calibrated shows it, or m is the cap. Nothing here knows a device or a model: a size
goes in, an `Outcome` comes out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from autobatch.core.records import Attempt, UpperBoundBy
from autobatch.probing.attempt import Outcome

PREDICTIONS = 6
"""Sizes that a forecast may choose; what has not come together by then is bisected."""


class Predictor(Protocol):
    """Predicts from what ran."""

    def learn(self, outcome: Outcome) -> None:
        """Take in what an attempt showed."""

    def next_calibration_size(self, cap: int) -> int | None:
        """A size that is safe to run and teaches most; ``None``: enough has run."""

    def largest(self, cap: int) -> int | None:
        """The largest micro-batch predicted to fit, at most ``cap`` and possibly 0; ``None``: cannot say."""

    def proves_next_fails(self, micro_batch: int) -> bool:
        """Whether a calibrated replay shows that ``micro_batch + 1`` does not fit."""


class Found(NamedTuple):
    """What a search found."""

    micro_batch: int
    """The largest that ran and fits; 0 where nothing did."""
    upper_bound_by: UpperBoundBy | None
    """What shows that the next size does not fit; ``None`` where the search was stopped before that."""
    predicted: int | None
    """The first prediction."""
    attempts: list[Attempt]
    stopped_by: str | None
    """``time limit`` or ``interrupt``; ``None`` where the search ran to its end."""


@dataclass(kw_only=True)
class _Bracket:
    """What has been seen so far: the answer is at least ``low`` and, as far as is known, under ``high``."""

    cap: int
    low: int = 0
    high: int | None = None
    guided: int = 0
    climbs: int = 0
    descents: int = 0
    narrowly: bool = False
    """Since a size last fitted, one ran and was refused all the same: for what the allocator had to do."""
    tried: set[int] = field(default_factory=set)

    def note(self, outcome: Outcome) -> None:
        attempt = outcome.attempt
        size = attempt.micro_batch
        self.tried.add(size)
        if attempt.fits:
            self.low = max(self.low, size)
            self.narrowly = False
            if self.high is not None and self.high <= self.low:
                # Memory that is not monotone: a failure below a size that runs bounds nothing.
                self.high = None
        elif size > self.low:
            self.high = size if self.high is None else min(self.high, size)
            self.narrowly = self.narrowly or outcome.trace is not None


def search(
    run: Callable[[int], Outcome],
    *,
    cap: int,
    predictor: Predictor,
    expired: Callable[[], bool] = lambda: False,
) -> Found:
    """Find the largest micro-batch that fits.

    Args:
        run: tries a micro-batch for real.
        cap: search no further; at least 1.
        predictor: predicts, and may know a first guess before anything ran.
        expired: asked before each run once a size fits; True ends the search with the best size so far.

    Returns:
        What was found. A ``KeyboardInterrupt`` ends the search like the time limit does.
    """
    bracket = _Bracket(cap=cap)
    attempts: list[Attempt] = []
    predicted: int | None = None
    stopped_by = None
    bound = None
    while bound is None:
        if bracket.high == 1 or (bracket.low and expired()):
            stopped_by = "time limit" if bracket.low else None
            break
        guess = predictor.largest(cap)
        predicted = guess if predicted is None else predicted
        size = _below(bracket, guess) or _next_size(bracket, guess, predictor.next_calibration_size(cap))
        try:
            outcome = run(size)
        except KeyboardInterrupt:
            stopped_by = "interrupt"
            break
        attempts.append(outcome.attempt)
        bracket.note(outcome)
        predictor.learn(outcome)
        bound = _upper_bound(bracket, predictor)
    return Found(bracket.low, bound, predicted, attempts, stopped_by)


def _upper_bound(bracket: _Bracket, predictor: Predictor) -> UpperBoundBy | None:
    if bracket.low == 0:
        return None
    if bracket.low >= bracket.cap:
        return "cap"
    if bracket.high == bracket.low + 1:
        return "run"
    return "replay" if predictor.proves_next_fails(bracket.low) else None


def _next_size(bracket: _Bracket, guess: int | None, calibration: int | None) -> int:
    """Choose the next size, always strictly inside the bracket."""
    top = min(bracket.cap + 1, bracket.high or bracket.cap + 1)
    if guess == 0 and bracket.low == 0:
        # Not 1 at once: batch statistics cannot be taken of a single sample.
        return min(2, top - 1)
    if guess is not None and bracket.guided < PREDICTIONS:
        if bracket.low < guess < top:
            bracket.guided += 1
            return guess
        if 0 < guess <= bracket.low and calibration is None:
            # Predicted to be at the limit: show it, in growing strides where that proves wrong.
            bracket.guided += 1
            bracket.climbs += 1
            return min(bracket.low + (1 << bracket.climbs - 1), top - 1)
    if calibration is not None and 0 < calibration < top and calibration not in bracket.tried:
        return calibration
    if bracket.high is None:
        return min(max(2 * bracket.low, 1), bracket.cap)
    return (bracket.low + bracket.high) // 2


def _below(bracket: _Bracket, guess: int | None) -> int | None:
    """Where a size failed narrowly, and no prediction leads on, the limit is near below: growing strides."""
    if not bracket.narrowly or bracket.guided >= PREDICTIONS or not bracket.high or bracket.high <= 1:
        return None
    if guess is not None and bracket.low < guess < bracket.high:
        return None
    bracket.guided += 1
    bracket.descents += 1
    return max(bracket.high - (1 << bracket.descents - 1), bracket.low + 1)
