"""The loop for people who own their loop: exact windows around their own forward pass.

for window in autobatch.windows(data, plan):        # exactly plan.target_batch samples each
    for micro in window:                            # in micro-batches that fit
        window.backward(loss(model, micro.batch))   # the mean over its samples, or a Loss
    window.step(optimizer, max_grad_norm=1.0)       # scale, check, clip, step, zero_grad
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils.data import IterableDataset

from autobatch.errors import InputError
from autobatch.integrations.cutting import Piece, as_piece, rejoin, samples_of, split, windows_of
from autobatch.integrations.window import Optimizer, Window, trainee_of
from autobatch.planning import micro_batches
from autobatch.records import Plan
from autobatch.samples import fetch, join_samples
from autobatch.step import Trainee
from autobatch.training.windows import Course
from autobatch.workload import Batch, kind_of

Collate: TypeAlias = Callable[[list[Any]], Batch] | None


class Windows:
    """The windows of a run; see `windows`."""

    def __init__(self, drawn: Iterable[Window], total: int | None) -> None:
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

    def __iter__(self) -> Iterator[Window]:
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
            window.refuse_unstepped()


def windows(
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
) -> Windows:
    """Cut data into windows of exactly the plan's target batch, for a loop of your own.

    Gradients must be clear before the first window (``optimizer.zero_grad()``), or be cleared by it: give the
    optimizer here. Nothing is moved to another device.

    Args:
        data: map-style data (in the order of ``autobatch.fit`` with this seed); or an iterable of samples; or
            a ``DataLoader``, whose batches are cut and joined anew along dimension 0.
        plan: its target batch, its split and its ``last_window`` count; of `autobatch.plan`, say.
        steps: windows to run, ``start`` included; where both are given, the fewer.
        epochs: passes over the data; with neither, one.
        start: windows to leave out at the front, to go on with a run.
        seed: of the order of map-style data.
        sampler: the order of an epoch of map-style data, as indices: ``range(len(data))`` shuffles nothing.
        collate: joins samples to a batch; ``None``: torch's default.
        batched: whether ``data`` gives batches; ``None``: so if it has a ``batch_size`` or ``batch_sampler``.
        optimizer: one or several; needed here where parameters are in 16 bits, and then not in `Window.step`.
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
        course = _course(len(data), plan, seed, steps=steps, epochs=epochs)
        total: int | None = max(0, course.total - start)
        drawn = ([Piece(index, 0, 1) for index in window.ids] for window in course.windows(start))
    else:
        endless = windows_of(source.epoch, plan.target_batch, epochs=epochs, last_window=plan.last_window)
        drawn = itertools.islice(endless, start, steps)
        total = max(0, steps - start) if steps is not None and epochs is None else None
    trainee = trainee_of([optimizer] if isinstance(optimizer, Optimizer) else optimizer, scaler)
    numbered = enumerate(drawn, start)
    return Windows((_window(trainee, plan, source, number, pieces) for number, pieces in numbered), total)


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

    def join(self, pieces: list[Piece]) -> Iterator[tuple[Batch, int]]:
        """A micro-batch; several where batches cannot be joined."""
        if self._batched:
            yield from rejoin(pieces)
            return
        samples = [piece.content for piece in pieces]
        if self.is_map_style:
            samples = fetch(self._data, samples)
        yield join_samples(samples, self._collate, option="collate= to autobatch.windows"), len(samples)


def _window(trainee: Trainee, plan: Plan, source: _Source, number: int, pieces: list[Piece]) -> Window:
    samples = samples_of(pieces)
    sizes = plan.micro_batches
    if sum(sizes) != samples:
        sizes = micro_batches(samples, plan.micro_batch)
    batches = itertools.chain.from_iterable(map(source.join, split(pieces, sizes)))
    return Window(trainee, number, samples, batches)


def _course(samples: int, plan: Plan, seed: int, *, steps: int | None, epochs: int | None) -> Course:
    if not samples:
        raise InputError("the data have 0 samples: at least 1 is needed")
    course = Course(
        samples=samples,
        target_batch=plan.target_batch,
        seed=seed,
        steps=steps,
        epochs=epochs,
        last_window=plan.last_window,
    )
    if plan.last_window == "drop" and samples < plan.target_batch:
        raise InputError(
            f"last_window='drop' leaves no window: {samples} samples for a target batch of "
            f"{plan.target_batch}; 'carry' or 'flush' keeps them"
        )
    return course


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
