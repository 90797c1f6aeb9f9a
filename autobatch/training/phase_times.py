"""The time of each phase of a step: data, forward, backward, the optimizer's step, and the rest.

Steps are sampled, at most one in `INTERVAL_S`, so that quick steps cost nothing. On the CPU the host's clock
serves. A GPU runs behind the host, so events in its stream do; they are read once they have passed, and the
host never waits for them. The time of ``data`` is then what the GPU waits for data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

INTERVAL_S = 0.05
"""Least time between the starts of two steps that are timed."""
OTHER = "other"
"""Drawing the batch, checks, the record and its files."""
NAMES = {"loss": "forward", "optimizer": "step"}
"""Names of the phases of a step that are not called by their own."""


class PhaseTimes:
    """Seconds of the phases of a run, from a sample of its steps.

    Args:
        clock: returns seconds of the host.
        new_event: returns an event that records a time in the device's stream; None to use the clock.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        new_event: Callable[[], torch.Event] | None = None,
    ) -> None:
        self.is_timing = False
        """True within a step that is timed."""
        self._clock = clock
        self._new_event = new_event
        self._laps: list[tuple[str, Any]] = []
        self._begun_at = -INTERVAL_S
        self._sampled: dict[str, float] = {}
        self._between: dict[str, float] = {}

    def begin(self, now: float) -> None:
        """Begin a step, which is timed if the last timed one is long ago and has been read."""
        if now - self._begun_at >= INTERVAL_S and self._read():
            self._begun_at = now
            self.is_timing = True
            self.lap(OTHER)

    def lap(self, phase: str) -> None:
        """Begin a phase of a step, if it is timed."""
        if not self.is_timing:
            return
        if self._new_event is None:
            self._laps.append((phase, self._clock()))
        else:
            event = self._new_event()
            event.record()
            self._laps.append((phase, event))

    def end(self) -> None:
        """End a step."""
        self.lap(OTHER)
        self.is_timing = False

    def drop(self) -> None:
        """Forget the current step, which ran out of memory."""
        self.is_timing = False
        self._laps.clear()

    @contextmanager
    def between_steps(self, name: str) -> Iterator[None]:
        """Time the block, between two steps, by the host's clock."""
        start = self._clock()
        try:
            yield
        finally:
            self._between[name] = self._between.get(name, 0.0) + self._clock() - start

    def totals(self, step_seconds: float) -> dict[str, float]:
        """Return the seconds of each phase, the largest first.

        Args:
            step_seconds: duration of all steps, which is divided as the sampled ones were.
        """
        self._read()
        scale = step_seconds / (sum(self._sampled.values()) or 1.0)
        found = {phase: seconds * scale for phase, seconds in self._sampled.items()} | self._between
        return dict(sorted(found.items(), key=lambda one: -one[1]))

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Return the seconds so far, which a resume continues."""
        self._read()
        return {"sampled": dict(self._sampled), "between": dict(self._between)}

    def load_state_dict(self, state: Mapping[str, dict[str, float]]) -> None:
        """Continue from the seconds of the run before a resume."""
        self._sampled = dict(state.get("sampled", {}))
        self._between = dict(state.get("between", {}))

    def _read(self) -> bool:
        """Add up the laps of the last timed step. Return False if its events have not passed yet."""
        if self._laps and self._new_event is not None and not self._laps[-1][1].query():
            return False
        for (phase, start), (_, end) in zip(self._laps, self._laps[1:], strict=False):
            seconds = end - start if self._new_event is None else start.elapsed_time(end) / 1000
            name = NAMES.get(phase, phase)
            self._sampled[name] = self._sampled.get(name, 0.0) + seconds
        self._laps.clear()
        return True
