"""Search for the largest micro-batch that fits.

Predict a size, run it, and repeat until m has run and fits while m + 1 does not. That m + 1 fails is shown by
a run, or by the replay of a footprint that a run has confirmed; else m is the cap. This module knows no
device and no model: a size goes in, an `Outcome` comes out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from autobatch.core.records.probe import Attempt, UpperBoundBy
from autobatch.search.blind import next_size
from autobatch.setup.attempt import Outcome

PREDICTIONS = 6
"""Number of sizes that predictions may choose before the search bisects."""

REFUTED = 3
"""Failures from which on no prediction counts: memory is taken where no replay sees it."""
NEAR_SHARE = 0.1
"""Distance of a size that failed from one that fits, as a share of that, up to which the limit is probably
just below: predictions are right by a few sizes there."""
NARROW_SHARE = 0.25
"""Distance of two bounds, as a share of the lower, up to which the upper was a prediction that missed."""


class Predictor(Protocol):
    """Predictions of the largest micro-batch."""

    def learn(self, outcome: Outcome) -> None:
        """Take an attempt into account."""

    def next_calibration_size(self, cap: int) -> int | None:
        """Return a size up to ``cap`` that improves the prediction; None if enough ran."""

    def largest(self, cap: int) -> int | None:
        """Predict the largest micro-batch that fits, at most ``cap`` and possibly 0; None if unknown."""

    def proves_next_fails(self, micro_batch: int) -> bool:
        """Return whether ``micro_batch + 1`` does not fit for certain."""


class Found(NamedTuple):
    """Result of a search."""

    micro_batch: int
    """The largest that ran and fits; 0 if none did."""
    upper_bound_by: UpperBoundBy | None
    """Proof that the next size does not fit, or ``error`` if it fails for another reason than memory; None if
    the search was stopped before there was one."""
    predicted: int | None
    """The first prediction; None if there was none."""
    attempts: list[Attempt]
    stopped_by: str | None
    """``interrupt``, or what ``stopped`` returned; None if the search ran to its end."""


@dataclass(kw_only=True)
class _Bracket:
    """Bounds on the answer from the attempts so far: at least ``low``, and below ``high``."""

    cap: int
    low: int = 0
    high: int | None = None
    """None if no size failed yet."""
    guided: int = 0
    """Sizes that predictions chose."""
    climbs: int = 0
    descents: int = 0
    is_narrow: bool = False
    """Since a size last fitted, another does not fit that was predicted near it, or ran to its end in one
    order."""
    is_error: bool = False
    """True if ``high`` failed for another reason than memory."""
    predicted: int | None = None
    """The first prediction; None if there was none."""
    tried: set[int] = field(default_factory=set)
    failures: int = 0

    @property
    def top(self) -> int:
        """The smallest size that cannot be the answer."""
        return min(self.cap + 1, self.high or self.cap + 1)

    @property
    def within(self) -> int:
        """The largest size to predict: the middle of narrow bounds, where a prediction was refuted."""
        if self.high is None or self.high - self.low > NARROW_SHARE * self.low:
            return self.cap
        return (self.low + self.high) // 2

    def note(self, outcome: Outcome, guess: int | None) -> None:
        """Narrow the bounds by an attempt, whose size was perhaps a guess."""
        attempt = outcome.attempt
        size = attempt.micro_batch
        self.tried.add(size)
        self.failures += not attempt.fits
        if attempt.fits:
            self.low = max(self.low, size)
            self.is_narrow = False
            if self.high is not None and self.high <= self.low:
                # Memory is not monotone here, and a failure below a size that runs is no bound.
                self.high = None
        elif size > self.low:
            if self.high is None or size < self.high:
                self.high, self.is_error = size, attempt.is_error
            is_near = size == guess and size - self.low <= NEAR_SHARE * self.low
            self.is_narrow = self.is_narrow or outcome.trace is not None or is_near


def search(
    run: Callable[[int], Outcome],
    *,
    cap: int,
    predictor: Predictor,
    stopped: Callable[[], str | None] = lambda: None,
) -> Found:
    """Find the largest micro-batch that fits.

    Args:
        run: makes an attempt.
        cap: largest size of the search, at least 1.
        predictor: learns from each attempt, and may have a guess before the first.
        stopped: asked before each run once a size fits; a reason ends the search.

    Returns:
        The result. A ``KeyboardInterrupt`` in ``run`` ends the search as the time limit does.
    """
    bracket = _Bracket(cap=cap)
    attempts: list[Attempt] = []
    stopped_by = None
    bound = None
    while bound is None:
        stopped_by = stopped() if bracket.low else None
        if bracket.high == 1 or stopped_by:
            break
        guess = _guess(bracket, predictor)
        bracket.predicted = guess if bracket.predicted is None else bracket.predicted
        size = _below(bracket, guess) or _next_size(bracket, guess, predictor.next_calibration_size(cap))
        try:
            outcome = run(size)
        except KeyboardInterrupt:
            stopped_by = "interrupt"
            break
        attempts.append(outcome.attempt)
        bracket.note(outcome, guess)
        if not outcome.attempt.is_error:
            predictor.learn(outcome)
        bound = _upper_bound(bracket, predictor)
        if bound == "replay" and len(attempts) > 1 and not attempts[-2].fits:
            # The size was chosen with care after a refusal. Reserved memory is not monotone, so more may fit.
            bound = None if (_guess(bracket, predictor) or 0) > bracket.low else bound
    return Found(bracket.low, bound, bracket.predicted, attempts, stopped_by)


def _guess(bracket: _Bracket, predictor: Predictor) -> int | None:
    """Predict the largest size; None if it is unknown, or if failures have refuted the prediction."""
    if bracket.failures >= REFUTED:
        return None
    guess = predictor.largest(bracket.within)
    if guess is None or bracket.high is None:
        return guess
    if guess >= bracket.high:
        # Reserved memory is not monotone: sizes below one that failed may be predicted to fail, too.
        below = predictor.largest(bracket.high - 1)
        guess = below if below is not None and below < bracket.high - 1 else guess
    if bracket.within == bracket.cap:
        return guess
    # What predicts twice as much as has failed knows nothing of the sizes between.
    return guess if (predictor.largest(bracket.cap) or 0) < 2 * bracket.high else None


def _upper_bound(bracket: _Bracket, predictor: Predictor) -> UpperBoundBy | None:
    """Return the proof that the size after ``low`` does not fit; None if there is none yet."""
    if bracket.low == 0:
        return None
    if bracket.low >= bracket.cap:
        return "cap"
    if bracket.high == bracket.low + 1:
        return "error" if bracket.is_error else "run"
    return "replay" if predictor.proves_next_fails(bracket.low) else None


def _next_size(bracket: _Bracket, guess: int | None, calibration: int | None) -> int:
    """Choose the next size, strictly within the bounds."""
    top = bracket.top
    if guess == 0 and bracket.low == 0:
        # Start at 2, because a single sample has no batch statistics.
        return min(2, top - 1)
    if guess is not None and bracket.guided < PREDICTIONS:
        if bracket.low < guess < top:
            bracket.guided += 1
            return guess
        if 0 < guess <= bracket.low and calibration is None:
            # The guess is the limit already: run the next size, and take growing strides if that fits.
            bracket.guided += 1
            bracket.climbs += 1
            return min(bracket.low + (1 << bracket.climbs - 1), top - 1)
    if calibration is not None and 0 < calibration < top and calibration not in bracket.tried:
        return calibration
    # Predictions end at what ran, or a smaller size failed than one that ran as it was predicted.
    is_near = bracket.low == guess or (bracket.failures > 0 and bracket.low == bracket.predicted)
    if bracket.high is None and is_near:
        return bracket.low + 1
    return _unguided_size(bracket)


def _unguided_size(bracket: _Bracket) -> int:
    if bracket.high is None:
        return min(max(2 * bracket.low, 1), bracket.cap)
    if bracket.low == 0:
        return bracket.high // 2
    return next_size(bracket.low, bracket.high, runs=len(bracket.tried), failures=bracket.failures)


def _below(bracket: _Bracket, guess: int | None) -> int | None:
    """Choose a size a growing stride below one that failed narrowly; None if another choice is better."""
    if not bracket.is_narrow or bracket.guided >= PREDICTIONS or not bracket.high or bracket.high <= 1:
        return None
    if guess is not None and bracket.low < guess < bracket.high and guess != bracket.within:
        return None
    bracket.guided += 1
    bracket.descents += 1
    return max(bracket.high - (1 << bracket.descents - 1), bracket.low + 1)
