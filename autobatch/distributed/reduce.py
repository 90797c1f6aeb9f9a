"""The sum of a batch over the ranks, after the last backward pass of each.

    [ numbers of every rank | a flag for each parameter | small gradients … ]      one reduction of one buffer
    large gradients, each in its own memory                                        further ones, at once

The first reduction carries the numbers of every rank, of which one says whether memory ran out there. If it
did anywhere, no gradient was touched. A flag tells whether any rank has a gradient for a parameter: one that
no rank has stays None. Small models need no other reduction: it is the number of messages that costs them
time.

Gradients are sums of totals ÷ D, with one D for all ranks: `GroupEngine` fixes the items per sample that it
follows from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from autobatch.core.errors import InputError
from autobatch.distributed.group import Group
from autobatch.step.gradients import Gradients
from autobatch.step.loss import StepTotals
from autobatch.step.train_state import TrainState

SPARSE = 2.0**20
"""Flag of a sparse gradient, which is refused on every rank; that of a dense one is 1."""


class RankNumbers(NamedTuple):
    """The numbers that a rank sends with a batch; all zeros but the first two if memory ran out."""

    failed: float
    """1 if memory ran out."""
    signal: float
    """Number of a signal that asks to stop, or 0."""
    has_count: float = 0.0
    """1 if the loss is a `Loss`."""
    divisor: float = 0.0
    """D; 0 if no micro-batch ran."""
    loss: float | Tensor = 0.0
    items: float | Tensor = 0.0
    """Σ of the counts."""
    has_terms: float = 0.0
    """1 if the loss has several terms."""


def numbers_of(totals: StepTotals | None, signal: int = 0) -> RankNumbers:
    """Return the numbers of this rank.

    Args:
        totals: None if memory ran out.
        signal: number of a signal that asks this rank to stop; 0 for none.
    """
    if totals is None:
        return RankNumbers(1, signal)
    return RankNumbers(
        failed=0,
        signal=signal,
        has_count=totals.count is not None,
        divisor=totals.divisor if totals.sizes else 0,
        loss=totals.loss,
        items=0.0 if totals.count is None else totals.count,
        has_terms=bool(totals.terms),
    )


def sum_totals(totals: StepTotals, of_ranks: list[RankNumbers]) -> None:
    """Replace the sums of one rank by those of all.

    Raises:
        InputError: the losses of the ranks are of two kinds.
    """
    kinds = {numbers.has_count for numbers in of_ranks if numbers.divisor}
    if len(kinds) > 1:
        raise InputError(
            "the workload's loss returned a Loss on one rank and a tensor on another: return one kind"
        )
    totals.loss = sum(numbers.loss for numbers in of_ranks)
    totals.count = sum(numbers.items for numbers in of_ranks) if kinds == {1.0} else None
    totals.divisor = max(numbers.divisor for numbers in of_ranks)


def write_numbers(cells: Tensor, rank: int, numbers: Sequence[float | Tensor]) -> None:
    """Write the numbers of a rank in its place in a buffer, and zeros in the places of all others.

    A number is written as the eight bytes of a float64, a byte in each element. So a sum over the ranks, in
    whatever type of float, has the numbers of every rank bit for bit. The host does not wait for a GPU.
    """
    double, device = torch.float64, cells.device
    if cells.is_cpu:  # three times as fast
        values = torch.tensor([float(number) for number in numbers], dtype=double, device=device)
    else:
        each = [torch.as_tensor(number, dtype=double, device=device).detach() for number in numbers]
        values = torch.stack(each)
    own = values.view(torch.uint8)
    cells.zero_()
    cells[rank * own.numel() : (rank + 1) * own.numel()] = own


def read_numbers(cells: Tensor, world: int) -> list[list[float]]:
    """Return the numbers of every rank from the sum of what all ranks wrote."""
    return cells.cpu().to(torch.uint8).view(torch.float64).view(world, -1).tolist()


def num_cells(world: int, numbers: int) -> int:
    """Return the elements that so many numbers of each rank take."""
    return world * numbers * torch.float64.itemsize


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """The places of gradients in the buffer of a train state."""

    parameters: list[nn.Parameter]
    buffer: Tensor
    header: Tensor
    """The numbers of the ranks, then the flags."""
    cells: Tensor
    """The numbers of the ranks."""
    flags: Tensor
    """An element for each parameter."""
    views: dict[int, Tensor]
    """The places of small gradients, by the number of the parameter."""


def _lay_out(buffer: Tensor, parameters: list[nn.Parameter], world: int) -> _Layout:
    """Give the smallest gradients a place in the buffer, as many as it holds."""
    cells = num_cells(world, len(RankNumbers._fields))
    at = cells + len(parameters)
    if at > buffer.numel():
        # A schedule has added parameters since the buffer was made.
        buffer = buffer.new_zeros(at)
    header = buffer[:at]
    views = dict[int, Tensor]()
    for number, parameter in sorted(enumerate(parameters), key=lambda item: item[1].numel()):
        end = at + parameter.numel()
        if end > buffer.numel():
            break
        views[number] = buffer[at:end].view(parameter.shape)
        at = end
    return _Layout(
        parameters=parameters,
        buffer=buffer[:at],
        header=header,
        cells=header[:cells],
        flags=header[cells:],
        views=views,
    )


class Reduction:
    """The sum of each batch over the ranks.

    Args:
        ranks: the ranks.
    """

    def __init__(self, ranks: Group) -> None:
        self._ranks = ranks
        self._layout: _Layout | None = None

    def run(self, train_state: TrainState, totals: StepTotals | None, signal: int = 0) -> list[RankNumbers]:
        """Sum the gradients and the totals in place, unless a rank ran out of memory; all ranks call it.

        Args:
            train_state: has the gradients of this rank, and the buffer to exchange them in.
            totals: of this rank; become those of all. None if memory ran out.
            signal: number of a signal that this rank got; 0 for none.

        Returns:
            The numbers of every rank.

        Raises:
            InputError: the losses of the ranks are of two kinds, or a gradient is sparse.
        """
        layout = self._layout_of(train_state)
        with self._ranks.waiting("sum the gradients"):
            of_ranks = self._sum(layout, train_state.gradients, numbers_of(totals, signal))
        if totals is not None and not any(numbers.failed for numbers in of_ranks):
            if train_state.scaler is not None and not totals.sizes:
                # A loss scale begins with its first use, which a rank without samples does not have.
                train_state.scaler.scale(torch.zeros((), device=train_state.device))
            sum_totals(totals, of_ranks)
        return of_ranks

    def _sum(self, layout: _Layout, gradients: Gradients, numbers: RankNumbers) -> list[RankNumbers]:
        """Sum the gradients over the ranks, and return the numbers of each."""
        own = [gradient for _, gradient in gradients.by_parameter()]
        write_numbers(layout.cells, self._ranks.rank, numbers)
        _write_flags(layout.flags, own)
        small = list[tuple[Tensor, Tensor]]()
        for number, view in layout.views.items():
            gradient = own[number]
            if gradient is None or gradient.is_sparse:
                view.zero_()
            else:
                small.append((view, gradient))
        _copy(small)
        self._ranks.start_sum(layout.buffer)()
        header, cells = layout.header.cpu(), layout.cells.numel()  # the host waits here, once
        of_ranks = [RankNumbers(*row) for row in read_numbers(header[:cells], self._ranks.world)]
        if any(row.failed for row in of_ranks):
            return of_ranks
        dense = dict[int, Tensor]()
        flags = header[cells:].tolist()
        for number, (parameter, gradient) in enumerate(zip(layout.parameters, own, strict=True)):
            if flags[number] >= SPARSE:
                shape = tuple(parameter.shape)
                raise InputError(
                    f"ranks sum no sparse gradients, and a parameter of shape {shape} has one: use "
                    "sparse=False in its embedding, or one rank"
                )
            if flags[number]:
                dense[number] = gradients.new_zeros(parameter) if gradient is None else gradient
        _copy([(dense[number], view) for number, view in layout.views.items() if number in dense])
        large = [gradient for number, gradient in dense.items() if number not in layout.views]
        whole = [gradient.contiguous() for gradient in large]
        for wait in [self._ranks.start_sum(gradient) for gradient in whole]:
            wait()
        _copy([pair for pair in zip(large, whole, strict=True) if pair[0] is not pair[1]])
        return of_ranks

    def _layout_of(self, train_state: TrainState) -> _Layout:
        """Return the places of the gradients, new ones if a schedule has added parameters."""
        parameters = [parameter for parameter, _ in train_state.gradients.by_parameter()]
        known = self._layout
        if known is None or list(map(id, known.parameters)) != list(map(id, parameters)):
            assert train_state.exchange is not None
            known = self._layout = _lay_out(train_state.exchange, parameters, self._ranks.world)
        return known


def _write_flags(flags: Tensor, gradients: Sequence[Tensor | None]) -> None:
    """Write the flag of each gradient, 0 for None."""
    values = [0.0 if gradient is None else SPARSE if gradient.is_sparse else 1.0 for gradient in gradients]
    if set(values) == {1.0}:
        flags.fill_(1.0)  # without a copy from the host
    else:
        flags.copy_(torch.tensor(values, device="cpu"))


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair to the first one."""
    if pairs:
        targets, sources = zip(*pairs, strict=True)
        torch._foreach_copy_(targets, sources)
