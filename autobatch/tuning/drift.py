"""Speed of a trial relative to the default's around the same time.

A machine is faster one minute than the next, and a study may go on another day. So the default is measured
again at the start of a search that continues, and every few trials. Trials are compared by their ratio to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from autobatch.core.knobs import Configuration
from autobatch.tuning.configuration import Measure, Measurement

DEFAULT_EVERY = 5
"""Trials after which the default is measured again."""


@dataclass
class DriftingMachine:
    """Measurement of trials, each with the speed of the default around the same time.

    Args:
        measure: runs a configuration.
        default: the configuration that the others are compared with.
        started: start of the search, as an ISO date and time.
    """

    measure: Measure
    default: Configuration
    started: str
    latest: Measurement | None = None
    """Of the default; None if it has not run in this search."""
    measured: int = 0
    """Measurements in this search."""
    _trials_since: int = 0

    def run(self, values: Configuration) -> Measurement:
        """Run a trial."""
        if values == self.default:
            found = self._run_default()
        else:
            if self._is_due():
                self._run_default()
            found = self._measure(values)
            self._trials_since += 1
        default = self.latest.samples_per_s if self.latest is not None else 0.0
        return found._replace(default_samples_per_s=default, started=self.started)

    def _is_due(self) -> bool:
        if self.latest is None:
            return True
        return self.latest.feasible and self._trials_since >= DEFAULT_EVERY

    def _run_default(self) -> Measurement:
        self.latest = self._measure(self.default)
        self._trials_since = 0
        return self.latest

    def _measure(self, values: Configuration) -> Measurement:
        self.measured += 1
        return self.measure(values)
