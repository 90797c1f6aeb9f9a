"""Losses over all samples of a batch, accumulated exactly by gradient caching.

    represent each micro-batch ──► concatenate rows ──► loss, backward ──► gradient of every row
    represent each micro-batch again ──► backward from its rows with their gradients

By the chain rule the result is the gradient of one pass over the whole batch, at the price of a second
forward pass (Gao et al. 2021, arXiv:2101.06983). The second pass sees the same random states per micro-batch
and the same buffers. The first pass records its graph too and drops it, because operators and compilers
behave differently without one. The second pass needs that memory anyway, and so both agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

from autobatch.core.errors import InputError
from autobatch.step.gradients import differentiate
from autobatch.step.loss import ONE, StepTotals, Term, at_least_32_bits
from autobatch.step.train_state import TrainState, precision_context
from autobatch.workload.contract import Collated, WholeBatchLoss, kind_of
from autobatch.workload.nested import map_tensors, tensors_of
from autobatch.workload.rng import RandomState, capture_random_state, restore_random_state
from autobatch.workload.user_code import user_code


class Rows:
    """The representations of a batch, one row per sample, filled by micro-batch; later their gradients."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self.collated: Any = None
        """All rows, in the form that ``represent`` returns; None before the first micro-batch. They are
        leaves, which require a gradient if they depend on trained parameters."""
        self._gradients: list[Tensor | None] = []

    @torch.no_grad()
    def put(self, place: slice, represented: Any) -> None:
        """Copy the rows that ``represent`` returned for the samples at this place of the batch.

        Raises:
            InputError: there is not one row per sample, or the form differs from the micro-batch before.
        """
        is_nested = isinstance(represented, Tensor | tuple | list | dict)
        parts, size = list(tensors_of(represented)) if is_nested else [], place.stop - place.start
        if not parts or any(part.dim() == 0 or len(part) != size for part in parts):
            found = _forms(parts) if parts else kind_of(represented)
            raise InputError(
                "WholeBatchLoss(represent=…) must return a tensor, or a tuple, list or dict of tensors, with "
                f"one row per sample: for {size} samples, found {found}"
            )
        if self.collated is None:
            self.collated = map_tensors(
                represented, lambda part: part.new_empty((self._samples, *part.shape[1:]))
            )
        wholes = list(tensors_of(self.collated))
        if [(w.shape[1:], w.dtype) for w in wholes] != [(part.shape[1:], part.dtype) for part in parts]:
            raise InputError(
                "WholeBatchLoss(represent=…) must return rows of one form for all micro-batches, found "
                f"{_forms(wholes)}, then {_forms(parts)}: pad them to one form"
            )
        for whole, part in zip(wholes, parts, strict=True):
            whole[place] = part
            whole.requires_grad_(whole.requires_grad or part.requires_grad)

    @torch.no_grad()
    def repeat(self, known: int) -> None:
        """Repeat the ``known`` rows to the end, for an attempt with fewer micro-batches than its batch."""
        while 0 < known < self._samples:
            more = min(known, self._samples - known)
            for whole in tensors_of(self.collated):
                whole[known : known + more] = whole[:more]
            known += more

    def keep_gradients(self) -> None:
        """Keep the gradients of the rows, and free the rows."""
        self._gradients = [whole.grad for whole in tensors_of(self.collated)]
        self.collated = None

    def run_backward(self, place: slice, represented: Any) -> None:
        """Run the backward pass of a micro-batch from its recomputed rows."""
        pairs = [
            (part, gradient[place])
            for part, gradient in zip(tensors_of(represented), self._gradients, strict=True)
            if part.requires_grad and gradient is not None
        ]
        if pairs:
            torch.autograd.backward([part for part, _ in pairs], [gradient for _, gradient in pairs])


def _forms(tensors: Iterable[Tensor]) -> str:
    return ", ".join(
        f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors
    )


def batch_samples(target: int | None, micro_batch: int, count: int) -> int:
    """Return the samples that ``count`` micro-batches of an attempt represent.

    A loss that sees all samples of a batch is given the ``target``, None if it does not or if it is unknown.
    """
    return micro_batch * count if target is None else max(target, micro_batch)


def accumulate_whole(
    train_state: TrainState, totals: StepTotals, micro_batches: Iterable[tuple[Collated, int]]
) -> None:
    """Add the gradient of the loss of a batch to the trained parameters, and the loss to its totals.

    Args:
        train_state: the model and its `WholeBatchLoss`.
        totals: of the batch. One micro-batch of its size needs one pass. If all micro-batches together are
            fewer (in an attempt), rows are repeated, so that the loss sees that many.
        micro_batches: each micro-batch with its number of samples, for two iterations (`Passes`).

    Raises:
        InputError: a part of the loss returns something invalid.
    """
    model, samples, mark = train_state.model, totals.samples, train_state.meter.mark
    loss = cast(WholeBatchLoss, train_state.loss)
    rows, states, places = Rows(samples), list[RandomState](), list[slice]()
    known = 0
    totals.sizes.append(samples)

    def forward(function: Callable[..., Any], *given: Any) -> Any:
        with precision_context(train_state.device, train_state.precision), user_code("loss", function):
            return function(model, *given)

    def backward(value: Any) -> None:
        """Run the backward pass of the loss."""
        if not isinstance(value, Tensor) or value.dim() != 0:
            raise InputError(f"WholeBatchLoss(loss=…) must return a 0-d tensor, found {kind_of(value)}")
        wide = at_least_32_bits(value)
        with user_code("the backward pass of its loss"):
            differentiate(train_state.scaler.scale(wide), 1.0)
        count = float(samples)
        totals.terms = {ONE: Term(is_mean=True, divisor=count, count=count, loss=wide.detach())}

    # No enumerate and no zip, which hold a micro-batch until the next one is there.
    for batch, size in micro_batches:
        states.append(capture_random_state(states[-1] if states else None))
        mark("forward")
        if size >= samples:
            value = forward(loss, batch)
            del batch
            mark("backward")
            backward(value)
            return
        # An attempt may exceed its batch.
        start = min(known, samples - size)
        places.append(slice(start, start + size))
        rows.put(places[-1], forward(loss.represent, batch))
        known += size
        # Free this micro-batch first: this frame lives while the next one is placed.
        del batch
    rows.repeat(known)
    mark("loss")
    backward(forward(loss.loss, rows.collated))
    rows.keep_gradients()
    after = capture_random_state()
    train_state.buffers.restore(keep=True)
    for batch, _ in micro_batches:
        restore_random_state(states.pop(0))
        mark("forward")
        represented = forward(loss.represent, batch)
        # From here on the micro-batch lives only as far as autograd has saved it.
        del batch
        mark("backward")
        with user_code("the backward pass of its loss"):
            rows.run_backward(places.pop(0), represented)
        del represented
    restore_random_state(after)
