"""A trial that the ranks that share a model run together, in the sessions of their children.

    each rank alone: limit, losses ──► the least limit of each kind ──► all ranks together: seconds per step

A step of a shared model needs all ranks. If memory runs out on one of them, or its process ends, the others
end the step, and the trial has failed on all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Concatenate, ParamSpec

from autobatch.core.knobs import Configuration
from autobatch.distributed.rank_plan import limits_over_ranks, meeting_place
from autobatch.distributed.ranks import Ranks
from autobatch.search.confirm import JointBatch, joint_batch, meet, run_joint_batch
from autobatch.setup.child import ChildCrashed, Session, SetupProcess
from autobatch.tuning.configuration import MEMORY, RUNS, Measurement, infeasible
from autobatch.tuning.lead import OTHER_ENDED, reason_of
from autobatch.tuning.timing import Joint
from autobatch.tuning.trial import confirm_trial, runner_of, size_trial
from autobatch.tuning.trial_limit import TrialSpec

if TYPE_CHECKING:
    from autobatch.distributed.meeting import MeetingPlace

P = ParamSpec("P")


@dataclass(frozen=True)
class JointTrials:
    """Trials of ranks that share a model, each at the same call; see `autobatch.tuning.trial_source.Trials`.

    Args:
        process: holds the setup of this rank.
        task: settings of the trials.
        ranks: the ranks.
        samples: of a batch.
    """

    process: SetupProcess
    task: TrialSpec
    ranks: Ranks
    samples: int

    def measure(self, values: Configuration) -> Measurement:
        """See `Trials.measure`."""
        own = self._ask("a trial", size_trial, self.task, dict(values))
        limits = self._limits(own)
        place = meeting_place(self.ranks)
        if place is None or not all(limits):
            return own  # some rank has the reason
        steps = -(-self.samples // sum(limits))
        batch = joint_batch([[limit] * steps for limit in limits], self.ranks.rank, "auto")
        found = self._ask("a trial over all ranks", time_trial, self.task, dict(values), place, batch, steps)
        return found._replace(constraints=own.constraints) if found.feasible else found

    def confirm_fits(self, values: Configuration) -> str | None:
        """See `Trials.confirm_fits`."""
        own = self._ask("the check of the best trial", confirmed_trial, self.task, dict(values))
        limits = self._limits(own)
        place = meeting_place(self.ranks)
        if place is None or not all(limits):
            return own.failure
        batch = joint_batch([[limit] * 2 for limit in limits], self.ranks.rank, "auto")
        found = run_joint_batch(self.process, place, batch, dict(values))
        return None if found.fits else found.reason or OTHER_ENDED

    def _limits(self, own: Measurement) -> list[int]:
        """Return the micro-batch of every rank, 0 if it does not fit there; all ranks call it."""
        size = own.micro_batch if own.feasible else 0
        return [one.limit for one in limits_over_ranks(self.ranks, size, self.process.info.device)]

    def _ask(
        self,
        act: str,
        function: Callable[Concatenate[Session, P], Measurement],
        *args: P.args,
        **more: P.kwargs,
    ) -> Measurement:
        """Ask the process of this rank. A configuration that crashes it is infeasible."""
        try:
            return self.process.call(act, function, *args, **more)
        except ChildCrashed as crash:
            failure = reason_of(crash)
        self.process.restart()
        return infeasible(RUNS, failure)


def confirmed_trial(session: Session, task: TrialSpec, values: Configuration) -> Measurement:
    """Run a configuration within the enforced budget, and return its micro-batch, or why it does not fit."""
    reason = confirm_trial(session, task, values)
    return size_trial(session, task, values) if reason is None else infeasible(MEMORY, reason)


def time_trial(  # noqa: PLR0917 - all of it travels to a child
    session: Session,
    task: TrialSpec,
    values: Configuration,
    place: MeetingPlace,
    batch: JointBatch,
    steps: int,
) -> Measurement:
    """Time a configuration together with the sessions of the other ranks; all of them call it.

    Args:
        session: holds the setup of this rank.
        task: settings of the trials.
        values: the configuration.
        place: where the sessions meet.
        batch: as many micro-batches on every rank, of the limit of each.
        steps: micro-batches of a step.
    """
    runner = runner_of(session, task)

    def run(values: Configuration) -> Measurement:
        with meet(session, place) as children:
            return runner.time(values, 0, Joint(children, batch, steps))

    return runner.guarded(values, run)
