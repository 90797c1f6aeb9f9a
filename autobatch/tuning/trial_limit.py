"""The largest micro-batch that each configuration of a study allows.

A micro-batch that a trace predicts far below or above the budget is not run to confirm that. One close to the
limit is run once within the enforced budget.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from autobatch.core.knobs import COMPILE, EXPANDABLE, SPLIT, Configuration, Value, memory_signature
from autobatch.core.units import format_bytes
from autobatch.device.allocator.trace import replay
from autobatch.footprint.largest import largest_micro_batch
from autobatch.footprint.predict import Footprint
from autobatch.footprint.program import Untraceable
from autobatch.planning import micro_batches
from autobatch.search.limits import ReplayPredictor, first_size
from autobatch.search.search import search
from autobatch.setup.attempt import Outcome, TrainSetup, attempt
from autobatch.setup.setup import with_knobs
from autobatch.setup.trace import trace_footprint
from autobatch.tuning.configuration import Key, key_of


@dataclass(frozen=True, kw_only=True)
class TrialSpec:
    """Settings of the trials of a study: plain values, which travel to a child process."""

    limit: int
    """The largest micro-batch that fits with every knob at its default."""
    cap: int
    """The largest micro-batch that any configuration may use."""
    samples: int
    """Samples of an optimizer step on one rank."""
    planned_steps: int
    """Optimizer steps over which one-time costs are spread."""
    seconds: float
    """Approximate time that a trial measures for."""
    is_precision_open: bool = True
    """No precision was asked for."""
    workers: int | None = None
    """Loader workers that were asked for; None if none were."""
    prefetch: int | None = None
    """Micro-batches per worker that were asked for; None if none were."""
    defaults: Configuration = field(default_factory=dict)
    """Values that change nothing. A knob that is missing is at its default."""

    def changes(self, values: Configuration) -> dict[str, Value]:
        """Return the values that are not at their default, except the split."""
        return {
            name: value
            for name, value in values.items()
            if name != SPLIT and value != self.defaults.get(name, value)
        }


@dataclass
class TrialLimits:
    """The largest micro-batches of configurations on one setup, kept for later trials."""

    setup: TrainSetup
    task: TrialSpec
    _limits: dict[Key, int | str] = field(default_factory=dict)
    _predicted: dict[Key, Footprint | None] = field(default_factory=dict)
    _ran: dict[Key, int] = field(default_factory=dict)

    def size(self, values: Configuration) -> tuple[int, str | None]:
        """Return the micro-batch that a configuration may run at, and None if it fits, else the reason."""
        limit = self.limit(values)
        if isinstance(limit, str):
            return 0, limit
        size = micro_batch_of(limit, self.task.samples, values)
        reason = self._does_not_fit(values, size)
        if reason is None:
            return size, None
        limit = self._search(values, cap=size - 1) if size > 1 else 0
        if not limit:
            return size, reason
        self._limits[key_of(memory_signature(values))] = limit
        return micro_batch_of(limit, self.task.samples, values), None

    def limit(self, values: Configuration) -> int | str:
        """Return the largest micro-batch of a configuration, or the reason why there is none.

        A compiled configuration starts from what fits without the compiler, because a search would compile
        every size anew.
        """
        compiled = self._limits.get(key_of(memory_signature(values)))
        if compiled is not None:
            return compiled
        values = {name: value for name, value in values.items() if name != COMPILE}
        signature = memory_signature(values)
        if not self.task.changes(signature):
            return self.task.limit
        key = key_of(signature)
        if key not in self._limits:
            self._limits[key] = self._predict_limit(values)
        return self._limits[key]

    def _predict_limit(self, values: Configuration) -> int | str:
        step = self._footprint(values)
        if step is not None:
            device = with_knobs(self.setup, values).device
            budget = format_bytes(self.setup.device.budget_bytes)
            with suppress(Untraceable):
                found = largest_micro_batch(step.program, device.new_allocator, self.task.cap)
                return found or f"not even a micro-batch of 1 is predicted to fit in {budget}"
        return self._search(values, cap=self.task.cap) or "not even a micro-batch of 1 fits"

    def _search(self, values: Configuration, *, cap: int) -> int:
        """Search for the largest micro-batch by attempts; 0 if none fits."""
        setup = with_knobs(self.setup, values)
        key = key_of(memory_signature(values))

        def run(size: int) -> Outcome:
            outcome = attempt(setup, size)
            if outcome.attempt.fits:
                self._ran[key] = max(size, self._ran.get(key, 0))
            return outcome

        step = self._predicted.get(key)
        predictor = ReplayPredictor(
            setup.device.new_allocator,
            None if step is None else step.program,
            first_size=first_size(setup.device.compute_capability),
        )
        return search(run, cap=cap, predictor=predictor).micro_batch

    def _does_not_fit(self, values: Configuration, size: int) -> str | None:
        """Return why a micro-batch does not fit; None if it fits. A run decides if nothing else does."""
        if not self.task.changes(memory_signature(values)):
            return None
        key = key_of(memory_signature(values))
        if size <= self._ran.get(key, 0) or self._has_room(values, size):
            return None
        outcome = attempt(with_knobs(self.setup, values), size).attempt
        if outcome.fits:
            self._ran[key] = size
        return outcome.reason

    def _has_room(self, values: Configuration, size: int) -> bool:
        """Return whether a micro-batch is predicted to fit by more than the error of a prediction."""
        step = self._footprint(values)
        if step is None:
            return False
        try:
            device = with_knobs(self.setup, values).device
            outcome = replay(step.program.at(size), device.new_allocator())
        except Untraceable:
            return False
        peak = outcome.peak_reserved_bytes or outcome.peak_allocated_bytes
        return outcome.fits and peak <= (1 - step.margin) * self.setup.device.budget_bytes

    def _footprint(self, values: Configuration) -> Footprint | None:
        signature = memory_signature(values)
        # A compiled model is traced as its module, and a trace does not depend on how segments grow.
        key = key_of({name: value for name, value in signature.items() if name not in (COMPILE, EXPANDABLE)})
        if key not in self._predicted:
            self._predicted[key] = trace_footprint(with_knobs(self.setup, signature))
        return self._predicted[key]


def micro_batch_of(limit: int, samples: int, values: Configuration) -> int:
    """Return the micro-batch of a configuration: the even split at the limit, halved as often as it says."""
    return max(1, micro_batches(samples, limit)[0] >> int(values.get(SPLIT) or 0))
