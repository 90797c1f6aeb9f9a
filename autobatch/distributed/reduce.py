"""The sum of a batch over the ranks, after the last backward pass of each.

    [ figures of every rank | a flag for each parameter | small gradients … ]      one reduction of one buffer
    large gradients, each in its own memory                                        further ones, at once

The first reduction carries the numbers of every rank, of which one says whether memory ran out there. If it
did anywhere, no gradient was touched. A flag tells whether any rank has a gradient for a parameter: one that
no rank has stays None. Small models need no other reduction: it is the number of messages that costs them
time.

Gradients are sums of totals ÷ D, with one D for all ranks. D follows from the items per sample, on which the
ranks agree by one message in the first batch that counts any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from autobatch.core.errors import InputError
from autobatch.distributed.engine import OutOfMemory
from autobatch.distributed.group import Group
from autobatch.step.gradients import Gradients
from autobatch.step.loss_share import StepTotals, divisor_of
from autobatch.step.train_state import TrainState

_PARTS = {torch.float32: 3, torch.float64: 1}
"""Numbers that carry the 53 bits of a float64 exactly."""


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


def figures_of(outcome: StepTotals | OutOfMemory, signal: int = 0) -> Figures:
    """Return the numbers of this rank, with the number of a signal that it got; 0 for none."""
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


def sum_totals(totals: StepTotals, rows: list[Figures]) -> None:
    """Replace the sums of one rank by those of all; the first micro-batch is that of rank 0."""
    first = rows[0]
    totals.loss = sum(row.loss for row in rows)
    totals.count = sum(row.items for row in rows) if any(row.has_count for row in rows) else None
    totals.divisor = max(row.divisor for row in rows)
    totals.first_norm = first.first_norm if first.has_first_norm else None
    totals.first_count = first.first_count


class Table:
    """A table with a row of numbers for each rank, which a sum over the ranks fills.

    Each rank writes its own row and zeros into the others, so that the sum has the rows of all ranks, bit for
    bit. In float32, a number is carried in three parts, which hold its 53 bits.

    Args:
        cells: a 1-d tensor of `Table.cells_of` elements, float32 or float64.
        columns: numbers of a row.
        rank: this rank.
    """

    def __init__(self, cells: Tensor, columns: int, rank: int) -> None:
        self._cells = cells
        self._columns = columns
        self._parts = _PARTS[cells.dtype]
        width = columns * self._parts
        self._own = cells[rank * width : (rank + 1) * width]

    @staticmethod
    def cells_of(world: int, columns: int, dtype: torch.dtype) -> int:
        """Return the elements that a table takes."""
        return world * columns * _PARTS[dtype]

    def write(self, row: Sequence[float | Tensor]) -> None:
        """Write the row of this rank; the host does not wait for numbers that are on a GPU."""
        device = self._cells.device
        if device.type == "cpu":
            values = torch.tensor([float(one) for one in row], dtype=torch.float64, device=device)
        else:
            each = [torch.as_tensor(one, dtype=torch.float64, device=device).detach() for one in row]
            values = torch.stack(each)
        self._cells.zero_()
        for number, part in enumerate(self._own.view(self._parts, -1), start=1):
            part.copy_(values)
            if number < self._parts:
                # Nothing is left of an infinity or a NaN.
                values = (values - part.double()).nan_to_num_(0.0, 0.0, 0.0)

    def read(self, cells: Sequence[float]) -> list[list[float]]:
        """Return the row of every rank, from the cells of the sum on the host."""
        width = self._columns * self._parts
        rows = [cells[start : start + width] for start in range(0, len(cells), width)]
        return [[sum(row[column :: self._columns]) for column in range(self._columns)] for row in rows]


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """The places of gradients in the buffer of a train state."""

    parameters: list[nn.Parameter]
    buffer: Tensor
    table: Table
    flags: Tensor
    """An element for each parameter."""
    header: Tensor
    """The table and the flags."""
    packed: list[int]
    """Numbers of the parameters whose gradients have a place in the buffer, in its order."""
    views: list[Tensor]
    """Their places."""
    alone: list[int]
    """Numbers of those that are reduced in their own memory."""
    sparse: list[int]
    """Numbers of those whose gradients are sparse, the same on all ranks."""


def _lay_out(buffer: Tensor, parameters: list[nn.Parameter], ranks: Group, sparse: list[int]) -> _Layout:
    """Give the smallest gradients a place in the buffer, as many as it holds."""
    columns = len(Figures._fields) + len(sparse)
    cells = Table.cells_of(ranks.world, columns, buffer.dtype)
    at = cells + len(parameters)
    if at > buffer.numel():
        # The probe has not seen the counts of sparse gradients, which take a few hundred bytes.
        buffer = buffer.new_zeros(at)
    header = buffer[:at]
    packed, views, alone = list[int](), list[Tensor](), list[int]()
    for number in sorted(range(len(parameters)), key=lambda number: parameters[number].numel()):
        shape, end = parameters[number].shape, at + parameters[number].numel()
        if number in sparse:
            continue
        if end > buffer.numel():
            alone.append(number)
            continue
        packed.append(number)
        views.append(buffer[at:end].view(shape))
        at = end
    return _Layout(
        parameters=parameters,
        buffer=buffer[:at],
        table=Table(header[:cells], columns, ranks.rank),
        flags=header[cells:],
        header=header,
        packed=packed,
        views=views,
        alone=alone,
        sparse=sparse,
    )


class Reduction:
    """The sum of each batch over the ranks.

    Args:
        ranks: the ranks.
    """

    def __init__(self, ranks: Group) -> None:
        self._ranks = ranks
        self._scale_is_agreed = False
        self._layout: _Layout | None = None

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
        layout = self._layout_of(train_state)
        with self._ranks.waiting("sum the gradients", is_step=True):
            rows = self._sum(layout, train_state.gradients, figures_of(outcome, signal))
        if any(row.failed for row in rows):
            # The batch runs again from the scale before it. The rank that failed may have had the only sparse
            # gradient.
            self._scale_is_agreed, self._layout = False, None
        elif isinstance(outcome, StepTotals):
            if train_state.scaler is not None and not outcome.sizes:
                # A loss scale begins with its first use, which a rank without samples does not have.
                train_state.scaler.scale(torch.zeros((), device=train_state.device))
            sum_totals(outcome, rows)
        return rows

    def _sum(self, layout: _Layout, gradients: Gradients, figures: Figures) -> list[Figures]:
        """Sum the gradients over the ranks, and return the figures of each."""
        own = _dense(gradients, layout.sparse)
        entries = [_as_sparse(own[number], layout.parameters[number]) for number in layout.sparse]
        layout.table.write([*figures, *(float(one._nnz()) for one in entries)])
        if any(one is None for one in own):
            layout.flags.copy_(torch.tensor([float(one is not None) for one in own], device="cpu"))
        else:
            layout.flags.fill_(1.0)
        _copy_between(layout, own, to_buffer=True)
        self._ranks.start_sum(layout.buffer)()
        # The host waits here, once.
        numbers = layout.header.tolist()
        cells = len(numbers) - len(own)
        rows = layout.table.read(numbers[:cells])
        found = [Figures(*row[: len(figures)]) for row in rows]
        if any(one.failed for one in found):
            return found
        for number, flag in enumerate(numbers[cells:]):
            if flag and own[number] is None and number not in layout.sparse:
                own[number] = gradients.new_zeros(layout.parameters[number])
        _copy_between(layout, own, to_buffer=False)
        self._sum_in_place([gradient for number in layout.alone if (gradient := own[number]) is not None])
        for number, one, *counts in zip(
            layout.sparse, entries, *(row[len(figures) :] for row in rows), strict=True
        ):
            if any(counts):
                gradients.put(layout.parameters[number], self._sum_entries(one, [int(n) for n in counts]))
        return found

    def _layout_of(self, train_state: TrainState) -> _Layout:
        """Return the places of the gradients, new ones if a schedule has added parameters."""
        found = train_state.gradients.by_parameter()
        parameters = [parameter for parameter, _ in found]
        known = self._layout
        if known is None or list(map(id, known.parameters)) != list(map(id, parameters)):
            assert train_state.exchange is not None
            own = [number for number, (_, one) in enumerate(found) if one is not None and one.is_sparse]
            sparse = sorted({number for of_rank in self._ranks.gather(own) for number in of_rank})
            known = self._layout = _lay_out(train_state.exchange, parameters, self._ranks, sparse)
        return known

    def _sum_in_place(self, gradients: list[Tensor]) -> None:
        """Sum large gradients, all of them at the same time."""
        whole = [gradient.contiguous() for gradient in gradients]
        for wait in [self._ranks.start_sum(one) for one in whole]:
            wait()
        for gradient, one in zip(gradients, whole, strict=True):
            if one is not gradient:
                gradient.copy_(one)

    def _sum_entries(self, own: Tensor, counts: list[int]) -> Tensor:
        """Return the sparse gradient of all ranks, which is not coalesced, given the entries of each rank.

        Every rank writes its entries into a place of its own in tensors that are zero elsewhere. No number is
        added to another but zero, so that all ranks get the same gradient, bit for bit.
        """
        rank = self._ranks.rank
        first, last = sum(counts[:rank]), sum(counts[: rank + 1])
        indices = own.indices().new_zeros((own.sparse_dim(), sum(counts)))
        values = own.values().new_zeros((sum(counts), *own.values().shape[1:]))
        indices[:, first:last] = own.indices()
        values[first:last] = own.values()
        for wait in [self._ranks.start_sum(indices), self._ranks.start_sum(values)]:
            wait()
        return _of_entries(indices, values, own.shape)

    def _agree_on_scale(self, train_state: TrainState, outcome: StepTotals | OutOfMemory) -> None:
        """Bring the sums of all ranks to one D, in the first batches of a run."""
        totals = outcome if isinstance(outcome, StepTotals) and outcome.sizes else None
        kind = None if totals is None else "mean" if totals.count is None else "Loss"
        found = self._ranks.gather((kind, train_state.items_per_sample))
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


def _dense(gradients: Gradients, sparse: list[int]) -> list[Tensor | None]:
    """Return the gradients, dense but for those that all ranks know as sparse."""
    found: list[Tensor | None] = []
    for number, (parameter, gradient) in enumerate(gradients.by_parameter()):
        is_odd = gradient is not None and gradient.is_sparse and number not in sparse
        found.append(gradient.to_dense() if gradient is not None and is_odd else gradient)
        if is_odd:
            gradients.put(parameter, found[-1])  # type: ignore[arg-type]
    return found


def _copy_between(layout: _Layout, own: list[Tensor | None], *, to_buffer: bool) -> None:
    """Copy gradients to their places in the buffer, or back; a place without a gradient gets zeros."""
    views, gradients = [], []
    for view, number in zip(layout.views, layout.packed, strict=True):
        gradient = own[number]
        if gradient is not None:
            views.append(view)
            gradients.append(gradient)
        elif to_buffer:
            view.zero_()
    if views:
        torch._foreach_copy_(*((views, gradients) if to_buffer else (gradients, views)))


def _as_sparse(gradient: Tensor | None, like: Tensor) -> Tensor:
    """Return a gradient with one entry per row of a parameter; without entries if it is None."""
    if gradient is None:
        indices = torch.empty((1, 0), dtype=torch.int64, device=like.device)
        values = torch.empty((0, *like.shape[1:]), dtype=like.dtype, device=like.device)
        return _of_entries(indices, values, like.shape).coalesce()
    return gradient.coalesce() if gradient.is_sparse else gradient.to_sparse(1)


def _of_entries(indices: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    # Before torch 2.13 it warns that nothing is checked, even if an argument asks for that.
    with torch.sparse.check_sparse_tensor_invariants(enable=False):  # type: ignore[no-untyped-call]
        return torch.sparse_coo_tensor(indices, values, shape)
