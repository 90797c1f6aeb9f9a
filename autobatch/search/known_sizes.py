"""Predictions from traces of single sizes, which know the values of the batches that an attempt trains on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autobatch.device.allocator.ledger import Allocator
from autobatch.device.allocator.trace import Trace, replay
from autobatch.search.limits import ReplayPredictor
from autobatch.setup.attempt import Outcome


class KnownSizes:
    """Prediction of the largest traced size that fits, while runs agree with the traces.

    Args:
        traces: the events of an attempt, by its micro-batch.
        new_allocator: makes an empty allocator with the device's budget.
        otherwise: predicts once a run differs from its trace, or a size that was predicted to fit does not.
    """

    def __init__(
        self,
        traces: Mapping[int, Trace],
        new_allocator: Callable[[], Allocator],
        otherwise: ReplayPredictor,
    ) -> None:
        self._traces = traces
        self._fits = {size: replay(trace, new_allocator()).fits for size, trace in traces.items()}
        self._otherwise = otherwise
        self._confirmed: set[int] = set()
        self._is_refuted = False

    def learn(self, outcome: Outcome) -> None:
        """Compare an attempt with the trace of its size."""
        self._otherwise.learn(outcome)
        size, ran = outcome.attempt.micro_batch, outcome.trace
        traced = self._traces.get(size)
        if outcome.attempt.fits and ran is not None and ran.canonical() == traced:
            self._confirmed.add(size)
        else:
            self._is_refuted = True

    def next_calibration_size(self, cap: int) -> int | None:
        """Return None while the traces predict: they are exact."""
        return self._otherwise.next_calibration_size(cap) if self._is_refuted else None

    def largest(self, cap: int) -> int | None:
        """Predict the largest micro-batch that fits, at most ``cap`` and possibly 0; None if unknown."""
        if self._is_refuted:
            return self._otherwise.largest(cap)
        return max((size for size, fits in self._fits.items() if fits and size <= cap), default=0)

    def proves_next_fails(self, micro_batch: int) -> bool:
        """Return whether ``micro_batch + 1`` does not fit, after a run that agreed with its trace."""
        if self._is_refuted:
            return self._otherwise.proves_next_fails(micro_batch)
        return micro_batch in self._confirmed and self._fits.get(micro_batch + 1) is False
