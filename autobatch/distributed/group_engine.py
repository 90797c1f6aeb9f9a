"""The common part of the engines of several ranks: limits, requests to stop, and sums of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autobatch.core.signals import SharedRequest, StopRequest
from autobatch.distributed.engine import OutOfMemory
from autobatch.distributed.group import Group
from autobatch.distributed.messages import as_rank_lost
from autobatch.distributed.shares import RankSplit
from autobatch.step.train_state import TrainState
from autobatch.workload.contract import Collated, Loss
from autobatch.workload.order import GlobalBatch


class GroupEngine:
    """The part of an engine that does not depend on how gradients are summed; see `Engine`.

    Args:
        group: the ranks.
        split: has the limits of all ranks.
        kinds: the kind of each rank; those of one kind have one limit.
        tensors: the process group that reduces tensors; None for the default.
    """

    mesh: DeviceMesh | None = None
    """See `Engine.mesh`."""

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
        found = [OutOfMemory(*one) for one in self.ranks.gather(list(oom))]
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

    def passing(
        self,
        train_state: TrainState,
        micro_batches: Iterable[tuple[Collated, int]],
        count: int,
        batch: GlobalBatch,
    ) -> Iterable[tuple[Collated, int]]:
        """See `Engine.passing`."""
        return micro_batches

    def share(self, tensors: Iterable[Tensor]) -> None:
        """See `Engine.share`."""
        with as_rank_lost("share the tensors of the model"):
            for tensor in tensors:
                dist.broadcast(tensor.detach(), 0, group=self._tensors)

    def agree_on_request(self) -> None:
        """See `Engine.agree_on_request`."""
        self._request.agree(self.ranks.gather(self._request.own.signal_number or 0))

    def explained(self, error: Exception) -> Exception:
        """See `Engine.explained`. No collective runs within the code of the user."""
        return error

    def _lower(self, of_rank: int, limit: int) -> None:
        for rank, kind in enumerate(self._kinds):
            if kind == self._kinds[of_rank]:
                self.limits[rank] = min(self.limits[rank], limit)

    def _all_reduce(self, tensor: Tensor) -> None:
        with as_rank_lost("sum the gradients"):
            dist.all_reduce(tensor, group=self._tensors)

    def divide_alike(self, train_state: TrainState, found: Tensor | Loss, size: int) -> bool:
        """Let all ranks divide by one D, from the loss of a micro-batch on each; False if none has counts."""
        known = self.ranks.gather(float(found.count) / size if isinstance(found, Loss) else None)
        if all(one is None for one in known):
            return False
        train_state.items_per_sample = max(one or 0.0 for one in known) or 1.0
        return True
