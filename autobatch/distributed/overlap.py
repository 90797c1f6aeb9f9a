"""The engine on DistributedDataParallel: the last backward pass hides the reduction.

DDP wraps the loss and not the model, because a loss may call any method of a model, and DDP only sees the
calls of its own forward. All micro-batches but the last run under ``no_sync``. Gradients are summed by a hook
of DDP, live in its buckets, and are zeroed in place.

Between the forward and the backward pass of the last micro-batch, the ranks vote whether memory ran out. The
votes are on their way while the backward pass begins, and are counted before the first bucket is sent. A
batch that failed until then is not summed, and runs again on all ranks, with DDP built anew, because a
reduction was prepared. From the vote on, nothing can be repeated that fails. A rank without samples runs one
of weight 0, since DDP needs a backward pass on every rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from autobatch.distributed.engine import OutOfMemory
from autobatch.distributed.figures import Figures, figures_of, read_rows, sum_totals, table_size, write_row
from autobatch.distributed.group_engine import GroupEngine
from autobatch.distributed.messages import as_rank_lost
from autobatch.step.loss_share import StepTotals
from autobatch.step.train_state import TrainState, precision_context
from autobatch.workload.contract import Collated, Loss
from autobatch.workload.order import GlobalBatch
from autobatch.workload.rng import capture_random_state, preserved_random_state, restore_random_state

_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)
"""Name of the option that copies buffers to all ranks in every forward pass; torch 2.13 has renamed it."""
LossFunction = Callable[[nn.Module, Collated], Tensor | Loss]


class _LossModule(nn.Module):
    """The loss as the forward pass of a module."""

    def __init__(self, model: nn.Module, loss: LossFunction) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, batch: Collated) -> Any:
        return self.loss(self.model, batch)


class Overlap(GroupEngine):
    """The engine on DistributedDataParallel; see `autobatch.distributed.engine.Engine`."""

    name = "overlap"

    def attach(self, train_state: TrainState, spare: Callable[[], tuple[Collated, int]]) -> None:
        """Wrap the loss of a train state.

        Args:
            train_state: its loss runs through DDP from here on, and its gradients keep their memory.
            spare: returns a micro-batch on the device with its samples, for ranks that have none.
        """
        self._module = _LossModule(train_state.model, train_state.loss)
        self._spare = spare
        self._peer_failed = False
        self._votes: Callable[[], bool] | None = None
        self._has_no_counts = False
        self._is_passing = False
        self._is_spare = False
        self._table = torch.zeros(
            table_size(self.ranks.world, len(Figures._fields), torch.float64),
            dtype=torch.float64,
            device=train_state.device,
        )
        # DDP has buckets of its own.
        train_state.exchange = None
        train_state.gradients.keeps_memory = True
        train_state.loss = self._loss_of(train_state)
        train_state.buffers.take()
        self._wrap(train_state)

    def passing(
        self,
        train_state: TrainState,
        micro_batches: Iterable[tuple[Collated, int]],
        count: int,
        batch: GlobalBatch,
    ) -> Iterator[tuple[Collated, int]]:
        """See `Engine.passing`."""
        self._peer_failed = False
        self._agree_on_scale(train_state)
        self._is_spare = count == 0
        if count == 0:
            before = capture_random_state()
            self._begin(is_last=True)
            yield self._spare()[0], 0
            restore_random_state(before)
            train_state.buffers.restore(keep=True)
            return
        fetched = iter(micro_batches)
        for number in range(1, count + 1):
            coming = [next(fetched)]
            self._begin(is_last=number == count)
            # This frame holds no micro-batch while it trains.
            yield coming.pop()

    def combine(self, train_state: TrainState, outcome: StepTotals | OutOfMemory) -> StepTotals | OutOfMemory:
        """See `Engine.combine`. The gradients are summed already."""
        self._is_passing = False
        self._count_votes()
        if self._peer_failed or isinstance(outcome, OutOfMemory):
            return self._give_up(train_state, outcome)
        write_row(self._table, figures_of(outcome, self._request.own.signal_number or 0), self.ranks.rank)
        with self.ranks.meeting():
            self._all_reduce(self._table)
        columns = len(Figures._fields)
        rows = [Figures(*row) for row in read_rows(self._table.tolist(), columns, self._table.dtype)]
        self._request.agree(int(row.signal) for row in rows)
        sum_totals(outcome, rows)
        return outcome

    def _agree_on_scale(self, train_state: TrainState) -> None:
        """Let all ranks divide by one D, before any gradient is in flight; once per run."""
        if train_state.items_per_sample is not None or self._has_no_counts:
            return
        context = precision_context(train_state.device, train_state.precision)
        with preserved_random_state(), torch.no_grad(), context:
            batch, size = self._spare()
            found = self._module.loss(train_state.model, batch)
        train_state.buffers.restore(keep=True)
        self._has_no_counts = not self.divide_alike(train_state, found, size)

    def _give_up(self, train_state: TrainState, outcome: StepTotals | OutOfMemory) -> OutOfMemory:
        """Tell the other ranks, unless they know, and rebuild DDP, which has prepared a reduction."""
        has_failed_alone = not self._peer_failed
        if has_failed_alone:
            self._vote(failed=True)
            self._count_votes()
        train_state.buffers.restore(keep=True)
        self._peer_failed = False
        # A rank that fails here cannot tell the others.
        train_state.stepping = True
        self._wrap(train_state)
        train_state.stepping = False
        return outcome if isinstance(outcome, OutOfMemory) and has_failed_alone else OutOfMemory("")

    def _loss_of(self, train_state: TrainState) -> LossFunction:
        def loss(model: nn.Module, batch: Collated) -> Tensor | Loss:
            if not self._is_passing:  # a check on this rank alone
                return self._module.loss(model, batch)
            found: Tensor | Loss = self._ddp(batch)
            if torch.is_grad_enabled() and self._ddp.require_backward_grad_sync:
                # From here on gradients may be in flight, so that nothing can be repeated.
                train_state.stepping = True
                self._vote(failed=False)
            return _without_weight(found) if self._is_spare else found

        return loss

    def _begin(self, *, is_last: bool) -> None:
        """Let the loss run through DDP, and reduce in the last backward pass only.

        This is what ``no_sync`` does. Its end would wait for the collection of a generator that an error has
        left, and come in the middle of a later batch.
        """
        self._is_passing = True
        # A module takes long to set an attribute.
        if self._ddp.require_backward_grad_sync != is_last:
            self._ddp.require_backward_grad_sync = is_last

    def _vote(self, *, failed: bool) -> None:
        """Tell all ranks whether memory ran out here."""
        self._votes = self.ranks.vote(failed)

    def _count_votes(self) -> None:
        """Wait for the votes of all ranks, if they have not been counted yet."""
        votes, self._votes = self._votes, None
        if votes is not None:
            with self.ranks.meeting():
                self._peer_failed = votes()

    def _summed(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Sum a bucket over the ranks, unless memory ran out on one of them."""
        self._count_votes()
        tensor = bucket.buffer()
        if self._peer_failed:
            unsent: torch.futures.Future[Tensor] = torch.futures.Future(
                devices=None if tensor.is_cpu else [tensor.device]
            )
            unsent.set_result(tensor)
            return unsent
        with as_rank_lost("sum the gradients"):
            work = dist.all_reduce(tensor, group=self._tensors, async_op=True)
        sums: torch.futures.Future[Tensor] = work.get_future().then(lambda found: found.value()[0])
        return sums

    def _wrap(self, train_state: TrainState) -> None:
        """Build DDP, and bring it to where every further batch finds it; all ranks call it together."""
        for parameter in self._module.parameters():
            parameter.grad = None
        with as_rank_lost("set up DDP"):
            self._ddp = DistributedDataParallel(
                self._module,
                process_group=self._tensors,
                gradient_as_bucket_view=True,
                init_sync=False,
                **{_SYNC_BUFFERS: False},  # type: ignore[arg-type]
            )
            # DDP compares the annotations of a hook, which may not be text.
            self._ddp.register_comm_hook(None, lambda _, bucket: self._summed(bucket))
            self._prime(train_state)

    def _prime(self, train_state: TrainState) -> None:
        """Run two micro-batches of weight 0, which leave gradients of 0 in the buckets.

        The second forward pass of DDP orders its buckets anew, with a message that must not meet a vote.
        """
        with preserved_random_state():
            for _ in range(2):
                with precision_context(train_state.device, train_state.precision):
                    found = _without_weight(self._ddp(self._spare()[0]))
                torch.autograd.backward(found.total if isinstance(found, Loss) else found)
        train_state.gradients.clear()
        train_state.buffers.restore(keep=True)


def _without_weight(found: Tensor | Loss) -> Tensor | Loss:
    """Return a loss that counts nothing and has gradients of 0."""
    return Loss(found.total * 0.0, found.count * 0.0) if isinstance(found, Loss) else found * 0.0
