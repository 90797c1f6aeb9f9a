"""Observation of the steps of a run: the time of their phases, and memory that grows.

Steps are sampled for their time, at most one in `INTERVAL_S`, so that quick steps cost nothing. On the CPU
the host's clock serves. A GPU runs behind the host, so events in its stream do; they are read once they have
passed, and the host never waits for them. The time of ``data`` is then what the GPU waits for data.

Memory grows if something is kept from step to step, on the device or on the host. What is held after a
step, with the gradients freed, is the same after every step, or fluctuates: with ragged samples, caches,
garbage and validations. The least of 1, 2, 4, … readings in a row is one block. Memory grows if `BLOCKS`
blocks of one length rise, each above the one before. Fluctuation delays that only until the growth within a
block exceeds it. Readings in random order rise so with a probability of 1 ÷ `BLOCKS`!.

A cache that fills rises too, ever slower. So a growth is told only if, at the rate of its slower half, memory
is full before the run ends, and within `REACH` times the steps that were observed.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import torch

from autobatch.core.units import format_bytes

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


BLOCKS = 16
"""Blocks in a row that rise if memory grows."""
REACH = 8
"""Most steps ahead that a growth is told, in steps that it was observed."""


class Reading(NamedTuple):
    """Bytes that were held after a step."""

    held_bytes: int
    step: int


class MemoryWatch:
    """The memory that is held after each step of a run in this process.

    Args:
        last_step: number of the last step of the run.
        words: for the memory that would be full, and for the usual cause.
        read: returns the bytes that are held.
        room: returns the bytes that are left.
    """

    def __init__(
        self,
        last_step: int,
        words: tuple[str, str],
        *,
        read: Callable[[], int | None],
        room: Callable[[], float],
    ) -> None:
        self._last_step, self._read, self._room = last_step, read, room
        self._whole, self._cause = words
        self._asks_from = 0
        """The first step at which a growth may be looked into."""
        self._forget()

    def _forget(self) -> None:
        self._readings = self._newest_bytes = 0
        self._halves: dict[int, Reading] = {}
        """By the doublings of its length, a block that waits for its other half."""
        self._rising: defaultdict[int, deque[Reading]] = defaultdict(lambda: deque(maxlen=BLOCKS))
        """By the doublings of their length, the newest blocks as far as they rise."""

    def after_step(self, step: int, held_bytes: int | None) -> str | None:
        """Return, once, in words that memory grows until it is full.

        Args:
            step: the number of the step, from 1.
            held_bytes: read after it; None if unknown.
        """
        if held_bytes is None:
            return None
        self._add(Reading(held_bytes, step))
        rising = self._grown()
        if rising is None or step < self._asks_from:
            return None
        left = self._room() / _rate(rising)
        if step + left >= self._last_step or left > REACH * (rising[-1].step - rising[0].step):
            return None
        # Garbage in cycles grows until Python collects it. This takes long, so it is done at few steps.
        gc.collect()
        kept_bytes = self._read() or 0
        if 2 * kept_bytes < rising[0].held_bytes + rising[-1].held_bytes:
            self._asks_from = 2 * step
            self._forget()
            return None
        self._asks_from = self._last_step + 1
        return (
            f"memory grows by {_course(rising)}: if this continues, {self._whole} is full at about step "
            f"{step + round(left):,}. {self._cause}"
        )

    def at_end(self) -> str | None:
        """Return in words that memory has grown until it ran out; None if it has not."""
        rising = self._grown()
        return None if rising is None else f"memory grew by {_course(rising)}. {self._cause}"

    def _add(self, block: Reading) -> None:
        self._readings += 1
        self._newest_bytes = block.held_bytes
        for doublings in count():
            rising = self._rising[doublings]
            if rising and block.held_bytes <= rising[-1].held_bytes:
                rising.clear()
            rising.append(block)
            if self._readings >> doublings & 1:
                self._halves[doublings] = block
                return
            block = min(self._halves[doublings], block)

    def _grown(self) -> deque[Reading] | None:
        """Return the longest blocks that all rise; None if there are none, or if memory has fallen since."""
        full = (rising for rising in reversed(self._rising.values()) if len(rising) == BLOCKS)
        return next((rising for rising in full if rising[-1].held_bytes <= self._newest_bytes), None)


def _rate(rising: deque[Reading]) -> float:
    """Return the bytes a step of the half that rises slower."""
    first, middle, last = rising[0], rising[BLOCKS // 2], rising[-1]
    halves = ((first, middle), (middle, last))
    return min((b.held_bytes - a.held_bytes) / (b.step - a.step) for a, b in halves)


def _course(rising: deque[Reading]) -> str:
    first, last = rising[0], rising[-1]
    return (
        f"{format_bytes(round(_rate(rising)))} a step, from {format_bytes(first.held_bytes)} held after step "
        f"{first.step:,} to {format_bytes(last.held_bytes)} after step {last.step:,}"
    )
