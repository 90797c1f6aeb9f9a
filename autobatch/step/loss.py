"""The part of a micro-batch in the loss of its batch: a total over items, divided by one divisor.

If the loss is a mean over samples, the divisor is the samples of the batch. For a `Loss`, and in 16 bits, it
is a power of two near the items of the batch, so that dividing by it rounds nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from autobatch.core.errors import InputError
from autobatch.step.gradients import LOW_PRECISION
from autobatch.step.tensors import is_readable
from autobatch.step.train_state import TrainState
from autobatch.workload.contract import Loss
from autobatch.workload.nested import form_of


@dataclass(kw_only=True, slots=True)
class StepTotals:
    """Sums over the micro-batches of one batch."""

    samples: int
    """Samples of the batch."""
    loss: Tensor | float = 0.0
    """Σ of the backpropagated losses, before any loss scale."""
    count: Tensor | float | None = None
    """Σ of the counts of `Loss`; None if the loss is a mean over samples."""
    least_count: Tensor | float = 0.0
    """The least of these counts if they are tensors, else 0: numbers are checked at once."""
    divisor: float = 1.0
    """D: each total was divided by it."""
    sizes: list[int] = field(default_factory=list)
    """Samples of each micro-batch so far."""
    first_norm: Tensor | float | None = None
    """Norm of the gradient after the first micro-batch, before D ÷ N and with any loss scale; None if not
    requested."""
    first_count: Tensor | float = 0.0
    """Count of the first micro-batch."""
    norms: list[float] | None = None
    """Norms of the gradients of each optimizer if ranks share them; None if this process has whole ones."""


class WeightedLoss(NamedTuple):
    """The part of a micro-batch in the loss of its batch: ``loss`` × ``weight``."""

    loss: Tensor
    """A 0-d tensor of 32 bits or more."""
    weight: float


def normalize_loss(
    train_state: TrainState, totals: StepTotals, loss: Tensor | Loss, size: int
) -> WeightedLoss:
    """Return the part of a micro-batch of ``size`` samples in the loss of its batch: ``total ÷ D``.

    The ``totals`` are those of the micro-batches before; the count of this one is added.

    Raises:
        InputError: ``loss`` is no loss, or of another kind than that of the micro-batch before, or its count
            is a number that is not finite or is negative.
    """
    if totals.sizes and isinstance(loss, Loss) != (totals.count is not None):
        raise InputError(
            "the workload's loss returned a Loss for one micro-batch and a tensor for another: "
            "return one kind"
        )
    if isinstance(loss, Loss):
        total, count = loss
        if not isinstance(total, Tensor) or total.dim() != 0:
            raise InputError(f"the total of a Loss must be a 0-d tensor, found {form_of(total)}")
        if isinstance(count, Tensor) and count.dim() != 0:
            raise InputError(f"the count of a Loss must be a number or a 0-d tensor, found {form_of(count)}")
        check_has_value(total)
        if not isinstance(count, Tensor) and not 0 <= count < math.inf:
            raise invalid_count(count, "a micro-batch")
        if totals.count is None:
            totals.count = 0.0
            totals.divisor = divisor_of(_items_per_sample(train_state, count, size), totals.samples)
        if isinstance(count, Tensor):
            count = count.detach().double()
            least = totals.least_count
            totals.least_count = torch.minimum(least, count) if isinstance(least, Tensor) else count
        totals.count = totals.count + count
        return WeightedLoss(at_least_32_bits(total), 1 / totals.divisor)
    if isinstance(loss, Tensor) and loss.dim() == 0:
        check_has_value(loss)
        if not totals.sizes:
            low = loss.dtype in LOW_PRECISION
            totals.divisor = _power_of_two(totals.samples) if low else float(totals.samples)
        return WeightedLoss(at_least_32_bits(loss), size / totals.divisor)
    raise InputError(f"the workload's loss must return a 0-d tensor or a Loss, found {form_of(loss)}")


def read_totals(totals: StepTotals, norms: list[Tensor | float | None]) -> tuple[list[float], list[float]]:
    """Bring the sums and norms to the host in one transfer, with 0 in place of None.

    Returns:
        The loss, the count, the norm and the count of the first micro-batch, the least count; and the norms.
    """
    values = [totals.loss, totals.count, totals.first_norm, totals.first_count, totals.least_count, *norms]
    away = [value for value in values if isinstance(value, Tensor) and not is_readable(value)]
    if len(away) > 1:
        read = iter(torch.stack([value.to(away[0].device, torch.float64) for value in away]).tolist())
        values = [next(read) if any(value is one for one in away) else value for value in values]
    found = [0.0 if value is None else float(value) for value in values]
    return found[:5], found[5:] if totals.norms is None else totals.norms


def divisor_of(items_per_sample: float | None, samples: int) -> float:
    """Return D for a `Loss`: a power of two near the items of a batch of this size; None if unknown."""
    return _power_of_two((items_per_sample or 1.0) * samples)


def invalid_count(count: float, of: str) -> InputError:
    """Build the error of a count that is no number of items."""
    return InputError(
        f"the count of the workload's Loss must be finite and at least 0, found {count:g} for {of}, so "
        "no step was taken: return the number of items that its total sums over"
    )


def at_least_32_bits(value: Tensor) -> Tensor:
    """Return a value in float32 if it has 16 bits, else itself."""
    return value.float() if value.dtype in LOW_PRECISION else value


def check_has_value(loss: Tensor) -> None:
    """Check that a loss has a value, unless the step is traced.

    Raises:
        InputError: it is a tensor of an earlier trace, or was computed from one.
    """
    # By its name, because the import of the class takes a second.
    if type(loss).__name__ != "FakeTensor":
        return
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:
        raise InputError(
            "the workload's loss is a tensor without a value (a FakeTensor): code of the workload has kept "
            "a tensor that it built while the memory of a step was traced, for example in an lru_cache. "
            "Build it before autobatch is called, or in the model as a buffer"
        )


def _items_per_sample(train_state: TrainState, count: float | Tensor, size: int) -> float:
    if train_state.items_per_sample is None:
        # The only wait for the device during accumulation, once per run.
        found = float(count.detach() if isinstance(count, Tensor) else count) / max(size, 1)
        if not (found > 0 and math.isfinite(found)):
            return 1.0
        train_state.items_per_sample = found
    return train_state.items_per_sample


def _power_of_two(value: float) -> float:
    return float(2.0 ** round(math.log2(value)))
