"""The sum of a batch over the ranks, after the last backward pass of each.

    [ numbers of every rank | a flag for each parameter | small gradients … ]      one reduction of one buffer
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
from autobatch.distributed.group import Group
from autobatch.step.gradients import Gradients
from autobatch.step.loss import StepTotals, divisor_of
from autobatch.step.train_state import TrainState


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
    """Replace the sums of one rank by those of all."""
    totals.loss = sum(one.loss for one in of_ranks)
    totals.count = sum(one.items for one in of_ranks) if any(one.has_count for one in of_ranks) else None
    totals.divisor = max(one.divisor for one in of_ranks)


def write_numbers(cells: Tensor, rank: int, numbers: Sequence[float | Tensor]) -> None:
    """Write the numbers of a rank in its place in a buffer, and zeros in the places of all others.

    A number is written as the eight bytes of a float64, a byte in each element. So a sum over the ranks, in
    whatever type of float, has the numbers of every rank bit for bit. The host does not wait for a GPU.
    """
    device = cells.device
    if device.type == "cpu":
        values = torch.tensor([float(one) for one in numbers], dtype=torch.float64, device=device)
    else:
        each = [torch.as_tensor(one, dtype=torch.float64, device=device).detach() for one in numbers]
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
class _Places:
    """The places of gradients in the buffer of a train state."""

    parameters: list[nn.Parameter]
    buffer: Tensor
    header: Tensor
    """The numbers of the ranks and the flags."""
    cells: Tensor
    """The numbers of the ranks."""
    flags: Tensor
    """An element for each parameter."""
    packed: list[int]
    """Indices of the parameters whose gradients have a place in the buffer, in its order."""
    views: list[Tensor]
    """Their places."""
    alone: list[int]
    """Indices of those that are summed in their own memory."""
    sparse: list[int]
    """Indices of those whose gradients are sparse, the same on all ranks."""


def _lay_out(buffer: Tensor, parameters: list[nn.Parameter], world: int, sparse: list[int]) -> _Places:
    """Give the smallest gradients a place in the buffer, as many as it holds."""
    cells = num_cells(world, len(RankNumbers._fields))
    at = cells + len(parameters)
    if at > buffer.numel():
        # A schedule has added parameters since the buffer was made.
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
    return _Places(
        parameters=parameters,
        buffer=buffer[:at],
        header=header,
        cells=header[:cells],
        flags=header[cells:],
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
        self._places: _Places | None = None

    def run(self, train_state: TrainState, totals: StepTotals | None, signal: int = 0) -> list[RankNumbers]:
        """Sum the gradients and the totals in place, unless a rank ran out of memory; all ranks call it.

        Args:
            train_state: has the gradients of this rank, and the buffer to exchange them in.
            totals: of this rank; become those of all. None if memory ran out.
            signal: number of a signal that this rank got; 0 for none.

        Returns:
            The numbers of every rank.

        Raises:
            InputError: the losses of the ranks are of two kinds.
        """
        if not self._scale_is_agreed:
            self._agree_on_scale(train_state, totals)
        places = self._places_of(train_state)
        with self._ranks.waiting("sum the gradients"):
            of_ranks = self._sum(places, train_state.gradients, numbers_of(totals, signal))
        if any(one.failed for one in of_ranks):
            # The batch runs again from the scale before it. The rank that failed may have had the only sparse
            # gradient.
            self._scale_is_agreed, self._places = False, None
        elif totals is not None:
            if train_state.scaler is not None and not totals.sizes:
                # A loss scale begins with its first use, which a rank without samples does not have.
                train_state.scaler.scale(torch.zeros((), device=train_state.device))
            sum_totals(totals, of_ranks)
        return of_ranks

    def _sum(self, places: _Places, gradients: Gradients, numbers: RankNumbers) -> list[RankNumbers]:
        """Sum the gradients over the ranks, and return the numbers of each."""
        own = _dense(gradients, places.sparse)
        write_numbers(places.cells, self._ranks.rank, numbers)
        if any(one is None for one in own):
            places.flags.copy_(torch.tensor([float(one is not None) for one in own], device="cpu"))
        else:
            places.flags.fill_(1.0)
        _copy_between(places, own, to_buffer=True)
        self._ranks.start_sum(places.buffer)()
        # The host waits here, once.
        header = places.header.cpu()
        cells = places.cells.numel()
        of_ranks = [RankNumbers(*one) for one in read_numbers(header[:cells], self._ranks.world)]
        if any(one.failed for one in of_ranks):
            return of_ranks
        flags = header[cells:].tolist()
        for number, parameter in enumerate(places.parameters):
            if not flags[number]:
                continue
            if number in places.sparse:
                summed = _as_sparse(own[number], parameter)
                self._ranks.start_sum(summed)()
                gradients.put(parameter, summed)
            elif own[number] is None:
                own[number] = gradients.new_zeros(parameter)
        _copy_between(places, own, to_buffer=False)
        self._sum_in_place([gradient for number in places.alone if (gradient := own[number]) is not None])
        return of_ranks

    def _places_of(self, train_state: TrainState) -> _Places:
        """Return the places of the gradients, new ones if a schedule has added parameters."""
        found = train_state.gradients.by_parameter()
        parameters = [parameter for parameter, _ in found]
        known = self._places
        if known is None or list(map(id, known.parameters)) != list(map(id, parameters)):
            assert train_state.exchange is not None
            own = [number for number, (_, one) in enumerate(found) if one is not None and one.is_sparse]
            sparse = sorted({number for of_rank in self._ranks.gather(own) for number in of_rank})
            known = self._places = _lay_out(train_state.exchange, parameters, self._ranks.world, sparse)
        return known

    def _sum_in_place(self, gradients: list[Tensor]) -> None:
        """Sum large gradients, all of them at the same time."""
        whole = [gradient.contiguous() for gradient in gradients]
        for wait in [self._ranks.start_sum(one) for one in whole]:
            wait()
        for gradient, one in zip(gradients, whole, strict=True):
            if one is not gradient:
                gradient.copy_(one)

    def _agree_on_scale(self, train_state: TrainState, totals: StepTotals | None) -> None:
        """Bring the sums of all ranks to one D, in the first batches of a run."""
        totals = totals if totals is not None and totals.sizes else None
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


def _copy_between(places: _Places, own: list[Tensor | None], *, to_buffer: bool) -> None:
    """Copy gradients to their places in the buffer, or back; a place without a gradient gets zeros."""
    views, gradients = [], []
    for view, number in zip(places.views, places.packed, strict=True):
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
    if gradient is not None:
        return gradient.coalesce() if gradient.is_sparse else gradient.to_sparse(1)
    indices = torch.empty((1, 0), dtype=torch.int64, device=like.device)
    values = like.new_empty((0, *like.shape[1:]))
    # Before torch 2.13 it warns that nothing is checked, even if an argument asks for that.
    with torch.sparse.check_sparse_tensor_invariants(enable=False):  # type: ignore[no-untyped-call]
        return torch.sparse_coo_tensor(indices, values, like.shape).coalesce()
