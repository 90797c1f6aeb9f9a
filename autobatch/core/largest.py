"""The largest size that fits: the one search of this package, with a bound on its questions.

Replays of a trace, real runs and plain arithmetic are asked in the same way: a size goes in, whether it fits
comes out. A guess makes the search short where it is good, and costs little where it is not.
"""

from __future__ import annotations

from collections.abc import Callable
from math import comb
from typing import NamedTuple


class Bracket(NamedTuple):
    """A size that fits, a larger one that does not, and an allowance of questions about those between.

    Proof of the bound. Let S(r, f) = C(r, 0) + … + C(r, f), so that S(r, f) = S(r - 1, f) + S(r - 1, f - 1).
    At the start r = ⌊log2 n⌋ + 3 and f ≥ r / 2, so S(r, f) ≥ 2^(r - 1) > n. As long as n ≤ S(r, f), there is
    a size after which at most S(r - 1, f) answers remain if it fits, and at most S(r - 1, f - 1) if not;
    `nearest` takes the one that is nearest to the guess. As S(r, 0) = S(0, f) = 1, a single answer remains
    before either allowance is used up.

    Nothing is assumed of what fits, nor of the guess: the answer is a size that fits while the next one does
    not, and the largest of all if smaller ones fit as well.
    """

    low: int
    """A size that is known to fit, or the answer if none does."""
    high: int
    """A larger size that is known not to fit, or one above the largest to ask for."""
    asked: int
    """Questions that are left."""
    failed: int
    """Questions that are left whose answer is no."""

    @property
    def is_open(self) -> bool:
        """True if there is a size between."""
        return self.high - self.low > 1

    def nearest(self, guess: int) -> int:
        """Return the size nearest to a guess after which the remaining questions tell all answers apart."""
        least = max(self.low + 1, self.high - told_apart(self.asked - 1, self.failed))
        most = min(self.high - 1, self.low + told_apart(self.asked - 1, self.failed - 1))
        return min(max(guess, least), most)

    def around(self, guess: int) -> Bracket:
        """Return the bracket with no more sizes above a guess than leave it to be asked for."""
        if guess <= self.low:
            return self
        return self._replace(high=min(self.high, guess + told_apart(self.asked - 1, self.failed)))

    def after(self, size: int, fits: bool) -> Bracket:
        """Return the bracket after an answer."""
        if fits:
            return self._replace(low=size, asked=self.asked - 1)
        return self._replace(high=size, asked=self.asked - 1, failed=self.failed - 1)


def largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Return a size that fits while the next one does not; the largest of all if smaller ones fit as well.

    ``fits`` is asked for sizes strictly between ``low``, the answer if none of them fits, and ``high``.
    """
    bracket = Bracket(low, high, *most_asked(high - low))
    while bracket.is_open:
        size = bracket.nearest((bracket.low + bracket.high) // 2)
        bracket = bracket.after(size, fits(size))
    return bracket.low


def most_asked(answers: int) -> tuple[int, int]:
    """Return how many questions tell so many answers apart, and how many of them may be answered no."""
    doublings = answers.bit_length() - 1
    return doublings + 3, doublings // 2 + 2


def told_apart(asked: int, failed: int) -> int:
    """Return the number of answers that so many questions tell apart, of which some may be answered no."""
    return sum(comb(asked, number) for number in range(failed + 1))
