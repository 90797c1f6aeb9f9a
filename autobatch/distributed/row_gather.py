"""The rows of a batch over the ranks, for a loss that sees all samples (`WholeBatchLoss`).

Each rank represents its own samples and writes their rows into a table that is zero elsewhere. The sum of all
tables has every row, bit for bit. Then every rank computes the loss of the whole batch, and runs the backward
pass of its own samples from the gradients of their rows: the sum over the ranks is the gradient of one pass.

Before the rows travel, the ranks vote whether memory ran out. A batch that failed runs again on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autobatch.distributed.engine import OutOfMemory
from autobatch.distributed.group import Group
from autobatch.step.loss_share import StepTotals
from autobatch.step.whole_batch import Rows
from autobatch.workload.nested import tensors_of


class PeerOutOfMemory(torch.OutOfMemoryError):
    """Memory ran out on another rank."""


class RowGather:
    """The exchange of rows among ranks; see `autobatch.step.whole_batch.RowExchange`.

    Args:
        group: the ranks.
        reduce: sums a tensor over the ranks in place.
        represent: returns what the rows of some samples look like, for a rank that has none.
    """

    def __init__(
        self, group: Group, reduce: Callable[[Tensor], object], represent: Callable[[], Any]
    ) -> None:
        self._group = group
        self._reduce = reduce
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
        for whole in tensors_of(rows.collated):
            # As bytes, because zeros leave them as they are, whatever the type.
            self._reduce(whole.view(-1).view(torch.uint8))

    def ended(self, outcome: StepTotals | OutOfMemory) -> StepTotals | OutOfMemory:
        """Return the outcome of this rank, after it has told the others if they wait for its rows."""
        if isinstance(outcome, OutOfMemory) and not self._has_voted:
            self._vote(failed=True)
        return OutOfMemory("") if self._peer_failed else outcome

    def _vote(self, *, failed: bool) -> None:
        self._has_voted = True
        with self._group.meeting():
            is_failed = self._group.agree(failed)
        if is_failed and not failed:
            self._peer_failed = True
            raise PeerOutOfMemory("memory ran out on another rank")
