"""Short runs in the process that holds the setup, and on ranks that share a model together.

Rank 0 searches. Every rank begins, continues and ends the run that it asks for, in the session of its child.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec

from autobatch.distributed.rank_plan import meeting_place
from autobatch.distributed.ranks import Ranks
from autobatch.setup.child import ChildCrashed, Session, SetupProcess
from autobatch.tuning.joint_lr import Meeting, joint_run, keep_first_model
from autobatch.tuning.lead import OTHER_ENDED, answer, ask, failed_rank, follow, reason_of
from autobatch.tuning.lr_trial import Losses, LrTrialSpec, Runs, StepLoss, short_run

ACT = "a trial of a learning rate"
_BEGIN, _NEXT, _CLOSE = "begin", "next", "close"
P = ParamSpec("P")


@dataclass(frozen=True)
class ShortRuns:
    """Short runs in the process that holds the setup. One that crashes a child makes its rate infeasible."""

    process: SetupProcess
    task: LrTrialSpec

    def losses(self, rate: float, seed: int) -> Losses:
        """Train at a learning rate on the batches that a seed draws; the generator may be closed early.

        Yields:
            One `StepLoss` per optimizer step.
        """
        return _asked(self.process, _begin_run, self.task, rate, seed)


@dataclass(frozen=True)
class JointRuns:
    """Short runs of ranks that share a model, each at the same call; see `Runs`.

    Args:
        process: holds the setup of this rank.
        task: what they train.
        ranks: the ranks.
        limits: the largest micro-batch of each rank.
        seed: of the first weights.
    """

    process: SetupProcess
    task: LrTrialSpec
    ranks: Ranks
    limits: Sequence[int]
    seed: int

    def losses(self, rate: float, seed: int) -> Losses:
        """See `ShortRuns.losses`."""
        failure = self._prepare()
        # A meeting does not wait as long as a large model takes to build.
        if self.ranks.agree(failure is not None):
            yield StepLoss(math.nan, 0.0, failure or OTHER_ENDED)
            return
        place = meeting_place(self.ranks)
        assert place is not None, "one process shares no model"
        meeting = Meeting(place, list(self.limits), self.seed)
        yield from _asked(self.process, _begin_joint_run, self.task, rate, seed, meeting)

    def _prepare(self) -> str | None:
        """Build the model on the rank that holds it. Return why that failed; None if it did not."""
        try:
            self.process.call("building the model", keep_first_model, self.ranks.rank, self.seed)
        except ChildCrashed as crash:
            failure = str(crash)
        else:
            return None
        self.process.restart()
        return failure


@dataclass
class SharedRuns:
    """Runs that all ranks make together: rank 0 calls `losses`, the others `follow`.

    Args:
        own: the runs of this rank.
        ranks: the ranks.
    """

    own: Runs
    ranks: Ranks
    _open: Losses | None = None

    def losses(self, rate: float, seed: int) -> Losses:
        """See `ShortRuns.losses`. A run that fails on one rank fails on all."""
        try:
            seen = self._ask(_BEGIN, [rate, seed])
            while seen is not None and seen.failure is None:
                yield seen
                seen = self._ask(_NEXT)
        except GeneratorExit:
            self._ask(_CLOSE)
            raise
        if seen is not None:
            # Ranks that have not failed may continue it.
            self._ask(_CLOSE)
            yield seen

    def end(self, found: Any) -> None:
        """Tell the other ranks the answer of the search, which JSON can hold."""
        answer(self.ranks, found)

    def follow(self) -> Any:
        """Run what rank 0 asks for until the search ends, and return its answer."""
        return follow(self.ranks, self._run)

    def _ask(self, act: str, asked: Any = None) -> StepLoss | None:
        return common([_read(one) for one in ask(self.ranks, self._run, act, asked)])

    def _run(self, act: str, asked: Any) -> Any:
        """Begin, continue or close the run of this rank, and return its loss."""
        if act == _BEGIN:
            self._open = self.own.losses(*asked)
        assert self._open is not None
        if act == _CLOSE:
            self._open.close()
            return None
        seen = next(self._open, None)
        return None if seen is None else list(seen)


def common(found: Sequence[StepLoss | None]) -> StepLoss | None:
    """Return the loss of a step, which is the same on all ranks unless some have failed."""
    failures = [None if one is None else one.failure for one in found]
    rank = failed_rank(failures)
    if rank is None or len(set(failures)) == 1:
        return found[0]
    return StepLoss(math.nan, 0.0, f"rank {rank}: {failures[rank]}")


def _read(plain: list[Any] | None) -> StepLoss | None:
    """Read a loss from JSON, which has no NaN."""
    if plain is None:
        return None
    seen = StepLoss(*plain)
    return seen._replace(loss=math.nan) if seen.loss is None else seen


def _asked(
    process: SetupProcess,
    begin: Callable[Concatenate[Session, P], StepLoss | None],
    *args: P.args,
    **more: P.kwargs,
) -> Losses:
    """Ask a process for the losses of a run; a crash of it is the last one."""
    try:
        seen = process.call(ACT, begin, *args, **more)
        while seen is not None:
            yield seen
            seen = process.call(ACT, _next_loss)
    except GeneratorExit:
        # Weights are temporary for as long as a run is open.
        _close(process)
        raise
    except ChildCrashed as crash:
        failure = reason_of(crash)
    else:
        return
    process.restart()
    yield StepLoss(math.nan, 0.0, failure)


def _close(process: SetupProcess) -> None:
    """End the run that a process is in. It may have ended itself, after another rank has failed."""
    with suppress(ChildCrashed):
        process.call(ACT, _end_run)
        return
    process.restart()


@dataclass
class _OpenRun:
    """The short run that a session is in."""

    losses: Losses


def _begin_run(session: Session, task: LrTrialSpec, rate: float, seed: int) -> StepLoss | None:
    run = session.keep(_OpenRun(short_run(session.setup, task, rate, seed)))
    return next(run.losses, None)


def _begin_joint_run(
    session: Session, task: LrTrialSpec, rate: float, seed: int, meeting: Meeting
) -> StepLoss | None:
    run = session.keep(_OpenRun(joint_run(session, task, rate, seed, meeting)))
    return next(run.losses, None)


def _end_run(session: Session) -> None:
    run = session.find(_OpenRun)
    if run is not None:
        run.losses.close()


def _next_loss(session: Session) -> StepLoss | None:
    run = session.find(_OpenRun)
    return None if run is None else next(run.losses, None)
