"""One optimizer step around a forward pass that is not ours; the arithmetic is that of `autobatch.step`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autobatch.batches import form_of
from autobatch.errors import InputError, NonFiniteError
from autobatch.gradients import LOW_PRECISION, Gradients
from autobatch.state import BufferKeeper
from autobatch.step import Tally, Trainee, WindowResult, add_backward, finish, share_of
from autobatch.training.loop import LEAST_LOSS_SCALE
from autobatch.workload import Batch, Loss, kind_of

Optimizer = torch.optim.Optimizer


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward and backward pass takes."""

    batch: Batch
    """As the collate or the loader made it; on the device that it came from."""
    samples: int

    def __len__(self) -> int:
        """Samples."""
        return self.samples


class Window:
    """The samples of one optimizer step, in micro-batches."""

    def __init__(
        self, trainee: Trainee, index: int, samples: int, batches: Iterator[tuple[Batch, int]]
    ) -> None:
        self.index = index
        """Number of the window in the run, from 0."""
        self.samples = samples
        """The plan's target batch; fewer where the data of the window end."""
        self._trainee = trainee
        self._batches = batches
        self._tally = Tally(samples=samples)
        self._open: int | None = None
        self._stepped = False

    def __iter__(self) -> Iterator[MicroBatch]:
        """The micro-batches that are left.

        Raises:
            InputError: `backward` was not called for the one before, or the samples cannot be joined.
        """
        for batch, size in self._batches:
            self._refuse_open()
            self._open = size
            yield MicroBatch(batch, size)
            del batch  # the next one is fetched while this frame lives

    def backward(self, loss: Tensor | Loss) -> None:
        """Go backward from the loss of the micro-batch at hand, so that gradients add up to the window's.

        Args:
            loss: the mean over the samples of the micro-batch, a 0-d tensor; or a `Loss` where the mean is
                over something else.

        Raises:
            InputError: it is no loss, or no micro-batch is at hand.
        """
        if self._open is None:
            raise InputError(
                f"window.backward() has no micro-batch to count for in {self._where()}: call it once for "
                "each, inside `for micro in window:`; add several losses up first"
            )
        if not isinstance(loss, Loss) and not (isinstance(loss, Tensor) and loss.dim() == 0):
            raise InputError(
                "window.backward() takes the mean over the samples of the micro-batch, a 0-d tensor, or "
                f"autobatch.Loss(total, count); found {form_of(loss)}"
            )
        gradients = self._trainee.gradients
        if not self._tally.micro_batches:
            gradients.discard()
        share = share_of(self._trainee, self._tally, loss, self._open)
        with gradients.adding():
            add_backward(self._trainee, self._tally, share, self._open)
        self._open = None

    def step(self, *optimizers: Optimizer, max_grad_norm: float | None = None) -> WindowResult:
        """Take the optimizer step of the window, and free its gradients.

        Args:
            optimizers: those whose parameters the window trains; none: those given to `windows`.
            max_grad_norm: clip the window's gradient to this 2-norm; ``None``: no clipping.

        Returns:
            Loss and gradient norm of the whole window, and whether a step was taken: none is where nothing
            was counted, or where the loss scale overflowed. Step a schedule only where ``applied``.

        Raises:
            InputError: the window is not through, or the loss does not depend on what is trained.
            NonFiniteError: the loss or the gradient is not finite; no step was taken.
        """
        self._refuse_unfinished()
        trainee = self._trainee
        _train(trainee, optimizers, len(self._tally.micro_batches))
        trainee.max_grad_norm = max_grad_norm
        self._stepped = True
        result = finish(trainee, self._tally, mark=lambda _: None)
        scaler = trainee.scaler
        if result.applied or not result.count or (scaler and scaler.get_scale() >= LEAST_LOSS_SCALE):
            return result
        what = "gradient" if math.isfinite(result.loss) else f"loss ({result.loss})"
        raise NonFiniteError(
            f"the {what} of {self._where()} is not finite: no step was taken; look at its samples, at the "
            "learning rate and at the precision"
        )

    def refuse_unstepped(self) -> None:
        """Refuse to go on to the next window where gradients of this one would leak into it.

        Raises:
            InputError: micro-batches were drawn, and no step was taken.
        """
        if not self._stepped and (self._open is not None or self._tally.micro_batches):
            raise InputError(
                f"no step was taken for {self._where()}: call window.step(optimizer) after its loop"
            )

    def _refuse_open(self) -> None:
        if self._open is not None:
            raise InputError(
                f"window.backward() was not called for micro-batch {len(self._tally.micro_batches) + 1} of "
                f"{self._where()}: call it with the loss of every micro-batch, in place of loss.backward()"
            )

    def _refuse_unfinished(self) -> None:
        if self._stepped:
            raise InputError(f"the step of {self._where()} was taken already: step once a window")
        self._refuse_open()
        done = sum(self._tally.micro_batches)
        if done < self.samples:
            raise InputError(
                f"window.step() came after {done} of {self.samples} samples of {self._where()}: go through "
                "all of `for micro in window:` first"
            )

    def _where(self) -> str:
        return f"window {self.index}"


def trainee_of(optimizers: Iterable[Optimizer], scaler: torch.amp.GradScaler | None) -> Trainee:
    """What a step needs to know, of a model that only the user's own loop sees."""
    nobody = nn.Module()
    trainee = Trainee(
        model=nobody,
        loss=_no_loss,
        optimizers=(),
        parameters=[],
        device=torch.device("cpu"),
        precision="fp32",
        # A scaler that is switched off would let gradients pass that are not finite.
        scaler=scaler if scaler is not None and scaler.is_enabled() else None,
        max_grad_norm=None,
        gradients=Gradients(nobody, ()),
        buffers=BufferKeeper(nobody),
    )
    _train(trainee, tuple(optimizers), 0)
    return trainee


def _no_loss(*_: object) -> Tensor:
    raise AssertionError("the forward pass is the user's")


def _train(trainee: Trainee, optimizers: tuple[Optimizer, ...], micro_batches: int) -> None:
    """Let a window's gradients be those of these optimizers."""
    for one in optimizers:
        if not isinstance(one, Optimizer):
            raise InputError(f"window.step() takes optimizers of torch.optim, found {kind_of(one)}")
    if not (optimizers or trainee.optimizers or not micro_batches):
        raise InputError(
            "window.step() needs an optimizer: give it here, or to autobatch.windows(optimizer=…)"
        )
    if not optimizers or optimizers == trainee.optimizers:
        return
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    low = {
        str(p.dtype).removeprefix("torch.")
        for p in parameters
        if p.requires_grad and p.dtype in LOW_PRECISION
    }
    if low and micro_batches > 1:
        raise InputError(
            f"parameters in {', '.join(sorted(low))}: their gradients must be added up in float32 from the "
            "first micro-batch on, so give the optimizer to autobatch.windows(…, optimizer=…) already"
        )
    trainee.optimizers = optimizers
    trainee.parameters = list({id(p): p for p in parameters}.values())
    trainee.gradients = Gradients(trainee.model, optimizers)
