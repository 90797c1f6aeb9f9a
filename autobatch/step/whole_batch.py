"""Losses over all samples of a batch, accumulated exactly by gradient caching.

    represent each micro-batch ──► concatenate rows ──► loss, backward ──► gradient of every row
    represent each micro-batch again ──► backward from its rows with their gradients

By the chain rule the result is the gradient of one pass over the whole batch, at the price of a second
forward pass (Gao et al. 2021, arXiv:2101.06983). The second pass sees the same random states per micro-batch
and the same buffers. The first pass records its graph too and drops it, because operators and compilers
behave differently without one. The second pass needs that memory anyway, and so both agree bit for bit.

Micro-batches may take the samples in any order, for example sorted by size. Each row goes to the place of its
sample in the batch, so that the loss sees the order in which the batch was drawn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

from torch import Tensor

from autobatch.core.errors import InputError
from autobatch.step.gradients import differentiate
from autobatch.step.loss import StepTotals, at_least_32_bits
from autobatch.step.rows import Rows
from autobatch.step.train_state import TrainState, precision_context
from autobatch.workload.contract import Collated, WholeBatchLoss
from autobatch.workload.nested import form_of
from autobatch.workload.rng import RandomState, capture_random_state, restore_random_state
from autobatch.workload.user_code import user_code

T = TypeVar("T")


def batch_samples(target: int | None, micro_batch: int, count: int) -> int:
    """Return the samples that ``count`` micro-batches of an attempt represent.

    A loss that sees all samples of a batch is given the ``target``, None if it does not or if it is unknown.
    """
    return micro_batch * count if target is None else max(target, micro_batch)


def accumulate_whole(
    train_state: TrainState,
    totals: StepTotals,
    micro_batches: Iterable[tuple[Collated, int]],
    mark: Callable[[str], None],
    places: Sequence[Sequence[int]] | None,
) -> None:
    """Add the gradient of the loss of a batch to the trained parameters, and the loss to its totals.

    Args:
        train_state: the model and its `WholeBatchLoss`.
        totals: of the batch. One micro-batch of its size needs one pass. If all micro-batches together are
            fewer (in an attempt), rows are repeated, so that the loss sees that many.
        micro_batches: each micro-batch with its number of samples, for two iterations (`nested.Passes`).
        mark: called with each phase.
        places: place in the batch of each sample of each micro-batch; None for samples in order.

    Raises:
        InputError: a part of the loss returns something invalid.
    """
    model, samples = train_state.model, totals.samples
    loss = cast(WholeBatchLoss, train_state.loss)
    rows, states, used = Rows(samples), deque[RandomState](), deque[Sequence[int]]()
    known = 0
    totals.divisor = float(samples)
    totals.sizes.append(samples)

    def forward(function: Callable[..., Any], *given: Any) -> Any:
        with precision_context(train_state.device, train_state.precision), user_code("loss", function):
            return function(model, *given)

    def backward(value: Any) -> None:
        """Run the backward pass of the loss."""
        if not isinstance(value, Tensor) or value.dim() != 0:
            raise InputError(f"WholeBatchLoss(loss=…) must return a 0-d tensor, found {form_of(value)}")
        wide = at_least_32_bits(value)
        with user_code("the backward pass of its loss"):
            differentiate(train_state.scaler.scale(wide), 1.0)
        totals.loss = wide.detach()

    def keep(micro_batch: T) -> T:
        states.append(capture_random_state(states[-1] if states else None))
        return micro_batch

    def rewind(micro_batch: T) -> T:
        restore_random_state(states.popleft())
        return micro_batch

    # No enumerate and no zip, which hold a micro-batch until the next one is there.
    for batch, size in map(keep, micro_batches):
        mark("forward")
        if size >= samples:
            value = forward(loss, batch)
            del batch
            mark("backward")
            backward(value)
            return
        # An attempt may exceed its batch.
        start = min(known, samples - size)
        used.append(range(start, start + size) if places is None else places[len(used)])
        rows.put(used[-1], forward(loss.represent, batch))
        known += size
        # Free this micro-batch first: this frame lives while the next one is placed.
        del batch
    rows.repeat(known)
    mark("loss")
    backward(forward(loss.loss, rows.leaves()))
    rows.keep_gradients()
    after = capture_random_state()
    train_state.buffers.restore(keep=True)
    for batch, _ in map(rewind, micro_batches):
        mark("forward")
        represented = forward(loss.represent, batch)
        # From here on the micro-batch lives only as far as autograd has saved it.
        del batch
        mark("backward")
        with user_code("the backward pass of its loss"):
            rows.run_backward(used.popleft(), represented)
        del represented
    restore_random_state(after)
