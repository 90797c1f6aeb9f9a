"""The engine that sums a batch after its last backward pass: ``--grad-sync after``.

Every rank runs its micro-batches alone. Then one reduction carries the gradients, the figures of every rank
and its out-of-memory flag. If memory ran out anywhere, nothing is in flight: all ranks drop the batch and run
it again.

The gradients are sums of totals ÷ D, with one D for all ranks. D follows from the items per sample, on which
the ranks agree by one message in the first batch that counts any.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from autobatch.core.errors import InputError
from autobatch.distributed.engine import OutOfMemory
from autobatch.distributed.exchange import Exchange
from autobatch.distributed.group import Group
from autobatch.distributed.group_engine import Figures, GroupEngine, figures_of, sum_totals
from autobatch.distributed.shares import RankSplit
from autobatch.step.train_state import TrainState
from autobatch.step.train_step import StepTotals, divisor_of


class After(GroupEngine):
    """The engine that sums a batch after its last backward pass; see `autobatch.distributed.engine.Engine`.

    Args:
        group: the ranks.
        split: has the limits of all ranks.
        kinds: the kind of each rank; those of one kind have one limit.
        tensors: the process group that reduces tensors; None for the default.
    """

    name = "after"

    def __init__(
        self,
        group: Group,
        split: RankSplit,
        kinds: Sequence[int],
        tensors: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(group, split, kinds, tensors)
        self._scale_is_agreed = False
        self._exchange: Exchange | None = None

    def combine(self, train_state: TrainState, outcome: StepTotals | OutOfMemory) -> StepTotals | OutOfMemory:
        """See `Engine.combine`."""
        # From here on another rank may have stepped, so that nothing can be repeated.
        train_state.stepping = True
        if not self._scale_is_agreed:
            self._agree_on_scale(train_state, outcome)
        with self.ranks.meeting():
            rows = self._sum(train_state, figures_of(outcome, self._request.own.signal_number or 0))
        self._request.agree(int(row.signal) for row in rows)
        if any(row.failed for row in rows):
            # The batch runs again from the scale before it.
            train_state.stepping = self._scale_is_agreed = False
            return outcome if isinstance(outcome, OutOfMemory) else OutOfMemory("")
        assert isinstance(outcome, StepTotals)
        sum_totals(outcome, rows)
        return outcome

    def _sum(self, train_state: TrainState, figures: Figures) -> list[Figures]:
        """Sum the gradients over the ranks, and return the figures of each."""
        found = train_state.gradients.by_parameter()
        if any(gradient is not None and gradient.is_sparse for _, gradient in found):
            raise InputError(
                "the loss has a sparse gradient, which ranks cannot sum: use sparse=False in the embedding, "
                "or train in one process"
            )
        parameters = [parameter for parameter, _ in found]
        if self._exchange is None or not self._exchange.fits(parameters):
            assert train_state.exchange is not None
            self._exchange = Exchange(
                train_state.exchange, parameters, world=self.ranks.world, columns=len(figures)
            )
        rows = self._exchange.run(figures, self.ranks.rank, train_state.gradients, self._all_reduce)
        return [Figures(*row) for row in rows]

    def _agree_on_scale(self, train_state: TrainState, outcome: StepTotals | OutOfMemory) -> None:
        """Bring the sums of all ranks to one D, in the first batches of a run."""
        totals = outcome if isinstance(outcome, StepTotals) and outcome.sizes else None
        kind = None if totals is None else "mean" if totals.count is None else "Loss"
        found = self.ranks.gather([kind, train_state.items_per_sample])
        kinds = {one for one, _ in found if one is not None}
        if len(kinds) > 1:
            raise InputError(
                "the workload's loss returned a Loss on one rank and a tensor on another: return one kind"
            )
        items = max((one for _, one in found if one is not None), default=None)
        self._scale_is_agreed = items is not None or kinds == {"mean"}
        train_state.items_per_sample = items
        if totals is None or kind != "Loss":
            return
        divisor = divisor_of(items, totals.samples)
        factor = totals.divisor / divisor
        if factor != 1.0:
            gradients = [one for own in train_state.gradients.by_optimizer() for one in own]
            if gradients:
                torch._foreach_mul_(gradients, factor)
            totals.loss = totals.loss * factor
            totals.first_norm = None if totals.first_norm is None else totals.first_norm * factor
        totals.divisor = divisor
