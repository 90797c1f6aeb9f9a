"""What makes the attempts: this process or a child; and what is not taken at its word."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import msgspec

from autobatch.attempt import Bench, Outcome, attempt_at
from autobatch.bench import Facts, facts_of, find_workload, open_bench
from autobatch.config import Options
from autobatch.footprint.predict import Footprint
from autobatch.footprint.program import Program
from autobatch.isolation import ProbeChild
from autobatch.prior import other_order, prior_footprint, remedies_of, traced_peak
from autobatch.records import Remedy
from autobatch.workload import Workload

SPILL_FACTOR = 3.0
"""A size that takes this much longer a sample than the fastest is not running in the card's own memory."""


class SpillGuard:
    """Refuses sizes that run, but several times slower a sample: some drivers spill to the host's memory.

    Only of larger sizes than ran well: smaller ones are slower a sample for what comes once a window, such as
    a loss over all of it.

    Args:
        active: whether this device's driver might.
    """

    def __init__(self, *, active: bool) -> None:
        self._active = active
        self._best: float | None = None
        self._largest = 0

    def judge(self, outcome: Outcome) -> Outcome:
        """The outcome, or the same as one that does not fit."""
        attempted = outcome.attempt
        if not (self._active and attempted.fits and attempted.window_seconds):
            return outcome
        a_sample = attempted.window_seconds / attempted.micro_batch
        is_larger = attempted.micro_batch > self._largest
        if self._best is None or not is_larger or a_sample <= SPILL_FACTOR * self._best:
            self._best = a_sample if self._best is None else min(self._best, a_sample)
            self._largest = max(self._largest, attempted.micro_batch)
            return outcome
        reason = (
            f"it runs, at {a_sample / self._best:.1f} times the best time a sample: the driver seems to "
            "spill to the host's memory instead of failing"
        )
        return Outcome(msgspec.structs.replace(attempted, fits=False, reason=reason), None)


class Prober(Protocol):
    """Makes attempts, here or in a child process."""

    facts: Facts
    step: Footprint | None
    """What `prior` answered; ``None`` before."""

    def prior(self) -> Footprint | None:
        """What is predicted before anything runs, where it can be."""

    def other_order(self) -> Program | None:
        """What is predicted of the second look that an attempt takes near the limit, where it can be."""

    def others_bytes(self) -> int | None:
        """What other processes hold on the card now; ``None`` where that cannot be read."""

    def traced_peak(self, micro_batch: int) -> int | None:
        """Peak reserved as a trace alone predicts it, where the device is a card that runs have measured."""

    def remedies(self) -> list[Remedy]:
        """What would let a micro-batch fit that does not, as predicted."""

    def run(self, micro_batch: int, level: float | None = None) -> Outcome:
        """Make one attempt, on samples that cost no more than ``level`` if that is given."""


@dataclass
class LocalProber:
    """Attempts in this process."""

    bench: Bench
    facts: Facts
    step: Footprint | None = None

    def prior(self) -> Footprint | None:
        """See `autobatch.prior.prior_footprint`."""
        self.step = prior_footprint(self.bench)
        return self.step

    def other_order(self) -> Program | None:
        """See `autobatch.prior.other_order`."""
        return other_order(self.bench)

    def others_bytes(self) -> int | None:
        """See `Prober`."""
        return self.bench.device.describe().other_processes_bytes

    def traced_peak(self, micro_batch: int) -> int | None:
        """See `autobatch.prior.traced_peak`."""
        return traced_peak(self.bench, micro_batch)

    def remedies(self) -> list[Remedy]:
        """See `autobatch.prior.remedies_of`."""
        return remedies_of(self.bench, self.step)

    def run(self, micro_batch: int, level: float | None = None) -> Outcome:
        """See `autobatch.attempt.attempt_at`."""
        return attempt_at(self.bench, micro_batch, level)


@contextmanager
def open_prober(workload: Workload | str | None, options: Options, *, isolated: bool) -> Iterator[Prober]:
    """Open what makes the attempts: a child process where a reference can be handed to one, else here."""
    if isolated and not isinstance(workload, Workload):
        with ProbeChild(workload, options) as child:
            yield child
        return
    bench = open_bench(find_workload(workload), options, demo=workload is None)
    yield LocalProber(bench, facts_of(bench))
