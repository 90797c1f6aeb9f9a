"""Trials of a study, in the process that holds the setup, and on all ranks of a run together.

Rank 0 asks. Every rank runs the configuration at its share of the batch, at the same time as the others,
whose loader workers use the same cores. The step takes as long as on the slowest rank, and a configuration
that fails on one rank fails.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from autobatch.core.knobs import Configuration
from autobatch.distributed.ranks import Ranks
from autobatch.setup.child import ChildCrashed, SetupProcess
from autobatch.tuning.configuration import RUNS, Key, Measurement, infeasible, key_of
from autobatch.tuning.lead import answer, ask, failed_rank, follow
from autobatch.tuning.trial import confirm_trial, measure_trial
from autobatch.tuning.trial_limit import TrialSpec


class Trials(Protocol):
    """A source of measurements."""

    def measure(self, values: Configuration) -> Measurement:
        """Run a trial."""

    def confirm_fits(self, values: Configuration) -> str | None:
        """Run a configuration within the enforced budget. Return why it does not fit, None if it fits."""


@dataclass(frozen=True)
class OwnTrials:
    """Trials in the process that holds the setup. A configuration that crashes a child is infeasible."""

    process: SetupProcess
    task: TrialSpec

    def measure(self, values: Configuration) -> Measurement:
        """See `Trials.measure`."""
        try:
            return self.process.call("a trial", measure_trial, self.task, dict(values))
        except ChildCrashed as crash:
            failure = str(crash)
        self.process.restart()
        return infeasible(RUNS, failure)

    def confirm_fits(self, values: Configuration) -> str | None:
        """See `Trials.confirm_fits`."""
        try:
            return self.process.call("the check of the best trial", confirm_trial, self.task, dict(values))
        except ChildCrashed as crash:
            failure = str(crash)
        self.process.restart()
        return failure


@dataclass(frozen=True)
class SharedTrials:
    """Trials that all ranks run together: rank 0 calls `measure` and `confirm_fits`, the others `follow`.

    Args:
        own: the trials of this rank.
        ranks: the ranks.
        shares: samples of a batch that each rank takes.
    """

    own: Trials
    ranks: Ranks
    shares: Sequence[int]
    _micro_batches: dict[Key, int] = field(default_factory=dict)

    def measure(self, values: Configuration) -> Measurement:
        """See `Trials.measure`."""
        return slowest([_read(one) for one in self._ask("measure", values)], self.shares)

    def confirm_fits(self, values: Configuration) -> str | None:
        """See `Trials.confirm_fits`."""
        return next((reason for reason in self._ask("confirm", values) if reason is not None), None)

    def end(self, found: Any) -> None:
        """Tell the other ranks the answer of the search, which JSON can hold."""
        answer(self.ranks, found)

    def follow(self) -> Any:
        """Run what rank 0 asks for until the search ends, and return its answer."""
        return follow(self.ranks, self._run)

    def micro_batch(self, values: Configuration) -> int | None:
        """Return the micro-batch of a configuration on this rank; None if it did not run here."""
        return self._micro_batches.get(key_of(values))

    def _ask(self, act: str, values: Configuration) -> list[Any]:
        return ask(self.ranks, self._run, act, dict(values))

    def _run(self, act: str, values: Configuration) -> Any:
        """Run a configuration on this rank."""
        if act == "confirm":
            return self.own.confirm_fits(values)
        found = self.own.measure(values)
        if found.feasible:
            self._micro_batches[key_of(values)] = found.micro_batch
        return list(found)


def _read(plain: list[Any]) -> Measurement:
    """Read a measurement from JSON, which has no infinity."""
    found = Measurement(*plain)
    constraints = {name: math.inf if one is None else one for name, one in found.constraints.items()}
    return found._replace(constraints=constraints)


def slowest(found: Sequence[Measurement], shares: Sequence[int]) -> Measurement:
    """Return the measurement of a step that ends when the slowest rank has ended.

    Args:
        found: of each rank, at its share of a batch.
        shares: samples of a batch that each rank takes.
    """
    failed = failed_rank([None if one.feasible else str(one.failure) for one in found])
    if failed is not None:
        return found[failed]._replace(failure=f"rank {failed}: {found[failed].failure}")
    seconds = max(share / one.samples_per_s for one, share in zip(found, shares, strict=True) if share)
    return found[0]._replace(samples_per_s=sum(shares) / seconds)
