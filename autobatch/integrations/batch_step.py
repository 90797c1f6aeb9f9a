"""The optimizer step of one batch whose forward passes run in the user's own loop.

The arithmetic is that of `autobatch.step`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor, nn

from autobatch.core.errors import InputError, NonFiniteError
from autobatch.core.records.base import GradientDtype
from autobatch.step.gradients import LOW_PRECISION, Gradients
from autobatch.step.loss_share import StepTotals, normalize_loss
from autobatch.step.restore import BufferSnapshot
from autobatch.step.train_state import TrainState
from autobatch.step.train_step import StepResult, finish, run_backward
from autobatch.training.loop import LEAST_LOSS_SCALE
from autobatch.workload.contract import Loss, kind_of
from autobatch.workload.nested import form_of

if TYPE_CHECKING:
    from autobatch.integrations.loop_ranks import LoopRanks

CollatedT = TypeVar("CollatedT")
Optimizer = torch.optim.Optimizer


@dataclass(frozen=True, slots=True)
class MicroBatch(Generic[CollatedT]):
    """The samples of one forward and backward pass."""

    data: CollatedT
    """The collated samples, on the device where the collate function or the loader put them."""
    samples: int
    """Number of samples in ``data``."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.samples


class Batch(Generic[CollatedT]):
    """The samples of one optimizer step, in micro-batches."""

    def __init__(
        self,
        train_state: TrainState,
        index: int,
        samples: int,
        micro_batches: Iterator[tuple[CollatedT, int]],
        *,
        ranks: LoopRanks | None = None,
    ) -> None:
        self.index = index
        """Number of the batch in the run, from 0."""
        self.samples = samples
        """The plan's target batch, or fewer if the data ends within this batch; those of all ranks."""
        self._ranks = ranks
        self._own_samples = samples if ranks is None else ranks.part(samples)[1]
        self._train_state = train_state
        self._micro_batches = micro_batches
        self._totals = StepTotals(samples=samples)
        self._open: int | None = None
        """Samples of the micro-batch that waits for `backward`; None if there is none."""
        self._is_stepped = False

    def __iter__(self) -> Iterator[MicroBatch[CollatedT]]:
        """Yield the remaining micro-batches.

        Raises:
            InputError: `backward` was not called for the previous one, or the samples cannot be collated.
        """
        for data, size in self._micro_batches:
            self._check_closed()
            self._open = size
            yield MicroBatch(data, size)
            del data  # this frame lives while the next micro-batch is fetched

    def backward(self, loss: Tensor | Loss) -> None:
        """Add the gradient of the current micro-batch to the gradient of the batch.

        Args:
            loss: the mean over the samples of the micro-batch, a 0-d tensor; or a `Loss` if it is a mean over
                something else.

        Raises:
            InputError: ``loss`` is not a loss, or there is no current micro-batch.
        """
        if self._open is None:
            raise InputError(
                f"batch.backward() was called without a micro-batch in {self._name()}: call it once per "
                "micro-batch, inside `for micro in batch:`, with the sum of its losses"
            )
        if not isinstance(loss, Loss) and not (isinstance(loss, Tensor) and loss.dim() == 0):
            raise InputError(
                "batch.backward() takes the mean over the samples of the micro-batch, a 0-d tensor, or "
                f"autobatch.Loss(total, count); found {form_of(loss)}"
            )
        gradients = self._train_state.gradients
        if not self._totals.sizes:
            gradients.clear()
        share = normalize_loss(self._train_state, self._totals, loss, self._open)
        with gradients.summed_apart():
            run_backward(self._train_state, self._totals, share, self._open)
        self._open = None

    def step(self, *optimizers: Optimizer, max_grad_norm: float | None = None) -> StepResult:
        """Take the optimizer step of the batch and free its gradients; every rank calls it.

        Args:
            optimizers: those that train the parameters; without any, those given to `batches`.
            max_grad_norm: the 2-norm to clip the gradient of the batch to; None for no clipping.

        Returns:
            Loss and gradient norm of the whole batch, and whether the step was ``applied``. It is not applied
            if the loss counted nothing or if the loss scale overflowed. Advance a schedule only after a step
            that was applied.

        Raises:
            InputError: samples of the batch are left, or the loss does not depend on the trained parameters.
            NonFiniteError: the loss or the gradient is not finite; no step was taken.
        """
        self._check_complete()
        train_state = self._train_state
        _set_optimizers(train_state, optimizers, len(self._totals.sizes), is_alone=self._ranks is None)
        train_state.max_grad_norm = max_grad_norm
        self._is_stepped = True
        if self._ranks is not None:
            self._ranks.combine(train_state, self._totals)
        result = finish(train_state, self._totals, mark=lambda _: None)
        scaler = train_state.scaler
        if result.applied or not result.count or (scaler and scaler.get_scale() >= LEAST_LOSS_SCALE):
            return result
        what = "gradient" if math.isfinite(result.loss) else f"loss ({result.loss})"
        raise NonFiniteError(
            f"the {what} of {self._name()} is not finite, so no step was taken: check its samples, the "
            "learning rate and the precision"
        )

    def check_stepped(self) -> None:
        """Check that no gradient of this batch can leak into the next one.

        Raises:
            InputError: micro-batches were drawn, but no step was taken.
        """
        if not self._is_stepped and (self._open is not None or self._totals.sizes):
            raise InputError(
                f"no step was taken for {self._name()}: call batch.step(optimizer) after the loop over its "
                "micro-batches"
            )

    def _check_closed(self) -> None:
        if self._open is not None:
            number = len(self._totals.sizes) + 1
            raise InputError(
                f"batch.backward() was not called for micro-batch {number} of {self._name()}: call it with "
                "the loss of every micro-batch, in place of loss.backward()"
            )

    def _check_complete(self) -> None:
        if self._is_stepped:
            raise InputError(
                f"the step of {self._name()} was already taken: call batch.step() once per batch"
            )
        self._check_closed()
        done = sum(self._totals.sizes)
        if done < self._own_samples:
            raise InputError(
                f"batch.step() was called after {done} of {self._own_samples} samples of {self._name()}: "
                "finish `for micro in batch:` first"
            )

    def _name(self) -> str:
        return f"batch {self.index}"


