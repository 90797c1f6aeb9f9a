"""The engine of a loop: how ranks sum a batch, and how they agree on what happens to it.

A loop has one engine. `Engine` serves one process, and changes nothing. `Replicate` serves ranks with whole
models, and `Shard` ranks that share one. They sum over all ranks, so that everything after the sum (checks,
clipping, the step, counters) is the same on every rank.

With a whole model, every rank runs its micro-batches alone, and `autobatch.distributed.reduce` sums the batch
after them. If memory runs out on any rank before that, no message is on its way: all ranks drop the batch,
and run it again.

A loss of several terms needs what each of them counts on all ranks before the backward pass. The ranks
exchange their counts in one message, and one that ran out of memory sends none.

A loss that sees all samples (`WholeBatchLoss`) needs the representations of all ranks before the backward
pass. Each rank writes those of its own samples into a table that is zero elsewhere. The ranks vote whether
memory ran out, and then sum the tables: the sum has all representations, bit for bit. Every rank computes the
loss of the whole batch, and runs the backward pass of its own samples from the gradients of their
representations. The sum over the ranks is the gradient of one pass.

With a sharded model, FSDP2 gathers parameters and reduces gradients in every micro-batch, so all ranks run as
many of them: a rank with fewer runs some of weight 0, in a pass that counts too. Gradients are summed as they
are, and each rank has the sums of its shards. One reduction then carries the numbers of every rank and Σg² of
its shards. If memory runs out on one rank, the others wait for it in the middle of a pass, and nothing can be
repeated: all ranks leave, and start again in smaller micro-batches.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from autobatch.core.errors import InputError
from autobatch.core.signals import SharedRequest, StopRequest
from autobatch.distributed.group import Group, is_of_collective, rank_lost
from autobatch.distributed.ranks import Ranks
from autobatch.distributed.reduce import (
    RankNumbers,
    Reduction,
    num_cells,
    numbers_of,
    read_numbers,
    sum_totals,
    write_numbers,
)
from autobatch.step.gradients import norm_of
from autobatch.step.loss import Form, StepTotals
from autobatch.step.restore import BufferSnapshot
from autobatch.step.train_state import TrainState, precision_context
from autobatch.step.whole_batch import Rows
from autobatch.workload.contract import Collated, Loss, WholeBatchLoss
from autobatch.workload.nested import Passes, tensors_of
from autobatch.workload.rng import capture_random_state, preserved_random_state, restore_random_state

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from autobatch.distributed.sharding.model import ShardedModel

MicroBatches = Iterable[tuple[Collated, int]]
"""Micro-batches on the device, each with its number of samples."""
Filler = Callable[[], tuple[Collated, int]]
"""Returns a micro-batch on the device with its samples, for a rank that has none."""


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
    """Largest micro-batch for the next try."""
    is_in_loss: bool = False
    """True if memory ran out in the loss over the whole batch of ``size``, which has no smaller part."""


class Engine:
    """The ranks of a loop: this process alone."""

    mesh: DeviceMesh | None = None
    """The ranks of a sharded model; None if each rank holds a whole one."""

    def __init__(self) -> None:
        self.ranks = Ranks()

    def shared_request(self, request: StopRequest) -> StopRequest:
        """Return the request to stop that all ranks obey at the same step."""
        return request

    def begin_step(
        self, train_state: TrainState, micro_batches: MicroBatches, count: int, rounds: int
    ) -> MicroBatches:
        """Return the micro-batches of a batch as they are to run.

        Args:
            train_state: what trains.
            micro_batches: of this rank.
            count: their number.
            rounds: the most micro-batches that any rank runs.
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

    def agree_on_oom(self, oom: OutOfMemory) -> OutOfMemory:
        """Return the out-of-memory error of all ranks, the same on each of them.

        Args:
            oom: of this rank, after it has undone the batch.
        """
        return oom

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank the values that rank 0 has, in place."""

    def agree_on_request(self) -> None:
        """Let all ranks know of a request to stop that one of them has got."""

    def explain(self, error: Exception) -> Exception:
        """Return the error of a step; a `RankLost` in its place if it tells that another rank has ended."""
        return error


class GroupEngine(Engine):
    """The part of an engine that does not depend on how gradients are summed.

    Args:
        group: the ranks.
    """

    def __init__(self, group: Group) -> None:
        self.ranks: Group = group
        self._request = SharedRequest(StopRequest())

    def shared_request(self, request: StopRequest) -> StopRequest:
        """See `Engine.shared_request`. A signal to any rank stops all of them after the next step."""
        self._request = SharedRequest(request)
        return self._request

    def agree_on_oom(self, oom: OutOfMemory) -> OutOfMemory:
        """See `Engine.agree_on_oom`."""
        found = self.ranks.gather(oom)
        failed = [rank for rank, error in enumerate(found) if error.size]
        worst = min(failed, key=lambda rank: (found[rank].is_in_loss, found[rank].size, rank))
        return OutOfMemory(
            message=f"rank {worst}: {found[worst].message}",
            is_fatal=any(error.is_fatal for error in found),
            is_fragmented=all(found[rank].is_fragmented for rank in failed),
            is_intact=all(error.is_intact for error in found),
            size=found[worst].size,
            smaller=min(found[rank].smaller for rank in failed),
            is_in_loss=found[worst].is_in_loss,
        )

    def sum_terms(self, totals: StepTotals, of_ranks: Sequence[RankNumbers]) -> None:
        """Replace the sums of the terms of one rank by those of all, if the loss has several."""
        if not any(one.has_terms for one in of_ranks):
            return
        own = {name: one.on_host() for name, one in totals.terms.items()}
        totals.terms = {}
        for name, numbers in [item for found in self.ranks.gather(own) for item in found.items()]:
            term = totals.terms.get(name)
            totals.terms[name] = numbers if term is None else term.plus(numbers)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """See `Engine.broadcast`."""
        with self.ranks.waiting("receive the tensors of rank 0"):
            for tensor in tensors:
                dist.broadcast(tensor.detach(), 0, group=self.ranks.tensor_group(tensor.device))

    def agree_on_request(self) -> None:
        """See `Engine.agree_on_request`."""
        self._request.agree(self.ranks.gather(self._request.own.signal_number or 0))


class Replicate(GroupEngine):
    """The engine of ranks that have a whole model each.

    Args:
        group: the ranks.
        train_state: what trains.
        filler: for the form of the representations, on a rank without samples.
    """

    def __init__(self, group: Group, train_state: TrainState, filler: Filler) -> None:
        super().__init__(group)
        self._reduction = Reduction(group)

        def represent() -> Any:
            loss: Any = train_state.loss
            context = precision_context(train_state.device, train_state.precision)
            with preserved_random_state(), torch.no_grad(), context:
                found = loss.represent(train_state.model, filler()[0])
            train_state.buffers.restore(keep=True)
            return found

        self._exchange = BatchExchange(group, represent)

    def begin_step(
        self, train_state: TrainState, micro_batches: MicroBatches, count: int, rounds: int
    ) -> MicroBatches:
        """See `Engine.begin_step`."""
        self._exchange.begin()
        train_state.peers = self._exchange
        return micro_batches

    def combine(self, train_state: TrainState, outcome: StepTotals | OutOfMemory) -> StepTotals | OutOfMemory:
        """See `Engine.combine`."""
        if train_state.peers is not None:
            train_state.peers = None
            outcome = self._exchange.end(train_state, outcome)
        totals = None if isinstance(outcome, OutOfMemory) else outcome
        of_ranks = self._reduction.run(train_state, totals, self._request.own.signal_number or 0)
        self._request.agree(int(one.signal) for one in of_ranks)
        if any(one.failed for one in of_ranks):
            return outcome if isinstance(outcome, OutOfMemory) else OutOfMemory("")
        if totals is not None:
            self.sum_terms(totals, of_ranks)
        return outcome


class Shard(GroupEngine):
    """The engine of a sharded model.

    Args:
        group: the ranks.
        train_state: its loss runs through the sharded model already.
        filler: for ranks that have fewer micro-batches than others.
    """

    def __init__(self, group: Group, train_state: TrainState, filler: Filler) -> None:
        super().__init__(group)
        self._model: ShardedModel = train_state.shared  # type: ignore[assignment]
        self.mesh = self._model.mesh
        self._filler = filler
        self._buffers = BufferSnapshot(train_state.model, copy_all=True)
        self._has_no_counts = False
        self._exchange = BatchExchange(group, lambda: None)
        cells = num_cells(group.world, len(RankNumbers._fields) + len(train_state.optimizers) + 1)
        self._cells = torch.zeros(cells, device=train_state.device)

    def begin_step(
        self, train_state: TrainState, micro_batches: MicroBatches, count: int, rounds: int
    ) -> MicroBatches:
        """See `Engine.begin_step`. Further micro-batches of weight 0 follow if other ranks have more."""
        return Passes(lambda: self._pass(train_state, micro_batches, count, rounds))

    def _pass(
        self, train_state: TrainState, micro_batches: MicroBatches, count: int, rounds: int
    ) -> Iterator[tuple[Collated, int]]:
        """Yield the micro-batches of a pass over a batch."""
        train_state.peers = self._exchange
        self._agree_on_scale(train_state)
        padded = self._padded(micro_batches, count, rounds)
        for one in self._model.begin_step(padded, rounds):
            with self.ranks.waiting("train a micro-batch with the other ranks"):
                yield one
        # Its end undoes what the micro-batches of weight 0 have changed.
        next(padded, None)

    def combine(self, train_state: TrainState, outcome: StepTotals | OutOfMemory) -> StepTotals | OutOfMemory:
        """See `Engine.combine`. The gradients are summed already.

        Raises:
            InputError: FSDP2 has summed gradients of other parameters on each rank.
        """
        assert isinstance(outcome, StepTotals), "an error before the step has ended all ranks"
        norms = [norm_of(own) if own else 0.0 for own in train_state.gradients.by_optimizer()]
        numbers = numbers_of(outcome, self._request.own.signal_number or 0)
        used = zlib.crc32(bytes(gradient is not None for _, gradient in train_state.gradients.by_parameter()))
        # Squares are summed, as every rank measured its shards.
        write_numbers(self._cells, self.ranks.rank, [*numbers, *map(_squared, norms), used])
        with self.ranks.waiting("sum the batch"):
            self.ranks.start_sum(self._cells)()
        found = read_numbers(self._cells, self.ranks.world)
        of_ranks = [RankNumbers(*one[: len(numbers)]) for one in found]
        self._request.agree(int(one.signal) for one in of_ranks)
        sum_totals(outcome, of_ranks)
        if len({one[-1] for one in found}) > 1:
            raise InputError(
                "the loss gave gradients to other parameters on each rank, for example those of the experts "
                "that its samples chose, and FSDP2 sums those of a shared model only if all ranks have them: "
                "use --parallel replicate, or let every forward pass use every parameter"
            )
        squares = zip(*(one[len(numbers) : -1] for one in found), strict=True)
        outcome.norms = [_root(sum(one)) for one in squares]
        self.sum_terms(outcome, of_ranks)
        return outcome

    def explain(self, error: Exception) -> Exception:
        """See `Engine.explain`. FSDP2 runs its collectives within the loss and its backward pass."""
        return rank_lost("train the batch", error) if is_of_collective(error) else error

    def _padded(self, micro_batches: MicroBatches, count: int, rounds: int) -> Iterator[tuple[Collated, int]]:
        """Yield the micro-batches of this rank, then as many of weight 0 as are missing."""
        yield from micro_batches
        if count == rounds:
            return
        self._model.weight = 0.0
        before = capture_random_state()
        self._buffers.take()
        try:
            for _ in range(rounds - count):
                yield self._filler()[0], 0
        finally:
            self._model.weight = 1.0
        self._buffers.restore()
        restore_random_state(before)

    def _agree_on_scale(self, train_state: TrainState) -> None:
        """Let all ranks divide by one D; once per run."""
        if train_state.items_per_sample is not None or self._has_no_counts:
            return
        # A snapshot of its own: that of the train state is of the start of the batch.
        self._buffers.take()
        with preserved_random_state(), torch.no_grad():
            batch, size = self._filler()
            found = train_state.loss(train_state.model, batch)
        self._buffers.restore()
        known = self.ranks.gather(float(found.count) / size if isinstance(found, Loss) else None)
        self._has_no_counts = all(one is None for one in known)
        if not self._has_no_counts:
            train_state.items_per_sample = max(one or 0.0 for one in known) or 1.0


class PeerOutOfMemory(torch.OutOfMemoryError):
    """Memory ran out on another rank."""


class BatchExchange:
    """The exchange of representations or counts among ranks; see `autobatch.step.whole_batch.PassExchange`.

    Args:
        group: the ranks.
        represent: returns what the representations of some samples look like, for a rank that has none.
    """

    def __init__(self, group: Group, represent: Callable[[], Any]) -> None:
        self._group = group
        self._represent = represent
        self._has_voted = True
        self._peer_failed = False

    @property
    def counts_loss(self) -> bool:
        """See `PassExchange.counts_loss`."""
        return self._group.rank == 0

    def begin(self) -> None:
        """Begin a batch."""
        self._has_voted = self._peer_failed = False

    def gather(self, rows: Rows) -> None:
        """See `PassExchange.gather`.

        Raises:
            PeerOutOfMemory: memory ran out on another rank before.
        """
        if rows.collated is None:
            rows.begin(self._represent())
        self._vote(failed=False)
        # As bytes, because zeros leave them as they are, whatever the type.
        wholes = [whole.view(-1).view(torch.uint8) for whole in tensors_of(rows.collated)]
        with self._group.waiting("exchange the representations of a batch"):
            for wait in [self._group.start_sum(one) for one in wholes]:
                wait()

    def agree_on_form(self, own: Form | None) -> Form | None:
        """See `PassExchange.agree_on_form`.

        Raises:
            InputError: the forms of two ranks differ.
        """
        found = [Form(one) for one in self._group.gather(own and dict(own)) if one is not None]
        for other in found:
            if other != found[0]:
                raise InputError(
                    f"the workload's loss returned {found[0]} on one rank and {other} on another: return "
                    f"{'the same terms' if other.has_several and found[0].has_several else 'one kind'}"
                )
        return found[0] if found else None

    def sum_counts(self, counts: Mapping[str, float]) -> dict[str, float]:
        """See `PassExchange.sum_counts`.

        Raises:
            PeerOutOfMemory: memory ran out on another rank before.
        """
        self._has_voted = True
        sums: dict[str, float] = {}
        own: Mapping[str, float] | None = counts
        for of_rank in self._group.gather(own):
            if of_rank is None:
                self._peer_failed = True
                raise PeerOutOfMemory("memory ran out on another rank")
            for name, count in of_rank.items():
                sums[name] = sums.get(name, 0.0) + count
        return sums

    def end(self, train_state: TrainState, outcome: StepTotals | OutOfMemory) -> StepTotals | OutOfMemory:
        """Return the outcome of this rank, after the votes of the others if they wait for it."""
        if isinstance(outcome, OutOfMemory) and not self._has_voted:
            if isinstance(train_state.loss, WholeBatchLoss):
                self._vote(failed=True)
            else:
                train_state.form = train_state.form or self.agree_on_form(None)
                if train_state.form is not None and train_state.form.counted:
                    self._group.gather(None)
        return OutOfMemory("") if self._peer_failed else outcome

    def _vote(self, *, failed: bool) -> None:
        self._has_voted = True
        is_failed = self._group.agree(failed)
        if is_failed and not failed:
            self._peer_failed = True
            raise PeerOutOfMemory("memory ran out on another rank")


def _root(square: float) -> float:
    """Return the norm of a sum of squares, which may be infinite or NaN."""
    return math.sqrt(square) if square >= 0 else math.nan


def _squared(norm: float | Tensor) -> float | Tensor:
    return norm.double() ** 2 if isinstance(norm, Tensor) else norm**2
