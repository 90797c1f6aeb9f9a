"""What a trial found, and the ports between who asks for trials and who runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from autobatch.knobs import Configuration

MEMORY = "mem_over"
"""Constraint: share by which a configuration is over the budget."""
LOSS = "loss_gap"
"""Constraint: how far its losses are from the reference's, less what is tolerated."""
RUNS = "does_not_run"
"""Constraint: it raised an error, crashed or hung."""
CONSTRAINTS = (MEMORY, LOSS, RUNS)


class Measurement(NamedTuple):
    """What a trial found."""

    samples_per_s: float
    """At the effective batch; 0 where it does not run."""
    micro_batch: int = 0
    """That it ran at, in samples; 0 where there is none."""
    failure: str | None = None
    """Why it is not feasible, in one line."""
    constraints: Mapping[str, float] = {}
    """Figures that must not be over 0, by name; what is not given counts as met."""

    @property
    def feasible(self) -> bool:
        """Whether it may be chosen."""
        return self.failure is None


def refused(constraint: str, reason: str, *, over: float = 1.0, micro_batch: int = 0) -> Measurement:
    """A trial whose configuration cannot be chosen."""
    return Measurement(0.0, micro_batch, reason, {constraint: over})


Measure = Callable[[Configuration], Measurement]
"""Runs a configuration."""
Certify = Callable[[Configuration], str | None]
"""Runs a configuration inside the enforced budget; why it does not fit, or ``None``."""
