"""The engine of a loop: how ranks sum a batch, and how they agree on what happens to it.

A loop has one engine. `Engine` is that of one process, and hands everything back. Those of several ranks
make the sums over all ranks out of the sums of each, so that whatever follows (checks, clipping, the step,
counters) is the same on every rank: `Replicate` for whole models (`autobatch.distributed.replicate`), `Shard`
for models that ranks share (`autobatch.distributed.sharding.engine`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from autobatch.core.signals import StopRequest
from autobatch.distributed.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from autobatch.step.loss_share import StepTotals
    from autobatch.step.train_state import TrainState
    from autobatch.workload.contract import Collated
    from autobatch.workload.order import GlobalBatch


class OutOfMemory(NamedTuple):
    """An out-of-memory error before the optimizer step."""

    message: str
    is_fatal: bool = False
    """True if this process cannot continue after it."""
    is_fragmented: bool = False
    """True if the same micro-batches may fit: the allocator held enough free memory, but not in one piece."""
    is_intact: bool = True
    """True if the state is that before the batch."""
    size: int = 0
    """Samples of the micro-batch that ran; 0 if memory ran out on other ranks only."""
    smaller: int = 0
    """Largest micro-batch of this rank for the next try."""
    is_in_loss: bool = False
    """True if memory ran out in the loss over the whole batch of ``size``, which has no smaller part."""


class Engine:
    """The ranks of a loop: this process alone."""

    mesh: DeviceMesh | None = None
    """The ranks that share every parameter; None if each rank holds all of them."""

    def __init__(self) -> None:
        self.ranks = Ranks()

    @property
    def limits(self) -> list[int]:
        """The largest micro-batch of each rank, to be changed in place; empty for one process."""
        return []

    def shared_request(self, request: StopRequest) -> StopRequest:
        """Return the request to stop that all ranks obey at the same step."""
        return request

    def passing(
        self,
        train_state: TrainState,
        micro_batches: Iterable[tuple[Collated, int]],
        count: int,
        batch: GlobalBatch,
    ) -> Iterable[tuple[Collated, int]]:
        """Return the micro-batches of a batch as they are to run.

        Args:
            train_state: what trains.
            micro_batches: of this rank, with the samples of each.
            count: their number.
            batch: the samples of all ranks.
        """
        return micro_batches

    def combine(self, train_state: TrainState, outcome: StepTotals | OutOfMemory) -> StepTotals | OutOfMemory:
        """Sum gradients and totals over the ranks, unless one of them ran out of memory.

        Args:
            train_state: holds the gradients of this rank, and none if it ran out of memory.
            outcome: of this rank.

        Returns:
            The totals of the batch on every rank, or an `OutOfMemory` on every rank.
        """
        return outcome

    def settle(self, oom: OutOfMemory, *, may_repeat: bool) -> OutOfMemory:
        """Agree on an out-of-memory error: the same on every rank, but for ``smaller``.

        Args:
            oom: of this rank, after it has undone the batch.
            may_repeat: whether fragmentation alone leaves the micro-batches as they are.
        """
        return oom

    def lower(self, limit: int) -> None:
        """Lower the limit of all ranks of this rank's kind."""

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank the values that rank 0 has, in place."""

    def agree_on_request(self) -> None:
        """Let all ranks know of a request to stop that one of them has got."""

    def explained(self, error: Exception) -> Exception:
        """Return the error of a step; a `RankLost` in its place if it tells that another rank has ended."""
        return error
