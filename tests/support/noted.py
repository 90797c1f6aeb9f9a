"""Runs of `autobatch.fit` on the CPU, with the remarks that they make."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import autobatch
from autobatch import FitResult, Progress, StepRecord, Workload


class Stopped(Exception):
    """A run was stopped after a step."""


class Noting(Progress):
    """Listener that keeps the remarks of a run.

    Args:
        stop_after: the step after which the run is stopped without a checkpoint; None to let it end.
    """

    def __init__(self, stop_after: int | None = None) -> None:
        self.notes: list[str] = []
        self._stop_after = stop_after

    def note(self, text: str) -> None:
        """See `Progress.note`."""
        self.notes.append(text)

    def stepped(self, step: StepRecord, of: int) -> None:
        """See `Progress.stepped`."""
        if step.step == self._stop_after:
            raise Stopped


def fit(workload: Workload, out: Path, **options: Any) -> tuple[FitResult, list[str]]:
    """Train, and return the result and the remarks.

    Raises:
        AssertionError: the run ended with any error.
    """
    listener = Noting()
    try:
        result = _fit(workload, out, listener, options)
    except Exception as error:
        raise AssertionError(f"the run ended with {type(error).__name__}: {error}") from error
    return result, listener.notes


def fit_until(step: int, workload: Workload, out: Path, **options: Any) -> None:
    """Train, and stop after a step as a kill would."""
    with suppress(Stopped):
        _fit(workload, out, Noting(step), options)
        raise AssertionError(f"the run has no step {step}")


def _fit(workload: Workload, out: Path, listener: Progress, options: dict[str, Any]) -> FitResult:
    options = {"device": "cpu", "memory_budget": "1GiB", "trials": 0, **options}
    return autobatch.fit(workload, out=out, progress=listener, **options)
