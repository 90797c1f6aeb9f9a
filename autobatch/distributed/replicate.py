"""The engines of several ranks: what all of them have in common, and the engine of whole models.

With a whole model, every rank runs its micro-batches alone, and `autobatch.distributed.reduce` sums the batch
after them. If memory runs out anywhere until then, nothing is in flight: all ranks drop the batch, and run it
again.

A loss that sees all samples (`WholeBatchLoss`) needs the rows of all ranks before the backward pass. Each
rank represents its own samples and writes their rows into a table that is zero elsewhere. The sum of all
tables has every row, bit for bit. Then every rank computes the loss of the whole batch, and runs the backward
pass of its own samples from the gradients of their rows: the sum over the ranks is the gradient of one pass.
Before the rows travel, the ranks vote whether memory ran out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autobatch.core.signals import SharedRequest, StopRequest
from autobatch.distributed.engine import Engine, OutOfMemory
from autobatch.distributed.group import Group
from autobatch.distributed.reduce import Reduction
from autobatch.step.loss_share import StepTotals
from autobatch.step.train_state import TrainState, precision_context
from autobatch.step.whole_batch import Rows
from autobatch.workload.contract import Collated, WholeBatchLoss
from autobatch.workload.nested import tensors_of
from autobatch.workload.order import GlobalBatch
from autobatch.workload.rng import preserved_random_state
from autobatch.workload.split import Split

Spare = Callable[[], tuple[Collated, int]]
"""Returns a micro-batch on the device with its samples, for a rank that has none."""


class GroupEngine(Engine):
    """The part of an engine that does not depend on how gradients are summed.

    Args:
        group: the ranks.
        split: has the limits of all ranks.
        kinds: the kind of each rank; those of one kind have one limit.
    """

    def __init__(self, group: Group, split: Split, kinds: Sequence[int]) -> None:
        self.ranks: Group = group
        self._split = split
        self._kinds = kinds
        self._request = SharedRequest(StopRequest())

    @property
    def limits(self) -> list[int]:
        """See `Engine.limits`."""
        return self._split.limits

    def shared_request(self, request: StopRequest) -> StopRequest:
        """See `Engine.shared_request`. A signal to any rank stops all of them after the next step."""
        self._request = SharedRequest(request)
        return self._request

    def settle(self, oom: OutOfMemory, *, may_repeat: bool) -> OutOfMemory:
        """See `Engine.settle`. The limit of every kind that failed is lowered."""
        found = self.ranks.gather(oom)
        failed = [rank for rank, one in enumerate(found) if one.size]
        worst = min(failed, key=lambda rank: (found[rank].is_in_loss, found[rank].size, rank))
        common = OutOfMemory(
            message=f"rank {worst}: {found[worst].message}",
            is_fatal=any(one.is_fatal for one in found),
            is_fragmented=all(found[rank].is_fragmented for rank in failed),
            is_intact=all(one.is_intact for one in found),
            size=found[worst].size,
            is_in_loss=found[worst].is_in_loss,
        )
        if not (may_repeat and common.is_fragmented and common.is_intact):
            for rank in failed:
                self._lower(rank, found[rank].smaller)
        return common._replace(smaller=self.limits[self.ranks.rank])

    def lower(self, limit: int) -> None:
        """See `Engine.lower`."""
        self._lower(self.ranks.rank, limit)

    def share(self, tensors: Iterable[Tensor]) -> None:
        """See `Engine.share`."""
        with self.ranks.waiting("share the tensors of the model"):
            for tensor in tensors:
                dist.broadcast(tensor.detach(), 0, group=self.ranks.tensor_group(tensor.device))

    def agree_on_request(self) -> None:
        """See `Engine.agree_on_request`."""
        self._request.agree(self.ranks.gather(self._request.own.signal_number or 0))

    def _lower(self, of_rank: int, limit: int) -> None:
        for rank, kind in enumerate(self._kinds):
            if kind == self._kinds[of_rank]:
                self.limits[rank] = min(self.limits[rank], limit)


class Replicate(GroupEngine):
    """The engine of ranks that have a whole model each.

    Args:
        group: the ranks.
        split: has the limits of all ranks.
        kinds: the kind of each rank.
        train_state: what trains.
        spare: for the form of the rows, on a rank without samples.
    """

    def __init__(
        self, group: Group, split: Split, kinds: Sequence[int], train_state: TrainState, spare: Spare
    ) -> None:
        super().__init__(group, split, kinds)
        self._reduction = Reduction(group)
        self._rows = None
        loss = train_state.loss
        if isinstance(loss, WholeBatchLoss):

            def represent() -> Any:
                context = precision_context(train_state.device, train_state.precision)
                with preserved_random_state(), torch.no_grad(), context:
                    found = loss.represent(train_state.model, spare()[0])
                train_state.buffers.restore(keep=True)
                return found

            self._rows = RowGather(group, represent)

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
        rows = self._reduction.run(train_state, outcome, self._request.own.signal_number or 0)
        self._request.agree(int(row.signal) for row in rows)
        if any(row.failed for row in rows):
            train_state.stepping = False
            return outcome if isinstance(outcome, OutOfMemory) else OutOfMemory("")
        return outcome


class PeerOutOfMemory(torch.OutOfMemoryError):
    """Memory ran out on another rank."""


class RowGather:
    """The exchange of rows among ranks; see `autobatch.step.whole_batch.RowExchange`.

    Args:
        group: the ranks.
        represent: returns what the rows of some samples look like, for a rank that has none.
    """

    def __init__(self, group: Group, represent: Callable[[], Any]) -> None:
        self._group = group
        self._represent = represent
        self._has_voted = True
        self._peer_failed = False

    @property
    def counts_loss(self) -> bool:
        """See `RowExchange.counts_loss`."""
        return self._group.rank == 0

    def begin(self) -> None:
        """Begin a batch."""
        self._has_voted = self._peer_failed = False

    def gather(self, rows: Rows) -> None:
        """See `RowExchange.gather`.

        Raises:
            PeerOutOfMemory: memory ran out on another rank before.
        """
        if rows.collated is None:
            rows.begin(self._represent())
        self._vote(failed=False)
        # As bytes, because zeros leave them as they are, whatever the type.
        wholes = [whole.view(-1).view(torch.uint8) for whole in tensors_of(rows.collated)]
        with self._group.waiting("exchange the rows of a batch", is_step=True):
            for wait in [self._group.start_sum(one) for one in wholes]:
                wait()

    def ended(self, outcome: StepTotals | OutOfMemory) -> StepTotals | OutOfMemory:
        """Return the outcome of this rank, after it has told the others if they wait for its rows."""
        if isinstance(outcome, OutOfMemory) and not self._has_voted:
            self._vote(failed=True)
        return OutOfMemory("") if self._peer_failed else outcome

    def _vote(self, *, failed: bool) -> None:
        self._has_voted = True
        is_failed = self._group.agree(failed, is_step=True)
        if is_failed and not failed:
            self._peer_failed = True
            raise PeerOutOfMemory("memory ran out on another rank")
