"""The buffer in which ranks sum their gradients, and the figures that travel at its front.

    [ figures of every rank | a flag for each parameter | gradients … ]      one reduction
    [ more gradients … ]                                                     further ones, if there are more

A flag tells whether any rank has a gradient for the parameter: one that no rank has stays None. Sparse
gradients follow, each by its entries (`autobatch.distributed.sparse_sum`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autobatch.distributed.figures import read_rows, table_size, write_row
from autobatch.distributed.sparse_sum import as_sparse, sum_sparse
from autobatch.step.gradients import Gradients

Row = Sequence[float | Tensor]


@dataclass(frozen=True)
class _Reduction:
    """Gradients that travel together."""

    numbers: list[int]
    """Numbers of their parameters."""
    views: list[Tensor]
    """Their places in the buffer; empty for one gradient that travels in its own memory."""
    end: int
    """Elements of the buffer that are reduced."""


class Exchange:
    """The places of the gradients in a buffer.

    Args:
        buffer: 1-d, float32 or float64; `autobatch.step.gradients.exchange_buffer` makes it.
        parameters: the trained parameters.
        world: number of ranks.
        columns: numbers that each rank sends.
        sparse: numbers of the parameters whose gradients are sparse, the same on all ranks.
    """

    def __init__(
        self,
        buffer: Tensor,
        parameters: Sequence[nn.Parameter],
        *,
        world: int,
        columns: int,
        sparse: Sequence[int] = (),
    ) -> None:
        self._columns = columns + len(sparse)
        self._parameters = parameters
        self._sparse = sparse
        # The probe has not seen the counts of sparse gradients, which take a few hundred bytes.
        least = table_size(world, self._columns, buffer.dtype) + len(parameters)
        self._buffer = buffer if buffer.numel() >= least else buffer.new_zeros(least)
        buffer = self._buffer
        self._table = buffer[: table_size(world, self._columns, buffer.dtype)]
        self._header = buffer[: len(self._table) + len(parameters)]
        self._flags = self._header[len(self._table) :]
        self._reductions = self._plan()

    def fits(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Return whether the places are those of these parameters; a schedule may add some."""
        return [id(p) for p in self._parameters] == [id(p) for p in parameters]

    def run(
        self, row: Row, rank: int, gradients: Gradients, reduce: Callable[[Tensor], object]
    ) -> list[list[float]]:
        """Sum the gradients over the ranks in place, unless a rank sends a row that begins with 1.

        Args:
            row: figures of this rank; the first is 1 if it has no gradients to give, which stops all ranks.
            rank: this rank.
            gradients: of this rank; a parameter for which only other ranks have one gets one.
            reduce: sums a tensor over the ranks in place.

        Returns:
            The figures of every rank, followed by its entries in each sparse gradient.
        """
        own = self._densified(gradients)
        entries = [as_sparse(own[number], self._parameters[number]) for number in self._sparse]
        for number in self._sparse:
            own[number] = None
        write_row(self._table, [*row, *(float(one._nnz()) for one in entries)], rank)
        if any(one is None for one in own):
            self._flags.copy_(torch.tensor([float(one is not None) for one in own], device="cpu"))
        else:
            self._flags.fill_(1.0)
        for part, reduction in enumerate(self._reductions):
            self._pack(reduction, own)
            if reduction.views or part == 0:
                reduce(self._buffer[: reduction.end])
            else:
                _reduce_in_place(own[reduction.numbers[0]], reduce)
            if part == 0:
                # The host waits here, once.
                numbers = self._header.tolist()
                rows = read_rows(numbers[: len(self._table)], self._columns, self._buffer.dtype)
                if any(one[0] for one in rows):
                    return rows
                for number, flag in enumerate(numbers[len(self._table) :]):
                    if flag and own[number] is None:
                        own[number] = gradients.new_zeros(self._parameters[number])
            self._unpack(reduction, own)
        self._sum_entries(entries, rows, rank, gradients, reduce)
        return rows

    def _sum_entries(
        self,
        entries: list[Tensor],
        rows: list[list[float]],
        rank: int,
        gradients: Gradients,
        reduce: Callable[[Tensor], object],
    ) -> None:
        """Sum the sparse gradients, whose entries on each rank are counted at the end of its row."""
        first = self._columns - len(self._sparse)
        for place, (number, own) in enumerate(zip(self._sparse, entries, strict=True), first):
            counts = [int(row[place]) for row in rows]
            if any(counts):
                gradients.put(self._parameters[number], sum_sparse(own, counts, rank, reduce))

    def _densified(self, gradients: Gradients) -> list[Tensor | None]:
        """Return the gradients, dense but for those that all ranks know as sparse."""
        found: list[Tensor | None] = []
        for number, (parameter, gradient) in enumerate(gradients.by_parameter()):
            is_odd = gradient is not None and gradient.is_sparse and number not in self._sparse
            found.append(gradient.to_dense() if gradient is not None and is_odd else gradient)
            if is_odd:
                gradients.put(parameter, found[-1])  # type: ignore[arg-type]
        return found

    def _plan(self) -> list[_Reduction]:
        """Give every gradient a place: in the first reduction that has room, or in its own memory."""
        capacity = self._buffer.numel() - self._header.numel()
        groups: list[list[int]] = [[]]
        used = 0
        for number, parameter in enumerate(self._parameters):
            if number in self._sparse:
                continue
            if used + parameter.numel() > capacity:
                groups.append([])
                used = 0
            groups[-1].append(number)
            used += parameter.numel()
        return [self._reduction(group, is_first=place == 0) for place, group in enumerate(groups)]

    def _reduction(self, numbers: list[int], *, is_first: bool) -> _Reduction:
        at = self._header.numel() if is_first else 0
        sizes = [self._parameters[number].numel() for number in numbers]
        if at + sum(sizes) > self._buffer.numel():
            return _Reduction(numbers, [], 0)
        views = []
        for number, size in zip(numbers, sizes, strict=True):
            views.append(self._buffer[at : at + size].view(self._parameters[number].shape))
            at += size
        return _Reduction(numbers, views, at)

    def _pack(self, reduction: _Reduction, own: Sequence[Tensor | None]) -> None:
        views, gradients = [], []
        for view, number in zip(reduction.views, reduction.numbers, strict=False):
            gradient = own[number]
            if gradient is None:
                view.zero_()
            else:
                views.append(view)
                gradients.append(gradient)
        if views:
            torch._foreach_copy_(views, gradients)

    def _unpack(self, reduction: _Reduction, own: Sequence[Tensor | None]) -> None:
        views, gradients = [], []
        for view, number in zip(reduction.views, reduction.numbers, strict=False):
            gradient = own[number]
            if gradient is not None:
                views.append(view)
                gradients.append(gradient)
        if views:
            torch._foreach_copy_(gradients, views)


def _reduce_in_place(gradient: Tensor | None, reduce: Callable[[Tensor], object]) -> None:
    if gradient is None:
        return
    whole = gradient.contiguous()
    reduce(whole)
    if whole is not gradient:
        gradient.copy_(whole)
