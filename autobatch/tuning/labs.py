"""Where trials run: in this process, or in a child that may crash without harm to the study."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from autobatch.attempt import Bench
from autobatch.config import TuneOptions
from autobatch.isolation import ChildLost, ProbeChild
from autobatch.knobs import Configuration, Situation
from autobatch.tuning.lab import Lab, Task
from autobatch.tuning.measurement import RUNS, Measurement, refused


class Trials(Protocol):
    """Runs trials."""

    def situation(self) -> Situation:
        """What decides which knobs apply."""

    def begin(self, defaults: Configuration) -> None:
        """Say what every knob is at when nothing is changed; before the first trial."""

    def measure(self, values: Configuration) -> Measurement:
        """Run a trial."""

    def certify(self, values: Configuration) -> str | None:
        """Run a configuration inside the enforced budget; why it does not fit."""


class IsolatedTrials:
    """Trials in a child process: one that crashes or hangs makes its configuration infeasible.

    Args:
        child: the process, with `trial_answers`.
        task: what the trials are made for.
    """

    def __init__(self, child: ProbeChild, task: Task) -> None:
        self._child = child
        self._task = task
        self._defaults: Configuration = {}
        self._open()

    def situation(self) -> Situation:
        """See `Trials`."""
        found: Situation = self._child.ask(("situation",), "looking at the workload")
        return found

    def begin(self, defaults: Configuration) -> None:
        """See `Trials`."""
        self._defaults = dict(defaults)
        self._open()

    def measure(self, values: Configuration) -> Measurement:
        """See `Trials`."""
        try:
            found: Measurement = self._child.ask(("measure", dict(values)), "a trial")
        except ChildLost as lost:
            self._restart()
            return refused(RUNS, str(lost))
        return found

    def certify(self, values: Configuration) -> str | None:
        """See `Trials`."""
        try:
            reason: str | None = self._child.ask(("certify", dict(values)), "the check of the best trial")
        except ChildLost as lost:
            self._restart()
            return str(lost)
        return reason

    def _open(self) -> None:
        self._child.ask(("open", self._task, self._defaults), "opening the workload")

    def _restart(self) -> None:
        self._child.restart()
        self._open()


def trial_answers(bench: Bench, options: Any) -> Callable[[Any], Any]:
    """What a child for trials does with what it is asked."""
    lab: Lab

    def answer(asked: Any) -> Any:
        nonlocal lab
        what, *given = asked
        if what == "open":
            lab = Lab(bench, options, *given)
            return None
        return getattr(lab, what)(*given)

    return answer


@contextmanager
def open_trials(
    workload: str | None, options: TuneOptions, task: Task, *, bench: Callable[[], Bench], isolated: bool
) -> Iterator[Trials]:
    """Open what runs trials.

    Args:
        workload: what a child is to load; ``None``: the demo.
        options: of the command.
        task: what the trials are made for.
        bench: opens the bench, where trials run in this process.
        isolated: whether they run in a child.
    """
    if not isolated:
        yield Lab(bench(), options, task)
        return
    with ProbeChild(workload, options, answers=trial_answers) as child:
        yield IsolatedTrials(child, task)
