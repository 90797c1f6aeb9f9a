"""The search for the largest size, against brute force and against its bound."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from autobatch.core.largest import Bracket, largest, most_asked

INTERVALS = st.tuples(st.integers(0, 50), st.integers(1, 5000)).map(lambda pair: (pair[0], sum(pair)))
ANY_GUESS = st.one_of(
    st.just(lambda low, high: (low + high) // 2),
    st.integers(-10, 6000).map(lambda size: lambda low, high: size),
    st.integers(0, 2**32).map(lambda seed: lambda low, high: hash((seed, low, high)) % (3 * high) - high),
)


@settings(max_examples=200)
@given(INTERVALS, st.integers(0, 2**32), st.floats(0, 1), ANY_GUESS)
def test_any_guess_finds_an_edge_of_what_fits_within_the_bound(interval, seed, share, guess) -> None:
    """Sizes fit or not at random, and the guesses are right, wrong, or no sizes at all."""
    (low, high), answers = interval, {}
    bracket = Bracket(low, high, *most_asked(high - low))
    while bracket.is_open:
        size = bracket.nearest(guess(bracket.low, bracket.high))
        assert size not in answers
        assert low < size < high
        answers[size] = hash((seed, size)) % 1000 < 1000 * share
        bracket = bracket.after(size, answers[size])
    found = bracket.low
    assert found == low or answers[found]
    assert found == high - 1 or not answers[found + 1]
    assert len(answers) <= math.log2(high - low) + 3
    assert list(answers.values()).count(False) <= math.log2(high - low) / 2 + 2


@given(INTERVALS, st.integers(0, 6000))
def test_what_is_monotone_gives_the_largest_of_all(interval, limit) -> None:
    low, high = interval
    assert largest(lambda size: size <= limit, low, high) == min(max(limit, low), high - 1)
