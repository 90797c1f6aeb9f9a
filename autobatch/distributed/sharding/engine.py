"""The engine of ranks that share a model: ``--parallel shard``.

FSDP2 gathers parameters and reduces gradients in every micro-batch, so all ranks run as many of them: a rank
with fewer runs some of weight 0. Gradients are summed as they are, and each rank has the sums of its part.
One reduction then carries the figures of a batch and Σg² of each part, from which every rank decides alike.

If memory runs out on one rank, the others wait for it in the middle of a pass, and nothing can be repeated:
all ranks leave, and start again in smaller micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from autobatch.distributed.engine import OutOfMemory
from autobatch.distributed.group import Group
from autobatch.distributed.reduce import Figures, Table, figures_of, sum_totals
from autobatch.distributed.replicate import GroupEngine, Spare
from autobatch.distributed.sharding.model import ShardedModel
from autobatch.distributed.watch import is_of_collective, rank_lost
from autobatch.step.gradients import norm_of
from autobatch.step.loss_share import StepTotals
from autobatch.step.restore import BufferSnapshot
from autobatch.step.train_state import TrainState
from autobatch.workload.contract import Collated, Loss
from autobatch.workload.order import GlobalBatch
from autobatch.workload.rng import capture_random_state, preserved_random_state, restore_random_state
from autobatch.workload.split import Split


class Shard(GroupEngine):
    """The engine of a shared model.

    Args:
        group: the ranks.
        split: has the limits of all ranks.
        kinds: the kind of each rank.
        train_state: its loss runs through the shared model already.
        spare: for ranks that have fewer micro-batches than others.
    """

    def __init__(
        self, group: Group, split: Split, kinds: Sequence[int], train_state: TrainState, spare: Spare
    ) -> None:
        super().__init__(group, split, kinds)
        assert isinstance(train_state.shared, ShardedModel)
        self._model = train_state.shared
        self.mesh = self._model.mesh
        self._spare = spare
        self._buffers = BufferSnapshot(train_state.model, copy_all=True)
        self._has_no_counts = False
        columns = len(Figures._fields) + len(train_state.optimizers)
        cells = Table.cells_of(group.world, columns, torch.float64)
        self._cells = torch.zeros(cells, dtype=torch.float64, device=train_state.device)
        self._table = Table(self._cells, columns, group.rank)

    def passing(
        self,
        train_state: TrainState,
        micro_batches: Iterable[tuple[Collated, int]],
        count: int,
        batch: GlobalBatch,
    ) -> Iterator[tuple[Collated, int]]:
        """See `Engine.passing`. Further micro-batches of weight 0 follow if other ranks have more."""
        # From here on another rank may wait for this one, so that nothing can be repeated.
        train_state.stepping = True
        self._agree_on_scale(train_state)
        rounds = self._split.rounds(batch)
        padded = self._padded(micro_batches, count, rounds)
        yield from self._model.passing(padded, rounds)
        # Its end undoes what the micro-batches of weight 0 have changed.
        next(padded, None)

    def combine(self, train_state: TrainState, outcome: StepTotals | OutOfMemory) -> StepTotals | OutOfMemory:
        """See `Engine.combine`. The gradients are summed already."""
        assert isinstance(outcome, StepTotals), "an error before the step has ended all ranks"
        norms = [norm_of(own) if own else 0.0 for own in train_state.gradients.by_optimizer()]
        figures = figures_of(outcome, self._request.own.signal_number or 0)
        # Their squares are summed, as every rank measured a part.
        figures = figures._replace(first_norm=_squared(figures.first_norm))
        self._table.write([*figures, *map(_squared, norms)])
        with self.ranks.waiting("sum the batch", is_step=True):
            self.ranks.start_sum(self._cells)()
        found = self._table.read(self._cells.tolist())
        rows = [Figures(*row[: len(figures)]) for row in found]
        self._request.agree(int(row.signal) for row in rows)
        sum_totals(outcome, rows)
        has_first = all(row.has_first_norm for row in rows)
        squares = [float(row.first_norm) for row in rows]
        outcome.first_norm = _root(sum(squares)) if has_first else None
        outcome.first_count = sum(row.first_count for row in rows)
        parts = zip(*(row[len(figures) :] for row in found), strict=True)
        outcome.norms = [_root(sum(part)) for part in parts]
        return outcome

    def explained(self, error: Exception) -> Exception:
        """See `Engine.explained`. FSDP2 runs its collectives within the loss and its backward pass."""
        return rank_lost("train the batch", error) if is_of_collective(error) else error

    def _padded(
        self, micro_batches: Iterable[tuple[Collated, int]], count: int, rounds: int
    ) -> Iterator[tuple[Collated, int]]:
        """Yield the micro-batches of this rank, then as many of weight 0 as are missing."""
        yield from micro_batches
        if count == rounds:
            return
        self._model.weight = 0.0
        before = capture_random_state()
        self._buffers.take()
        try:
            for _ in range(rounds - count):
                yield self._spare()[0], 0
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
            batch, size = self._spare()
            found = train_state.loss(train_state.model, batch)
        self._buffers.restore()
        known = self.ranks.gather(float(found.count) / size if isinstance(found, Loss) else None)
        self._has_no_counts = all(one is None for one in known)
        if not self._has_no_counts:
            train_state.items_per_sample = max(one or 0.0 for one in known) or 1.0


def _root(square: float) -> float:
    """Return the norm of a sum of squares, which may be infinite or NaN."""
    return math.sqrt(square) if square >= 0 else math.nan


def _squared(norm: float | Tensor) -> float | Tensor:
    return norm.double() ** 2 if isinstance(norm, Tensor) else norm**2
