"""One optimizer step around a forward pass that is not ours, with the arithmetic of `autobatch.step`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from autobatch.core.errors import InputError, NonFiniteError
from autobatch.core.records import Plan
from autobatch.integrations.stream import Piece, as_piece, cut_epoch, rejoin, samples_of, split
from autobatch.planning import micro_batches
from autobatch.step.gradients import LOW_PRECISION, Gradients
from autobatch.step.restore import BufferSnapshot
from autobatch.step.train_state import TrainState
from autobatch.step.train_step import StepResult, StepTotals, finish, normalize_loss, run_backward
from autobatch.training.loop import LEAST_LOSS_SCALE
from autobatch.workload.contract import Collated, Loss, kind_of
from autobatch.workload.data import collate_samples, fetch
from autobatch.workload.nested import form_of
from autobatch.workload.order import GlobalBatchSampler

Optimizer = torch.optim.Optimizer


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward and backward pass takes."""

    batch: Collated
    """As the collate or the loader made it; on the device that it came from."""
    samples: int

    def __len__(self) -> int:
        """Samples."""
        return self.samples


class Batch:
    """The samples of one optimizer step, in micro-batches."""

    def __init__(
        self, train_state: TrainState, index: int, samples: int, batches: Iterator[tuple[Collated, int]]
    ) -> None:
        self.index = index
        """Number of the window in the run, from 0."""
        self.samples = samples
        """The plan's target batch; fewer where the data of the window end."""
        self._trainee = train_state
        self._batches = batches
        self._tally = StepTotals(samples=samples)
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
        if not self._tally.sizes:
            gradients.clear()
        share = normalize_loss(self._trainee, self._tally, loss, self._open)
        with gradients.summed_in_float32():
            run_backward(self._trainee, self._tally, share, self._open)
        self._open = None

    def step(self, *optimizers: Optimizer, max_grad_norm: float | None = None) -> StepResult:
        """Take the optimizer step of the window, and free its gradients.

        Args:
            optimizers: those whose parameters the window trains; none: those given to `batches`.
            max_grad_norm: clip the window's gradient to this 2-norm; ``None``: no clipping.

        Returns:
            Loss and gradient norm of the whole window, and whether a step was taken: none is where nothing
            was counted, or where the loss scale overflowed. Step a schedule only where ``applied``.

        Raises:
            InputError: the window is not through, or the loss does not depend on what is trained.
            NonFiniteError: the loss or the gradient is not finite; no step was taken.
        """
        self._refuse_unfinished()
        train_state = self._trainee
        _train(train_state, optimizers, len(self._tally.sizes))
        train_state.max_grad_norm = max_grad_norm
        self._stepped = True
        result = finish(train_state, self._tally, mark=lambda _: None)
        scaler = train_state.scaler
        if result.applied or not result.count or (scaler and scaler.get_scale() >= LEAST_LOSS_SCALE):
            return result
        what = "gradient" if math.isfinite(result.loss) else f"loss ({result.loss})"
        raise NonFiniteError(
            f"the {what} of {self._where()} is not finite: no step was taken; look at its samples, at the "
            "learning rate and at the precision"
        )

    def check_stepped(self) -> None:
        """Refuse to go on to the next window where gradients of this one would leak into it.

        Raises:
            InputError: micro-batches were drawn, and no step was taken.
        """
        if not self._stepped and (self._open is not None or self._tally.sizes):
            raise InputError(
                f"no step was taken for {self._where()}: call window.step(optimizer) after its loop"
            )

    def _refuse_open(self) -> None:
        if self._open is not None:
            raise InputError(
                f"window.backward() was not called for micro-batch {len(self._tally.sizes) + 1} of "
                f"{self._where()}: call it with the loss of every micro-batch, in place of loss.backward()"
            )

    def _refuse_unfinished(self) -> None:
        if self._stepped:
            raise InputError(f"the step of {self._where()} was taken already: step once a window")
        self._refuse_open()
        done = sum(self._tally.sizes)
        if done < self.samples:
            raise InputError(
                f"window.step() came after {done} of {self.samples} samples of {self._where()}: go through "
                "all of `for micro in window:` first"
            )

    def _where(self) -> str:
        return f"window {self.index}"


