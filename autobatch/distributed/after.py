"""The engine that sums a batch after its last backward pass: ``--grad-sync after``.

Every rank runs its micro-batches alone. Then one reduction carries the gradients, the figures of every rank
and its out-of-memory flag. If memory ran out anywhere, nothing is in flight: all ranks drop the batch and run
it again.

The gradients are sums of totals ÷ D, with one D for all ranks. D follows from the items per sample, on which
the ranks agree by one message in the first batch that counts any.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from autobatch.core.errors import InputError
from autobatch.core.signals import SharedRequest, StopRequest
from autobatch.distributed.engine import OutOfMemory
from autobatch.distributed.exchange import Exchange
from autobatch.distributed.group import Group, as_rank_lost
from autobatch.distributed.shares import RankSplit
from autobatch.step.train_state import TrainState
from autobatch.step.train_step import StepTotals, divisor_of


class Figures(NamedTuple):
    """The numbers that a rank sends with a batch."""

    failed: float
    """1 if memory ran out."""
    signal: float
    """Number of a signal that asks to stop, or 0."""
    has_count: float
    """1 if the loss is a `Loss`."""
    divisor: float
    """D; 0 if no micro-batch ran."""
    loss: float | Tensor
    items: float | Tensor
    """Σ of the counts."""
    has_first_norm: float
    first_norm: float | Tensor
    first_count: float | Tensor


class After:
    """The engine that sums a batch after its last backward pass; see `autobatch.distributed.engine.Engine`.

    Args:
        group: the ranks.
        split: has the limits of all ranks.
        kinds: the kind of each rank; those of one kind have one limit.
        tensors: the process group that reduces tensors; None for the default.
    """

    def __init__(
        self,
        group: Group,
        split: RankSplit,
        kinds: Sequence[int],
        tensors: dist.ProcessGroup | None = None,
    ) -> None:
        self.ranks = group
        self._split = split
        self._kinds = kinds
        self._tensors = tensors
        self._request = SharedRequest(StopRequest())
        self._scale_is_agreed = False
        self._exchange: Exchange | None = None

    @property
    def limits(self) -> list[int]:
        """See `Engine.limits`."""
        return self._split.limits

    def shared_request(self, request: StopRequest) -> StopRequest:
        """See `Engine.shared_request`. A signal to any rank stops all of them after the next step."""
        self._request = SharedRequest(request)
        return self._request

    def combine(self, train_state: TrainState, outcome: StepTotals | OutOfMemory) -> StepTotals | OutOfMemory:
        """See `Engine.combine`."""
        # From here on another rank may have stepped, so that nothing can be repeated.
        train_state.stepping = True
        if not self._scale_is_agreed:
            self._agree_on_scale(train_state, outcome)
        rows = self._sum(train_state, _figures(outcome, self._request.own.signal_number or 0))
        self._request.agree(int(row.signal) for row in rows)
        if any(row.failed for row in rows):
            # The batch runs again from the scale before it.
            train_state.stepping = self._scale_is_agreed = False
            return outcome if isinstance(outcome, OutOfMemory) else OutOfMemory("")
        assert isinstance(outcome, StepTotals)
        _sum_totals(outcome, rows)
        return outcome

    def settle(self, oom: OutOfMemory, *, may_repeat: bool) -> OutOfMemory:
        """See `Engine.settle`. The limit of every kind that failed is lowered."""
        found = [OutOfMemory(*one) for one in self.ranks.gather(list(oom))]
        failed = [rank for rank, one in enumerate(found) if one.size]
        worst = min(failed, key=lambda rank: (found[rank].size, rank))
        common = OutOfMemory(
            message=f"rank {worst}: {found[worst].message}",
            is_fatal=any(one.is_fatal for one in found),
            is_fragmented=all(found[rank].is_fragmented for rank in failed),
            is_intact=all(one.is_intact for one in found),
            size=found[worst].size,
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
        with as_rank_lost("share the tensors of the model"):
            for tensor in tensors:
                dist.broadcast(tensor.detach(), 0, group=self._tensors)

    def agree_on_request(self) -> None:
        """See `Engine.agree_on_request`."""
        self._request.agree(self.ranks.gather(self._request.own.signal_number or 0))

    def _lower(self, of_rank: int, limit: int) -> None:
        for rank, kind in enumerate(self._kinds):
            if kind == self._kinds[of_rank]:
                self.limits[rank] = min(self.limits[rank], limit)

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

    def _all_reduce(self, tensor: Tensor) -> None:
        with as_rank_lost("sum the gradients"):
            dist.all_reduce(tensor, group=self._tensors)

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


def _figures(outcome: StepTotals | OutOfMemory, signal: int) -> Figures:
    if isinstance(outcome, OutOfMemory):
        return Figures(1, signal, 0, 0, 0, 0, 0, 0, 0)
    return Figures(
        failed=0,
        signal=signal,
        has_count=outcome.count is not None,
        divisor=outcome.divisor if outcome.sizes else 0,
        loss=outcome.loss,
        items=0.0 if outcome.count is None else outcome.count,
        has_first_norm=outcome.first_norm is not None,
        first_norm=0.0 if outcome.first_norm is None else outcome.first_norm,
        first_count=outcome.first_count,
    )


def _sum_totals(totals: StepTotals, rows: list[Figures]) -> None:
    """Replace the sums of one rank by those of all; the first micro-batch is that of rank 0."""
    first = rows[0]
    totals.loss = sum(row.loss for row in rows)
    totals.count = sum(row.items for row in rows) if any(row.has_count for row in rows) else None
    totals.divisor = max(row.divisor for row in rows)
    totals.first_norm = torch.tensor(first.first_norm, dtype=torch.float64) if first.has_first_norm else None
    totals.first_count = first.first_count
