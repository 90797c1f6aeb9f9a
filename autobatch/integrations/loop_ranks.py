"""The ranks of a training loop of the user's own: their parts of a batch, and the sum of its gradients."""

from __future__ import annotations

from collections.abc import Mapping

from autobatch.core.errors import InputError
from autobatch.core.records import Plan
from autobatch.distributed.group import Group, join_loop
from autobatch.distributed.reduce import Reduction
from autobatch.planning import shares
from autobatch.step.gradients import exchange_buffer, norm_of
from autobatch.step.loss import StepTotals
from autobatch.step.train_state import TrainState


class LoopRanks:
    """The ranks of a loop, each of which trains a part of every batch.

    Args:
        group: the processes.
        limit: the largest micro-batch of this rank.
    """

    def __init__(self, group: Group, limit: int) -> None:
        self._group = group
        self.limit = limit
        """The largest micro-batch of this rank, in samples."""
        self._limits = group.gather(limit)
        self._sum = Reduction(group)
        self._is_checked = False

    def part(self, samples: int) -> tuple[int, int]:
        """Return the place of this rank's first sample in a batch of this size, and its number of samples."""
        of_ranks = shares(samples, self._limits)
        return sum(of_ranks[: self._group.rank]), of_ranks[self._group.rank]

    def combine(self, train_state: TrainState, totals: StepTotals) -> None:
        """Sum the gradients and the totals of a batch over the ranks in place; all of them call it.

        Raises:
            InputError: the weights of the ranks differ before the first step, or their gradients cannot be
                summed.
        """
        if not self._is_checked:
            self._check_weights(train_state)
            self._is_checked = True
        if train_state.exchange is None:
            parameters = train_state.parameters
            train_state.exchange = exchange_buffer(parameters, parameters[0].device, world=self._group.world)
        if not totals.sizes:
            train_state.gradients.clear()
        self._sum.run(train_state, totals)

    def _check_weights(self, train_state: TrainState) -> None:
        own = [parameter.detach() for parameter in train_state.parameters]
        norm = float(norm_of([one.double() for one in own])) if own else 0.0
        found = self._group.gather((len(own), sum(one.numel() for one in own), norm))
        for rank, other in enumerate(found):
            if other != found[0]:
                raise InputError(
                    f"the weights of the ranks differ before the first step (norm {found[0][2]:g} on rank 0, "
                    f"{other[2]:g} on rank {rank}): seed all ranks alike before the model is built, or load "
                    "the same weights"
                )


def join_ranks(plan: Plan, facts: Mapping[str, object]) -> LoopRanks:
    """Join the ranks of a loop; all of them call it.

    Args:
        plan: is for as many ranks as a launcher has started.
        facts: what must be equal on all ranks, by its name for the user.

    Raises:
        InputError: the ranks differ.
    """
    group = join_loop()
    group.check_equal({"the target batch": plan.target_batch, **facts})
    limit = plan.ranks[group.rank].limit if plan.ranks else plan.micro_batch
    return LoopRanks(group, limit)
