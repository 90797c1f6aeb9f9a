"""Where short runs train: in this process, or in a child that may crash without harm to the study."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from autobatch.attempt import Bench
from autobatch.config import TuneOptions
from autobatch.isolation import ChildLost, ProbeChild
from autobatch.tuning.shortrun import Losses, RunTask, Seen, short_run

TRIAL = "a trial of a learning rate"


class Runs(Protocol):
    """Trains short runs."""

    def losses(self, rate: float, seed: int) -> Losses:
        """Train at a learning rate, on what a seed draws; may be closed before its end."""


@dataclass
class LocalRuns:
    """Short runs in this process."""

    bench: Bench
    task: RunTask

    def losses(self, rate: float, seed: int) -> Losses:
        """See `autobatch.tuning.shortrun.short_run`."""
        return short_run(self.bench, self.task, rate, seed)


@dataclass
class IsolatedRuns:
    """Short runs in a child process: one that crashes or hangs makes its learning rate infeasible."""

    child: ProbeChild
    """… with `run_answers`."""
    task: RunTask

    def losses(self, rate: float, seed: int) -> Losses:
        """See `Runs`."""
        question: tuple[RunTask, float, int] | None = (self.task, rate, seed)
        while (seen := self._ask(question)) is not None:
            yield seen
            question = None

    def _ask(self, question: tuple[RunTask, float, int] | None) -> Seen | None:
        try:
            seen: Seen | None = self.child.ask(question, TRIAL)
        except ChildLost as lost:
            self.child.restart()
            return Seen(math.nan, 0.0, str(lost))
        return seen


def run_answers(bench: Bench, _: Any) -> Callable[[Any], Any]:
    """What a child for short runs does with what it is asked: the first window of a run, or the next one."""
    current: Losses | None = None

    def answer(asked: Any) -> Seen | None:
        nonlocal current
        if asked is not None:
            if current is not None:
                current.close()
            current = short_run(bench, *asked)
        assert current is not None
        return next(current, None)

    return answer


@contextmanager
def open_runs(
    workload: str | None, options: TuneOptions, task: RunTask, *, bench: Callable[[], Bench], isolated: bool
) -> Iterator[Runs]:
    """Open what trains short runs; see `autobatch.tuning.labs.open_trials`."""
    if not isolated:
        yield LocalRuns(bench(), task)
        return
    with ProbeChild(workload, options, answers=run_answers) as child:
        yield IsolatedRuns(child, task)
