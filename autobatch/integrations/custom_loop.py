"""A plan's batches and micro-batches, for a training loop of the user's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, overload

import torch

from autobatch.core.errors import InputError
from autobatch.core.records.plan import Plan
from autobatch.integrations.batch_step import Batch, CollatedT, Optimizer, train_state_of
from autobatch.integrations.data_source import Data, DataSource, SampleT
from autobatch.integrations.size_batches import CutBySize, cut_of
from autobatch.planning import check_world_size, launched_world_size, micro_batches
from autobatch.step.train_state import TrainState
from autobatch.workload.contract import Collated, kind_of

if TYPE_CHECKING:
    from autobatch.integrations.loop_ranks import LoopRanks


class Batches(Generic[CollatedT]):
    """The batches of a run; see `batches`."""

    def __init__(self, drawn: Iterable[Batch[CollatedT]], total: int | None) -> None:
        self._drawn = drawn
        self._total = total
        self._is_started = False

    def __len__(self) -> int:
        """Return the number of optimizer steps, for a schedule.

        Raises:
            TypeError: the data is a stream, and not ``steps`` alone was given.
        """
        if self._total is None:
            raise TypeError("the number of batches in a stream is unknown: give steps=, without epochs=")
        return self._total

    def __iter__(self) -> Iterator[Batch[CollatedT]]:
        """Yield the batches.

        Raises:
            InputError: the step of the previous batch was not taken, the data ends too soon, or the batches
                were iterated before.
        """
        if self._is_started:
            raise InputError(
                "these batches were already iterated, and a batch may span two epochs: ask for all epochs at "
                "once with autobatch.batches(…, epochs=N)"
            )
        self._is_started = True
        for batch in self._drawn:
            yield batch
            batch.check_stepped()


@overload
def batches(
    data: Data[SampleT],
    plan: Plan,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    start: int = 0,
    seed: int = 0,
    sampler: Iterable[int] | None = None,
    collate: Callable[[list[SampleT]], CollatedT],
    batched: bool | None = None,
    size_of: Callable[[Any], float] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    scaler: torch.amp.GradScaler | None = None,
) -> Batches[CollatedT]: ...


@overload
def batches(
    data: Data[Any],
    plan: Plan,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    start: int = 0,
    seed: int = 0,
    sampler: Iterable[int] | None = None,
    collate: None = None,
    batched: bool | None = None,
    size_of: Callable[[Any], float] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    scaler: torch.amp.GradScaler | None = None,
) -> Batches[Any]: ...


def batches(
    data: Data[Any],
    plan: Plan,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    start: int = 0,
    seed: int = 0,
    sampler: Iterable[int] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    batched: bool | None = None,
    size_of: Callable[[Any], float] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    scaler: torch.amp.GradScaler | None = None,
) -> Batches[Any]:
    """Cut data into batches of exactly the plan's target batch, for a training loop of your own.

        for batch in autobatch.batches(dataset, plan, epochs=3):
            for micro in batch:
                inputs, labels = micro.data
                batch.backward(cross_entropy(model(inputs), labels))
            batch.step(optimizer, max_grad_norm=1.0)

    Clear the gradients before the first batch (``optimizer.zero_grad()``), or give the optimizer here. The
    data stays on its device. Under torchrun, each rank trains its part of every batch, and ``batch.step``
    sums the gradients over the ranks: seed all ranks alike, and do not wrap the model in DDP.

    Args:
        data: map-style data, in the order of ``autobatch.fit`` with this seed; or an iterable of samples; or
            a ``DataLoader``, whose batches are cut and concatenated again along dimension 0.
        plan: sets the target batch, the micro-batches and ``last_batch``; for example from `autobatch.plan`.
        steps: optimizer steps of the run, ``start`` included; the run ends at the smaller of ``steps`` and
            ``epochs``.
        epochs: passes over the data; 1 if neither ``steps`` nor ``epochs`` is given.
        start: batches to skip at the front, to resume a run.
        seed: sets the order of map-style data.
        sampler: the order of an epoch of map-style data, as indices; ``range(len(data))`` keeps the order.
        collate: makes a micro-batch out of samples; None for torch's default.
        batched: whether ``data`` yields batches; None to tell by its ``batch_size`` or ``batch_sampler``.
        size_of: the ``size_of`` of the workload, if it has one. Without it, a plan that cuts batches by these
            sizes is split by count.
        optimizer: one or several. Needed here, and then not in `Batch.step`, if parameters are in 16 bits.
        scaler: the loss scaler of fp16 training; a batch whose gradient overflows takes no step.

    Returns:
        The batches, which can be iterated once.

    Raises:
        InputError: the data or an option is invalid, or ranks were started unlike each other.
    """
    _check(plan, steps=steps, epochs=epochs, start=start)
    if steps is None and epochs is None:
        epochs = 1
    source = DataSource(data, sampler=sampler, collate=collate, batched=batched)
    drawn, total = source.batches(plan, seed=seed, steps=steps, epochs=epochs, start=start)
    given = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    train_state = train_state_of(given, scaler, plan.gradient_dtype)
    numbers = {"seed": seed, "start": start, "steps": steps, "epochs": epochs, "number of batches": total}
    cutter = _Cutter(plan, source, cut_of(plan, source, size_of), train_state, _join_ranks(plan, numbers))
    return Batches((cutter.batch(index, one) for index, one in enumerate(drawn, start)), total)


@dataclass(frozen=True)
class _Cutter:
    """Rules that make a batch of the samples that were drawn for it."""

    plan: Plan
    source: DataSource
    cut: CutBySize | None
    train_state: TrainState
    ranks: LoopRanks | None

    def batch(self, index: int, drawn: list[Any]) -> Batch[Any]:
        """Return the batch of the samples that all ranks draw."""
        samples = self.source.count(drawn)
        own = drawn if self.ranks is None else self.source.part(drawn, *self.ranks.part(samples))
        return Batch(self.train_state, index, samples, self._micro_batches(index, own), ranks=self.ranks)

    def _micro_batches(self, index: int, own: list[Any]) -> Iterator[tuple[Collated, int]]:
        """Yield the micro-batches of the samples of this process, each with its number of samples."""
        if not own:
            return iter(())
        if self.cut is not None:
            return self.cut.micro_batches(self.source, index, own)
        sizes, samples = self.plan.micro_batches, self.source.count(own)
        if sum(sizes) != samples:
            sizes = micro_batches(samples, self.plan.micro_batch)
        return self.source.micro_batches(own, sizes)


def _join_ranks(plan: Plan, numbers: dict[str, int | None]) -> LoopRanks | None:
    """Join the ranks that a launcher has started; None if this process trains alone."""
    check_world_size(plan, launched_world_size(os.environ), "autobatch.batches")
    if plan.world_size == 1:
        return None
    # Only here: one process needs no torch.distributed.
    from autobatch.integrations.loop_ranks import join_ranks

    return join_ranks(plan, numbers)


def _check(plan: Plan, **numbers: int | None) -> None:
    if not isinstance(plan, Plan):
        raise InputError(f"autobatch.batches takes a plan of autobatch.plan, found {kind_of(plan)}")
    for name, value in numbers.items():
        least = 0 if name == "start" else 1
        if value is not None and value < least:
            raise InputError(f"{name} is {value}: it must be {least} or more")
