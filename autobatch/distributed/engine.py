"""The engine of a loop: how ranks sum a batch, and how they agree on what happens to it.

A loop has one engine. `Engine` serves one process, and changes nothing. `Whole` serves ranks with whole
models, and `Shared` ranks that share one. They sum over all ranks, so that everything after the sum (checks,
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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from autobatch.core.errors import InputError
from autobatch.core.signals import SharedRequest, StopRequest
from autobatch.distributed.group import Group, is_of_collective
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
from autobatch.step.loss import StepTotals, Term, numbers_of_terms
from autobatch.step.loss import read_numbers as read_on_host
from autobatch.step.restore import BufferSnapshot
from autobatch.step.train_state import TrainState, precision_context
from autobatch.step.whole_batch import Rows
from autobatch.workload.contract import Collated, WholeBatchLoss
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
    is_intact: bool = True
    """True if the state is that before the batch."""
    size: int = 0
    """Samples of the micro-batch that ran; 0 if memory ran out on other ranks only."""
    smaller: int = 0
    """Largest micro-batch for the next try."""


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
        """Return the ``count`` micro-batches of this rank as they are to run.

        No rank runs more than ``rounds`` of them.
        """
        return micro_batches

    def combine(self, train_state: TrainState, outcome: StepTotals | OutOfMemory) -> StepTotals | OutOfMemory:
        """Sum gradients and totals over the ranks, unless one of them ran out of memory and has none.

        Every rank gets the totals of the batch, or an `OutOfMemory`.
        """
        return outcome

    def agree_on_oom(self, oom: OutOfMemory) -> OutOfMemory:
        """Return the out-of-memory error of all ranks, after each has undone the batch."""
        return oom

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank the values that rank 0 has, in place."""

    def agree_on_request(self) -> None:
        """Let all ranks know of a request to stop that one of them has got."""

    def explain(self, error: Exception) -> Exception:
        """Return the error of a step; a `RankLost` in its place if it tells that another rank has ended."""
        return error


class PeerOutOfMemory(torch.OutOfMemoryError):
    """An end of memory on another rank."""

    def __init__(self) -> None:
        super().__init__("memory ran out on another rank")


class GroupEngine(Engine):
    """The part of an engine that does not depend on how gradients are summed.

    It is the ``peers`` of a train state, too, which exchange what a step needs within a batch. All ranks call
    its methods together. The filler makes a micro-batch for a rank that has none.
    """

    def __init__(self, group: Group, train_state: TrainState, filler: Filler) -> None:
        self.ranks: Group = group
        self._train_state = train_state
        self._filler = filler
        self._request = SharedRequest(StopRequest())
        # All ranks divide by one D, whatever their own samples count.
        train_state.items_per_sample = train_state.items_per_sample or 1.0

    @property
    def counts_loss(self) -> bool:
        """True on the one rank whose loss, and gradient of what only the loss uses, count."""
        return self.ranks.rank == 0

    def sum_counts(self, counts: Mapping[str, float]) -> dict[str, float]:
        """Return the sums of the counts of all ranks, by term.

        Raises:
            PeerOutOfMemory: memory ran out on another rank before.
        """
        sums = Counter[str]()
        own: Mapping[str, float] | None = counts
        for of_rank in self.ranks.gather(own):
            if of_rank is None:
                raise PeerOutOfMemory
            sums.update(of_rank)
        return dict(sums)

    def shared_request(self, request: StopRequest) -> StopRequest:
        """See `Engine.shared_request`. A signal to any rank stops all of them after the next step."""
        self._request = SharedRequest(request)
        return self._request

    def agree_on_oom(self, oom: OutOfMemory) -> OutOfMemory:
        """See `Engine.agree_on_oom`."""
        of_ranks = self.ranks.gather(oom)
        failed = [rank for rank, error in enumerate(of_ranks) if error.size]
        worst = min(failed, key=lambda rank: (of_ranks[rank].size, rank))
        return of_ranks[worst]._replace(
            message=f"rank {worst}: {of_ranks[worst].message}",
            is_fatal=any(error.is_fatal for error in of_ranks),
            is_intact=all(error.is_intact for error in of_ranks),
            smaller=min(of_ranks[rank].smaller for rank in failed),
        )

    def sum_terms(self, totals: StepTotals, of_ranks: Sequence[RankNumbers]) -> None:
        """Replace the sums of the terms of one rank by those of all, if the loss has several.

        Raises:
            InputError: the ranks have other terms.
        """
        if not any(numbers.has_terms for numbers in of_ranks):
            return
        numbers = iter(read_on_host(numbers_of_terms(totals)))
        own = {name: (term.items, next(numbers), next(numbers)) for name, term in totals.terms.items()}
        of_all = self.ranks.gather((bool(totals.sizes), own))
        first, *others = [list(terms) for has_samples, terms in of_all if has_samples]
        for other in others:
            if set(other) != set(first):
                raise InputError(
                    f"the workload's loss returned the terms {', '.join(first) or 'of no name'} on one rank, "
                    f"and {', '.join(other) or 'of no name'} on another: return the same terms"
                )
        totals.terms = {}
        for name, (items, loss, count) in [item for _, terms in of_all for item in terms.items()]:
            term = totals.terms.setdefault(name, Term(items=items))
            term.loss, term.count = term.loss + loss, term.count + count

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """See `Engine.broadcast`.

        Raises:
            InputError: the tensors of a rank have other shapes.
        """
        tensors = [tensor.detach() for tensor in tensors]
        shapes = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]
        elements = sum(tensor.numel() for tensor in tensors)
        # Sums and messages of unlike sizes would end the process without a word.
        self.ranks.check_equal(
            {
                "the shapes of the model": f"{len(shapes)} tensors of {elements:,} elements "
                f"(digest {zlib.crc32(repr(shapes).encode()):08x})"
            }
        )
        with self.ranks.waiting("receive the tensors of rank 0"):
            for tensor in tensors:
                dist.broadcast(tensor, 0, group=self.ranks.tensor_group(tensor.device))

    def agree_on_request(self) -> None:
        """See `Engine.agree_on_request`."""
        self._request.agree(self.ranks.gather(self._request.own.signal_number or 0))