def train_state_of(optimizers: Iterable[Optimizer], scaler: torch.amp.GradScaler | None) -> TrainState:
    """What a step needs to know, of a model that only the user's own loop sees."""
    nobody = nn.Module()
    train_state = TrainState(
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
        buffers=BufferSnapshot(nobody),
    )
    _train(train_state, tuple(optimizers), 0)
    return train_state


def _no_loss(*_: object) -> Tensor:
    raise AssertionError("the forward pass is the user's")


def _train(train_state: TrainState, optimizers: tuple[Optimizer, ...], micro_batches: int) -> None:
    """Let a window's gradients be those of these optimizers."""
    for one in optimizers:
        if not isinstance(one, Optimizer):
            raise InputError(f"window.step() takes optimizers of torch.optim, found {kind_of(one)}")
    if not (optimizers or train_state.optimizers or not micro_batches):
        raise InputError(
            "window.step() needs an optimizer: give it here, or to autobatch.windows(optimizer=…)"
        )
    if not optimizers or optimizers == train_state.optimizers:
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
    train_state.optimizers = optimizers
    train_state.parameters = list({id(p): p for p in parameters}.values())
    train_state.gradients = Gradients(train_state.model, optimizers)


Collate: TypeAlias = Callable[[list[Any]], Collated] | None


class Batches:
    """The windows of a run; see `batches`."""

    def __init__(self, drawn: Iterable[Batch], total: int | None) -> None:
        self._drawn = drawn
        self._total = total
        self._begun = False

    def __len__(self) -> int:
        """Optimizer steps of the run, for a schedule.

        Raises:
            TypeError: of a stream it is only known where ``steps`` and no ``epochs`` were given.
        """
        if self._total is None:
            raise TypeError("how many windows a stream gives is not known beforehand: give steps=")
        return self._total

    def __iter__(self) -> Iterator[Batch]:
        """Draw the windows.

        Raises:
            InputError: the window before has not taken its step, the data end too soon, or the windows were
                iterated before.
        """
        if self._begun:
            raise InputError(
                "these windows were begun already, and they run on over the end of an epoch: ask for all of "
                "them at once, autobatch.windows(…, epochs=N)"
            )
        self._begun = True
        for window in self._drawn:
            yield window
            window.check_stepped()


def batches(
    data: Any,
    plan: Plan,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    start: int = 0,
    seed: int = 0,
    sampler: Iterable[int] | None = None,
    collate: Collate = None,
    batched: bool | None = None,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    scaler: torch.amp.GradScaler | None = None,
) -> Batches:
    """Cut data into windows of exactly the plan's target batch, for a loop of your own.

    Gradients must be clear before the first window (``optimizer.zero_grad()``), or be cleared by it: give the
    optimizer here. Nothing is moved to another device.

    Args:
        data: map-style data (in the order of ``autobatch.fit`` with this seed); or an iterable of samples; or
            a ``DataLoader``, whose batches are cut and joined anew along dimension 0.
        plan: its target batch, its split and its ``last_batch`` count; of `autobatch.plan`, say.
        steps: windows to run, ``start`` included; where both are given, the fewer.
        epochs: passes over the data; with neither, one.
        start: windows to leave out at the front, to go on with a run.
        seed: of the order of map-style data.
        sampler: the order of an epoch of map-style data, as indices: ``range(len(data))`` shuffles nothing.
        collate: joins samples to a batch; ``None``: torch's default.
        batched: whether ``data`` gives batches; ``None``: so if it has a ``batch_size`` or ``batch_sampler``.
        optimizer: one or several; needed here where parameters are in 16 bits, and then not in `Batch.step`.
        scaler: of fp16 training; windows whose gradients overflow take no step.

    Returns:
        The windows, to be iterated once.

    Raises:
        InputError: the data or an option cannot be.
    """
    _check(plan, steps=steps, epochs=epochs, start=start)
    if steps is None and epochs is None:
        epochs = 1
    source = _Source(data, sampler=sampler, collate=collate, batched=batched)
    drawn: Iterable[list[Piece]]
    if source.is_map_style and sampler is None:
        own = _sampler_of(len(data), plan, seed, steps=steps, epochs=epochs)
        total: int | None = max(0, own.total - start)
        drawn = ([Piece(index, 0, 1) for index in window.ids] for window in own.batches(start))
    else:
        endless = cut_epoch(source.epoch, plan.target_batch, epochs=epochs, last_batch=plan.last_batch)
        drawn = itertools.islice(endless, start, steps)
        total = max(0, steps - start) if steps is not None and epochs is None else None
    train_state = train_state_of([optimizer] if isinstance(optimizer, Optimizer) else optimizer, scaler)
    numbered = enumerate(drawn, start)
    return Batches((_batch(train_state, plan, source, number, pieces) for number, pieces in numbered), total)