def train_state_of(
    optimizers: Iterable[Optimizer], scaler: torch.amp.GradScaler | None, dtype: GradientDtype
) -> TrainState:
    """Build the state that a step needs, without the model: only the user's loop sees that."""
    no_model = nn.Module()
    train_state = TrainState(
        model=no_model,
        loss=_no_loss,
        optimizers=(),
        parameters=[],
        device=torch.device("cpu"),
        precision="fp32",
        # A disabled scaler would let gradients pass that are not finite.
        scaler=scaler if scaler is not None and scaler.is_enabled() else None,
        max_grad_norm=None,
        gradients=Gradients(no_model, (), dtype=dtype),
        buffers=BufferSnapshot(no_model),
    )
    _set_optimizers(train_state, tuple(optimizers), 0, is_alone=True)
    return train_state


def _no_loss(*_: object) -> Tensor:
    raise AssertionError("the forward pass runs in the user's loop")


def _set_optimizers(
    train_state: TrainState, optimizers: tuple[Optimizer, ...], micro_batches_done: int, *, is_alone: bool
) -> None:
    """Make these optimizers the ones that the next step uses."""
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise InputError(
                f"batch.step() takes optimizers of torch.optim, one per argument, found {kind_of(optimizer)}"
            )
    if not (optimizers or train_state.optimizers or (is_alone and not micro_batches_done)):
        raise InputError("batch.step() has no optimizer: give it one, or use autobatch.batches(optimizer=…)")
    if not optimizers or optimizers == train_state.optimizers:
        return
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    low = {
        str(p.dtype).removeprefix("torch.")
        for p in parameters
        if p.requires_grad and p.dtype in LOW_PRECISION
    }
    dtype = train_state.gradients.dtype
    if low and micro_batches_done > 1 and dtype == "fp32":
        raise InputError(
            f"batch.step() was given parameters in {', '.join(sorted(low))}, whose gradients must be summed "
            "in float32 from the first micro-batch on: use autobatch.batches(…, optimizer=…) instead"
        )
    train_state.optimizers = optimizers
    train_state.parameters = list({id(p): p for p in parameters}.values())
    train_state.gradients = Gradients(train_state.model, optimizers, dtype=dtype)
