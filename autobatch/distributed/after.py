"""The engine that sums a batch after its last backward pass: ``--grad-sync after``.

Every rank runs its micro-batches alone. Then one reduction carries the gradients, the figures of every rank
and its out-of-memory flag. If memory ran out anywhere, nothing is in flight: all ranks drop the batch and run
it again.
"""

from __future__ import annotations

from functools import cached_property

from autobatch.distributed.batch_sum import BatchSum
from autobatch.distributed.engine import OutOfMemory
from autobatch.distributed.group_engine import GroupEngine
from autobatch.step.loss_share import StepTotals
from autobatch.step.train_state import TrainState


class After(GroupEngine):
    """The engine that sums a batch at its end; see `autobatch.distributed.engine.Engine`."""

    name = "after"

    def combine(self, train_state: TrainState, outcome: StepTotals | OutOfMemory) -> StepTotals | OutOfMemory:
        """See `Engine.combine`."""
        # From here on another rank may have stepped, so that nothing can be repeated.
        train_state.stepping = True
        rows = self._sum.run(train_state, outcome, self._request.own.signal_number or 0)
        self._request.agree(int(row.signal) for row in rows)
        if any(row.failed for row in rows):
            train_state.stepping = False
            return outcome if isinstance(outcome, OutOfMemory) else OutOfMemory("")
        return outcome

    @cached_property
    def _sum(self) -> BatchSum:
        return BatchSum(self.ranks, self._all_reduce)