class Whole(GroupEngine):
    """The engine of ranks that have a whole model each."""

    def __init__(self, group: Group, train_state: TrainState, filler: Filler) -> None:
        super().__init__(group, train_state, filler)
        self._reduction = Reduction(group)
        self._is_awaited = False
        """True while the other ranks wait for a message of this one within the batch."""
        self._has_peer_failed = False

    def begin_step(
        self, train_state: TrainState, micro_batches: MicroBatches, count: int, rounds: int
    ) -> MicroBatches:
        """See `Engine.begin_step`."""
        self._is_awaited = isinstance(train_state.loss, WholeBatchLoss) or train_state.counts is not None
        self._has_peer_failed = False
        train_state.peers = self
        return micro_batches

    def gather(self, rows: Rows) -> None:
        """Fill in the rows of the other ranks.

        Raises:
            PeerOutOfMemory: memory ran out on another rank before.
        """
        if rows.collated is None:
            rows.begin(self._represent())
        self._is_awaited = False
        if self.ranks.agree(False):
            self._has_peer_failed = True
            raise PeerOutOfMemory
        sum_rows(self.ranks, rows)

    def _represent(self) -> Any:
        """Return what the representations of some samples look like."""
        state, loss = self._train_state, self._train_state.loss
        assert isinstance(loss, WholeBatchLoss)
        with preserved_random_state(), torch.no_grad(), precision_context(state.device, state.precision):
            represented = loss.represent(state.model, self._filler()[0])
        state.buffers.restore(keep=True)
        return represented

    def sum_counts(self, counts: Mapping[str, float]) -> dict[str, float]:
        """See `GroupEngine.sum_counts`."""
        self._is_awaited, self._has_peer_failed = False, True
        sums = super().sum_counts(counts)
        self._has_peer_failed = False
        return sums

    def combine(self, train_state: TrainState, outcome: StepTotals | OutOfMemory) -> StepTotals | OutOfMemory:
        """See `Engine.combine`."""
        train_state.peers = None
        if isinstance(outcome, OutOfMemory) and self._is_awaited:
            if isinstance(train_state.loss, WholeBatchLoss):
                self.ranks.agree(True)
            else:
                self.ranks.gather(None)
        if self._has_peer_failed:
            outcome = OutOfMemory("")
        totals = None if isinstance(outcome, OutOfMemory) else outcome
        of_ranks = self._reduction.run(train_state, totals, self._request.own.signal_number or 0)
        self._request.agree(int(numbers.signal) for numbers in of_ranks)
        if any(numbers.failed for numbers in of_ranks):
            return outcome if isinstance(outcome, OutOfMemory) else OutOfMemory("")
        if totals is not None:
            self.sum_terms(totals, of_ranks)
        return outcome


def sum_rows(group: Group, rows: Rows) -> None:
    """Sum the rows of all ranks, of which each has zeros for the samples of the others; bit for bit."""
    # As bytes, because zeros leave them as they are, whatever the type.
    wholes = [whole.view(-1).view(torch.uint8) for whole in tensors_of(rows.collated)]
    with group.waiting("exchange the representations of a batch"):
        for wait in [group.start_sum(whole) for whole in wholes]:
            wait()


class Shared(GroupEngine):
    """The engine of a sharded model, through which the loss of the train state runs already."""

    def __init__(self, group: Group, train_state: TrainState, filler: Filler) -> None:
        super().__init__(group, train_state, filler)
        self._model: ShardedModel = train_state.shared
        self.mesh = self._model.mesh
        self._buffers = BufferSnapshot(train_state.model, copy_all=True)
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
        train_state.peers = self  # there are no rows to gather
        padded = self._padded(micro_batches, count, rounds)
        yield from self._model.begin_step(padded, rounds)
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
        squared = [norm.double() ** 2 if isinstance(norm, Tensor) else norm**2 for norm in norms]
        write_numbers(self._cells, self.ranks.rank, [*numbers, *squared, used])
        with self.ranks.waiting("sum the batch"):
            self.ranks.start_sum(self._cells)()
        rows = read_numbers(self._cells, self.ranks.world)
        of_ranks = [RankNumbers(*row[: len(numbers)]) for row in rows]
        self._request.agree(int(numbers.signal) for numbers in of_ranks)
        sum_totals(outcome, of_ranks)
        if len({row[-1] for row in rows}) > 1:
            raise InputError(
                "the loss gave gradients to other parameters on each rank, for example those of the experts "
                "that its samples chose, and FSDP2 sums those of a shared model only if all ranks have them: "
                "use --parallel replicate, or let every forward pass use every parameter"
            )
        squares = zip(*(row[len(numbers) : -1] for row in rows), strict=True)
        # They may be infinite or NaN.
        outcome.norms = [math.sqrt(total) if total >= 0 else math.nan for total in map(sum, squares)]
        self.sum_terms(outcome, of_ranks)
        return outcome

    def explain(self, error: Exception) -> Exception:
        """See `Engine.explain`. FSDP2 runs its collectives within the loss and its backward pass."""
        return self.ranks.lost("train the batch", error) if is_of_collective(error) else error

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
