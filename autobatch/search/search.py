"""Search for the largest micro-batch that fits, by real runs.

    replay ──guess──► run ──► replay confirmed or corrected ──► … ──► m ran and fits, and m + 1 does not

`autobatch.core.largest` chooses the sizes. This module knows no device and no model: a size goes in, an
`Outcome` comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from autobatch.core.largest import largest
from autobatch.core.records import Attempt, UpperBoundBy
from autobatch.rehearsal.attempt import Outcome
from autobatch.search.replay import Replay

REACH = 2
"""Ratio of the largest size in question to a prediction. Larger sizes are in question once that one fits."""
GUESSES = 2
"""Runs that reach the largest size in question if guesses are good."""
FIRST_SIZE = 2
"""The first size without any prediction, because 1 is a special case for many operators."""
FIRST_SIZE_ON_GPU = 8
"""The same on a GPU, whose libraries have special cases for small sizes."""
MULTIPLES = (2, 4, 8)
"""Numbers of samples that workloads may insist on multiples of."""


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
    multiple: int = 1
    """The number whose multiples run; others fail for another reason than memory."""

    @property
    def next_size(self) -> int:
        """The size after the largest."""
        return self.micro_batch + self.multiple


def first_size(compute_capability: tuple[int, int] | None) -> int:
    """Return the first size to run without any prediction, by the compute capability; None on a CPU."""
    return FIRST_SIZE if compute_capability is None else FIRST_SIZE_ON_GPU


class _Stopped(Exception):  # noqa: N818 - the end of a search is no fault
    """The search ends with what it has."""


class _MultipleFound(Exception):  # noqa: N818 - it starts the search anew, and is no fault
    """Only multiples of a number run."""


def search(
    run: Callable[[int], Outcome],
    *,
    cap: int,
    replay: Replay,
    first: int = FIRST_SIZE,
    multiple: int | None = None,
    multiples: Sequence[int] = MULTIPLES,
    suspect: int | None = None,
    stopped: Callable[[], str | None] = lambda: None,
) -> Found:
    """Find the largest micro-batch that fits.

    The sizes in question reach to `REACH` times a prediction. With s such sizes, at most log2(s) + 3 run, and
    at most half of log2(s) + 2 do not fit; see `autobatch.core.largest.largest`. If the largest of them fits,
    larger ones are in question. Without a prediction, ``first`` runs before, and predicts in proportion to
    the bytes that it allocates. To find the multiple takes at most one run more for each of ``multiples``.

    Args:
        run: makes an attempt, and returns the error of one that fails for another reason than memory.
        cap: largest size of the search, at least 1.
        replay: predicts, and learns from each attempt.
        first: the first size without a prediction.
        multiple: the number whose multiples may run; None to find out.
        multiples: candidates for it, tried if a size fails for another reason than memory.
        suspect: a size that may fail for another reason than memory, and runs first to find the multiple;
            None if there is no reason to expect one.
        stopped: asked before each run once a size fits; a reason ends the search.

    Returns:
        The result. A ``KeyboardInterrupt`` in ``run`` ends the search as the time limit does.

    Raises:
        Exception: the error of the smallest size, if nothing fits and no multiple was found.
    """
    one = _Search(run, cap, replay, stopped=stopped)
    one.multiple, one.possible_multiples = (1, multiples) if multiple is None else (multiple, ())
    predicted = replay.largest(cap)
    reach = first if predicted is None else REACH * max(predicted, FIRST_SIZE)
    stopped_by = None
    try:
        if suspect is not None and multiple is None and suspect <= cap:
            with suppress(_MultipleFound):
                one.fits(suspect)
        one.find(min(cap, reach))
    except _Stopped as reason:
        stopped_by = str(reason)
    except KeyboardInterrupt:
        stopped_by = "interrupt"
    proof = None if stopped_by or not one.low else one.proof()
    return Found(one.low, proof, predicted, one.attempts, stopped_by, one.multiple)


class _Search:
    """The attempts of a search, and what they show."""

    def __init__(
        self, run: Callable[[int], Outcome], cap: int, replay: Replay, *, stopped: Callable[[], str | None]
    ) -> None:
        self._run = run
        self._cap = cap
        self._replay = replay
        self._stopped = stopped
        self._refused: dict[int, UpperBoundBy] = {}
        """The proof for each size that does not fit."""
        self.multiple = 1
        self.possible_multiples: Sequence[int] = ()
        """Numbers that sizes may have to be multiples of."""
        self.low = 0
        """The largest size that ran and fits."""
        self.attempts: list[Attempt] = []

    def find(self, top: int) -> None:
        """Search the sizes up to ``top``, then larger ones as long as the largest of them fits.

        Once guesses have crept up to a top, the next ones run first: memory that hardly grows any more would
        take log2 of each.
        """
        creeps = False
        while True:
            ran = len(self.attempts)
            try:
                if creeps and not any(self.low < size <= top for size in self._refused):
                    self.fits(top // self.multiple * self.multiple)
                self._search_up_to(top)
            except _MultipleFound:
                continue
            if self.low + self.multiple <= top or self.low + self.multiple > self._cap:
                return
            creeps = creeps or len(self.attempts) - ran > GUESSES
            top = min(self._cap, REACH * max(self.low, self._replay.largest(self._cap) or 0))

    def proof(self) -> UpperBoundBy | None:
        """Return the proof that the size after the largest does not fit."""
        above = self.low + self.multiple
        return "cap" if above > self._cap else self._refused.get(above)

    def _search_up_to(self, top: int) -> None:
        """Search the multiples up to ``top``, in units of the number that they are multiples of."""
        unit = self.multiple
        highest = min([size for size in self._refused if size > self.low] + [top + 1])

        def guess(low: int, high: int) -> int:
            if not low and self._refused.get(high * unit) == "error":
                return FIRST_SIZE // unit
            # A single sample has no batch statistics: it runs last.
            least = 1 if low or high * unit <= FIRST_SIZE else FIRST_SIZE // unit
            return max(least, self._replay.guess(low * unit, high * unit) // unit)

        largest(lambda count: self.fits(count * unit), self.low // unit, -(-highest // unit), guess)

    def fits(self, size: int) -> bool:
        """Return whether a size fits, by a run unless a run has confirmed the replay that says so."""
        is_next = self._replay.has_run and size == self.low + self.multiple
        if is_next and self._replay.says_fits(size) is False:
            self._refused[size] = "replay"
            return False
        reason = self._stopped() if self.low else None
        if reason:
            raise _Stopped(reason)
        outcome = self._attempt(size)
        if outcome.error is not None:
            self._look_for_multiple(size)
            if size <= FIRST_SIZE and not self.low:
                raise outcome.error
            self._refused[size] = "error"
        return outcome.attempt.fits

    def _attempt(self, size: int) -> Outcome:
        outcome = self._run(size)
        self.attempts.append(outcome.attempt)
        if outcome.error is None:
            self._replay.learn(outcome)
            if outcome.attempt.fits:
                self.low = max(self.low, size)
            else:
                self._refused[size] = "run"
        return outcome

    def _look_for_multiple(self, failed: int) -> None:
        """Run a multiple of each candidate near a failed size, and raise `_MultipleFound` if one runs."""
        if failed == 1:  # a special case of many operators
            return
        for multiple in self.possible_multiples:
            fitting = [one.micro_batch for one in self.attempts if one.fits]
            if failed % multiple == 0 or any(size % multiple for size in fitting):
                continue
            size = self._multiple_near(failed, multiple)
            if size is not None and self._attempt(size).error is None:
                self.multiple = multiple
                self.possible_multiples = [one for one in self.possible_multiples if one > multiple]
                self._refused = {size: by for size, by in self._refused.items() if by != "error"}
                raise _MultipleFound

    def _multiple_near(self, failed: int, multiple: int) -> int | None:
        """Return a multiple near a failed size, but of no larger candidate; None if all have run."""
        others = [one for one in self.possible_multiples if one > multiple]
        ran = {one.micro_batch for one in self.attempts}
        top = min([self._cap] + [size - 1 for size, by in self._refused.items() if by == "run"])
        nearest = max(failed // multiple, 1) * multiple
        near = [*range(nearest, 0, -multiple), nearest + multiple]
        return next(
            (size for size in near if size <= top and size not in ran and all(size % one for one in others)),
            None,
        )