class _Source:
    """What the user handed over, as passes of pieces, and how pieces are joined to batches."""

    def __init__(
        self, data: Any, *, sampler: Iterable[int] | None, collate: Collate, batched: bool | None
    ) -> None:
        if batched is None:
            batched = any(getattr(data, name, None) is not None for name in ("batch_size", "batch_sampler"))
        has_items = all(hasattr(data, name) for name in ("__getitem__", "__len__"))
        self.is_map_style = has_items and not batched and not isinstance(data, IterableDataset | Mapping)
        if not self.is_map_style and not hasattr(data, "__iter__"):
            raise InputError(
                f"autobatch.windows takes map-style data, samples or a DataLoader, found {kind_of(data)}"
            )
        if batched and collate is not None:
            raise InputError("collate= joins samples, and the data give batches: give it to the loader")
        if sampler is not None and not self.is_map_style:
            raise InputError("sampler= needs map-style data (__getitem__ and __len__): give it to the loader")
        self._data = data
        self._sampler = sampler
        self._collate = collate
        self._batched = batched

    def epoch(self) -> Iterator[Piece]:
        """One pass over the data, or over their indices."""
        if self._batched:
            return map(as_piece, self._data)
        return (Piece(one, 0, 1) for one in (self._data if self._sampler is None else self._sampler))

    def join(self, pieces: list[Piece]) -> Iterator[tuple[Collated, int]]:
        """A micro-batch; several where batches cannot be joined."""
        if self._batched:
            yield from rejoin(pieces)
            return
        samples = [piece.content for piece in pieces]
        if self.is_map_style:
            samples = fetch(self._data, samples)
        yield collate_samples(samples, self._collate, option="collate= to autobatch.windows"), len(samples)


def _batch(train_state: TrainState, plan: Plan, source: _Source, number: int, pieces: list[Piece]) -> Batch:
    samples = samples_of(pieces)
    sizes = plan.micro_batches
    if sum(sizes) != samples:
        sizes = micro_batches(samples, plan.micro_batch)
    batches = itertools.chain.from_iterable(map(source.join, split(pieces, sizes)))
    return Batch(train_state, number, samples, batches)


def _sampler_of(
    samples: int, plan: Plan, seed: int, *, steps: int | None, epochs: int | None
) -> GlobalBatchSampler:
    if not samples:
        raise InputError("the data have 0 samples: at least 1 is needed")
    sampler = GlobalBatchSampler(
        samples=samples,
        target_batch=plan.target_batch,
        seed=seed,
        steps=steps,
        epochs=epochs,
        last_batch=plan.last_batch,
    )
    if plan.last_batch == "drop" and samples < plan.target_batch:
        raise InputError(
            f"last_batch='drop' leaves no window: {samples} samples for a target batch of "
            f"{plan.target_batch}; 'carry' or 'flush' keeps them"
        )
    return sampler


def _check(plan: Plan, **numbers: int | None) -> None:
    if not isinstance(plan, Plan):
        raise InputError(f"autobatch.windows takes the plan of autobatch.plan, found {kind_of(plan)}")
    if plan.world_size != 1:
        raise InputError(
            f"autobatch.windows runs in one process, and the plan is for {plan.world_size} ranks: counts "
            "would have to be added up over them"
        )
    for name, value in numbers.items():
        least = 0 if name == "start" else 1
        if value is not None and value < least:
            raise InputError(f"{name} is {value}: it must be {least} or more")
