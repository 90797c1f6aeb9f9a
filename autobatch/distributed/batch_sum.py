"""The sum of a batch over the ranks, after the last backward pass of each.

One reduction carries the gradients and the figures of every rank. The gradients are sums of totals ÷ D, with
one D for all ranks. D follows from the items per sample, on which the ranks agree by one message in the first
batch that counts any.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from autobatch.core.errors import InputError
from autobatch.distributed.engine import OutOfMemory
from autobatch.distributed.exchange import Exchange
from autobatch.distributed.figures import Figures, figures_of, sum_totals
from autobatch.distributed.messages import Messages
from autobatch.step.loss_share import StepTotals, divisor_of
from autobatch.step.train_state import TrainState


class BatchSum:
    """The sum of each batch over the ranks.

    Args:
        ranks: the ranks.
        reduce: sums a tensor over the ranks in place.
    """

    def __init__(self, ranks: Messages, reduce: Callable[[Tensor], None]) -> None:
        self._ranks = ranks
        self._reduce = reduce
        self._scale_is_agreed = False
        self._exchange: Exchange | None = None

    def run(
        self, train_state: TrainState, outcome: StepTotals | OutOfMemory, signal: int = 0
    ) -> list[Figures]:
        """Sum the gradients and the totals in place, unless a rank ran out of memory; all ranks call it.

        Args:
            train_state: has the gradients of this rank, and the buffer to exchange them in.
            outcome: of this rank; becomes that of all.
            signal: number of a signal that this rank got; 0 for none.

        Returns:
            The figures of every rank.

        Raises:
            InputError: the losses of the ranks are of two kinds.
        """
        if not self._scale_is_agreed:
            self._agree_on_scale(train_state, outcome)
        with self._ranks.meeting():
            rows = self._sum(train_state, figures_of(outcome, signal))
        if any(row.failed for row in rows):
            # The batch runs again from the scale before it.
            self._scale_is_agreed = False
        elif isinstance(outcome, StepTotals):
            if train_state.scaler is not None and not outcome.sizes:
                # A loss scale begins with its first use, which a rank without samples does not have.
                train_state.scaler.scale(torch.zeros((), device=train_state.device))
            sum_totals(outcome, rows)
        return rows

    def _sum(self, train_state: TrainState, figures: Figures) -> list[Figures]:
        """Sum the gradients over the ranks, and return the figures of each."""
        found = train_state.gradients.by_parameter()
        parameters = [parameter for parameter, _ in found]
        if self._exchange is None or not self._exchange.fits(parameters):
            assert train_state.exchange is not None
            own = [number for number, (_, one) in enumerate(found) if one is not None and one.is_sparse]
            self._exchange = Exchange(
                train_state.exchange,
                parameters,
                world=self._ranks.world,
                columns=len(figures),
                sparse=sorted({number for of_rank in self._ranks.gather(own) for number in of_rank}),
            )
        rows = self._exchange.run(figures, self._ranks.rank, train_state.gradients, self._reduce)
        if any(row[0] for row in rows):
            # A rank that has failed may have had the only sparse gradient.
            self._exchange = None
        return [Figures(*row[: len(figures)]) for row in rows]

    def _agree_on_scale(self, train_state: TrainState, outcome: StepTotals | OutOfMemory) -> None:
        """Bring the sums of all ranks to one D, in the first batches of a run."""
        totals = outcome if isinstance(outcome, StepTotals) and outcome.sizes else None
        kind = None if totals is None else "mean" if totals.count is None else "Loss"
        found = self._ranks.gather([kind, train_state.items_per_sample])
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
