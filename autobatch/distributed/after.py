"""The engine that sums a batch after its last backward pass: ``--grad-sync after``.

Every rank runs its micro-batches alone. Then one reduction carries the gradients, the figures of every rank
and its out-of-memory flag. If memory ran out anywhere, nothing is in flight: all ranks drop the batch and run
it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch

from autobatch.distributed.batch_sum import BatchSum
from autobatch.distributed.engine import OutOfMemory
from autobatch.distributed.group_engine import GroupEngine
from autobatch.distributed.row_gather import RowGather
from autobatch.step.loss_share import StepTotals
from autobatch.step.train_state import TrainState, precision_context
from autobatch.workload.contract import Collated, WholeBatchLoss
from autobatch.workload.order import GlobalBatch
from autobatch.workload.rng import preserved_random_state

Spare = Callable[[], tuple[Collated, int]]


class After(GroupEngine):
    """The engine that sums a batch at its end; see `autobatch.distributed.engine.Engine`."""

    name = "after"
    _rows: RowGather | None = None

    def attach(self, train_state: TrainState, spare: Spare) -> None:
        """Let the ranks exchange rows if the loss of a train state sees the whole batch.

        Args:
            train_state: what trains.
            spare: returns a micro-batch on the device with its samples, for ranks that have none.
        """
        loss = train_state.loss
        if isinstance(loss, WholeBatchLoss):

            def represent() -> Any:
                context = precision_context(train_state.device, train_state.precision)
                with preserved_random_state(), torch.no_grad(), context:
                    found = loss.represent(train_state.model, spare()[0])
                train_state.buffers.restore(keep=True)
                return found

            self._rows = RowGather(self.ranks, self._all_reduce, represent)

    def passing(
        self,
        train_state: TrainState,
        micro_batches: Iterable[tuple[Collated, int]],
        count: int,
        batch: GlobalBatch,
    ) -> Iterable[tuple[Collated, int]]:
        """See `Engine.passing`."""
        if self._rows is not None:
            self._rows.begin()
            train_state.rows = self._rows
        return micro_batches

    def combine(self, train_state: TrainState, outcome: StepTotals | OutOfMemory) -> StepTotals | OutOfMemory:
        """See `Engine.combine`."""
        if self._rows is not None:
            train_state.rows = None
            outcome = self._rows.ended(outcome)
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
