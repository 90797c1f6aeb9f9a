"""A training loop of the user's own: a plan's batches, their micro-batches, and the step of each batch.

The user's loop runs the forward passes. The rest is what `fit` does too: the order of the samples, the split,
and the arithmetic of `autobatch.step`.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Generic

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from autobatch.core.errors import InputError, NonFiniteError
from autobatch.core.records import GradientDtype, Plan
from autobatch.distributed.engine import Engine, OutOfMemory, Replicate
from autobatch.distributed.group import Group, join_loop
from autobatch.distributed.ranks import Ranks
from autobatch.integrations.data_source import (
    Data,
    Piece,
    SampleT,
    Source,
    check_ends,
    check_same_batch,
    check_same_data_on,
    open_source,
    samples_of,
    split,
)
from autobatch.planning import check_world_size, launched_world_size
from autobatch.report.words import plural
from autobatch.step.gradients import LOW_PRECISION, Gradients, exchange_buffer, norm_of
from autobatch.step.loss import CountsAhead, StepTotals, Term, check_form, normalize_loss, terms_of
from autobatch.step.optimizers import refuse_closure
from autobatch.step.restore import BufferSnapshot
from autobatch.step.train_state import TrainState
from autobatch.step.train_step import CountPass, StepResult, finish, run_backward
from autobatch.training.loop import LEAST_LOSS_SCALE
from autobatch.workload.contract import Collated, LossValue, kind_of
from autobatch.workload.data import size_of_sample
from autobatch.workload.nested import form_of
from autobatch.workload.order import GlobalBatch
from autobatch.workload.rng import (
    RandomState,
    capture_random_state,
    preserved_random_state,
    restore_random_state,
)
from autobatch.workload.split import SizeSplit, Split
from autobatch.workload.user_code import check_takes

CollatedT = TypeVar("CollatedT", default=Any)
Optimizer = torch.optim.Optimizer


@dataclass(frozen=True, slots=True)
class MicroBatch(Generic[CollatedT]):
    """The samples of one forward and backward pass."""

    data: CollatedT
    """The collated samples, on the device where the collate function or the loader put them."""
    samples: int
    """Number of samples in ``data``."""

    def __repr__(self) -> str:
        return f"<MicroBatch: {plural(self.samples, 'sample')}>"

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.samples


class Batch(Generic[CollatedT]):
    """The samples of one optimizer step, in micro-batches; or of several steps, with a pass for each."""

    def __init__(
        self,
        passes: Passes,
        make: Callable[[], Iterator[tuple[CollatedT, int]]],
        *,
        index: int,
        samples: int,
        own_samples: int,
    ) -> None:
        self.index = index
        """Number of the batch in the run, from 0."""
        self.samples = samples
        """The plan's target batch, or fewer if the data ends within this batch; those of all ranks."""
        self._name = f"batch {index}"
        self._own_samples = own_samples
        self._passes = passes
        self._make = make
        self._states: list[RandomState] = []
        """Before each micro-batch was made for the first time."""
        self._number = -1
        """Number of the pass, from 0."""
        self._begin_pass()

    def __repr__(self) -> str:
        own = "" if self._own_samples == self.samples else f", {self._own_samples:,} of them on this rank"
        return f"<Batch {self.index}: {plural(self.samples, 'sample')}{own}>"

    def _begin_pass(self) -> None:
        """Begin a pass over the micro-batches."""
        self._number += 1
        self._micro_batches = self._made() if self._passes.counts is None else self._counted(self._made())
        self._totals = StepTotals(samples=self.samples)
        self._open: int | None = None
        """Samples of the micro-batch that waits for `backward`; None if there is none."""
        self._is_drawn = False
        """True if the pass has no micro-batch left."""
        self._is_stepped = False

    def __iter__(self) -> Iterator[MicroBatch[CollatedT]]:
        """Begin a pass over the micro-batches, the first or, after a step, a further one.

        Each pass yields the same micro-batches. Map-style samples are read again for it, with the same random
        draws. A pass that was left before its end continues.

        Raises:
            InputError: no step was taken after the pass before, `backward` was not called for the previous
                micro-batch, or the samples cannot be collated.
        """
        if self._is_stepped:
            self._begin_pass()
        elif self._is_drawn:
            raise InputError(
                f"the micro-batches of {self._name} were asked for again before its step was taken: call "
                "batch.step(optimizer) after each pass over them"
            )
        return self._rest()

    def _rest(self) -> Iterator[MicroBatch[CollatedT]]:
        """Yield the remaining micro-batches of the pass."""
        for data, size in self._micro_batches:
            self._check_closed()
            self._open = size
            yield MicroBatch(data, size)
            del data  # this frame lives while the next micro-batch is fetched
        self._is_drawn = True

    def _made(self) -> Iterator[tuple[CollatedT, int]]:
        """Make the micro-batches of a pass; further passes repeat the random draws of the first."""
        made, is_first = self._make(), self._number == 0
        for place in count():
            if is_first:
                self._passes.random_state = capture_random_state(self._passes.random_state)
                self._states.append(self._passes.random_state)
            with nullcontext() if is_first else preserved_random_state():
                if not is_first:
                    restore_random_state(self._states[place])
                found = next(made, None)
            if found is None:
                return
            yield found
            del found  # as above

    def _counted(self, made: Iterator[tuple[CollatedT, int]]) -> Iterator[tuple[CollatedT, int]]:
        """Count the terms in all micro-batches of a pass, on all ranks, and then yield them."""
        counts, kept = self._passes.counts, deque(made)
        assert counts is not None
        counts.begin()
        for data, _ in kept:
            counts.add(data)
        own = dict(counts.sums())
        of_ranks = self._passes.open(self._number)[1].ranks.gather(own)
        for name in {name: None for one in of_ranks for name in one}:
            items = sum(one.get(name, 0.0) for one in of_ranks)
            self._totals.terms[name] = Term(items=items, expected=own.get(name, 0.0))
        while kept:
            yield kept.popleft()

    def backward(self, loss: LossValue) -> None:
        """Add the gradient of the current micro-batch to the gradient of the batch.

        Args:
            loss: the mean over the samples of the micro-batch, a 0-d tensor; or a `Loss` if it is a mean over
                something else; or several terms, as in `Workload`.

        Raises:
            InputError: ``loss`` is not a loss, or has terms whose counts in the whole batch are unknown, or
                there is no current micro-batch.
        """
        if self._open is None:
            raise InputError(
                f"batch.backward() was called without a micro-batch in {self._name}: call it once per "
                "micro-batch, inside `for micro in batch:`, with the sum of its losses"
            )
        if not (isinstance(loss, Tensor) and not loss.dim()) and not isinstance(loss, tuple | list | Mapping):
            raise InputError(
                "batch.backward() takes the mean over the samples of the micro-batch, a 0-d tensor, or "
                f"autobatch.Loss(total, count); found {form_of(loss)}"
            )
        train_state, _ = self._passes.open(self._number)
        gradients = self._passes.gradients
        if not self._totals.sizes:
            gradients.clear()
        terms = terms_of(loss)
        if self._passes.counts is not None:
            self._passes.counts.sums(check_form(self._totals, terms))
        elif not self._totals.sizes and CountPass(train_state, self._totals).needs_more(terms, self._open):
            names = check_form(self._totals, terms).counted
            wanted = ", ".join(f"{name!r}: …" for name in names)
            raise InputError(
                f"{self._name} has several micro-batches, and each term of its loss is divided by all it "
                f"counts in them: write autobatch.batches(…, counts=lambda data: {{{wanted}}}), with the "
                "count of each Loss as it follows from data, the samples of one micro-batch"
            )
        weighted = normalize_loss(train_state, self._totals, terms, self._open)
        with gradients.summed_apart():
            run_backward(train_state, self._totals, weighted, self._open)
        self._open = None

    def step(self, *optimizers: Optimizer, max_grad_norm: float | None = None) -> StepResult:
        """Take the optimizer step of a pass over the batch and free its gradients; every rank calls it.

        It reads the gradients of the parameters of these optimizers. All others that the pass has left, for
        example in the discriminator while the generator trains, are freed unread.

        Args:
            optimizers: those that step; without any, those given to `batches`.
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
        train_state, engine = self._passes.open(self._number)
        self._passes.choose(train_state, optimizers, len(self._totals.sizes))
        train_state.max_grad_norm = max_grad_norm
        self._is_stepped = True
        if train_state.exchange is None and engine.ranks.world > 1:
            train_state.exchange = self._passes.exchange()
        if not self._totals.sizes:
            train_state.gradients.clear()
        if isinstance(engine.combine(train_state, self._totals), OutOfMemory):
            check_ends(engine.ranks, has_more=True)
        result = finish(train_state, self._totals, mark=lambda _: None)
        scaler = train_state.scaler
        if result.applied or not result.count or (scaler and scaler.get_scale() >= LEAST_LOSS_SCALE):
            return result
        what = "gradient" if math.isfinite(result.loss) else f"loss ({result.loss})"
        raise NonFiniteError(
            f"the {what} of {self._name} is not finite, so no step was taken: check its samples, the "
            "learning rate and the precision"
        )

    def check_stepped(self) -> None:
        """Check that no gradient of this batch can leak into the next one.

        Raises:
            InputError: micro-batches were drawn, but no step was taken.
        """
        if not self._is_stepped and (self._open is not None or self._totals.sizes):
            raise InputError(
                f"no step was taken for {self._name}: call batch.step(optimizer) after the loop over its "
                "micro-batches"
            )

    def _check_closed(self) -> None:
        if self._open is not None:
            number = len(self._totals.sizes) + 1
            raise InputError(
                f"batch.backward() was not called for micro-batch {number} of {self._name}: call it with "
                "the loss of every micro-batch, in place of loss.backward()"
            )

    def _check_complete(self) -> None:
        if self._is_stepped:
            raise InputError(
                f"the step of {self._name} was already taken: call batch.step() once per pass, after another "
                "`for micro in batch:`"
            )
        self._check_closed()
        done = sum(self._totals.sizes)
        if done < self._own_samples:
            raise InputError(
                f"batch.step() was called after {done} of {self._own_samples} samples of {self._name}: "
                "finish `for micro in batch:` first"
            )


class Batches(Generic[CollatedT]):
    """The batches of a run; see `batches`."""

    def __init__(
        self,
        source: Source,
        plan: Plan,
        passes: Passes,
        *,
        parts: Split,
        start: int,
        size_of: Callable[[Any], float] | None,
    ) -> None:
        self._source = source
        self._plan = plan
        self._passes = passes
        self._split = parts
        self._start = start
        self._size_of = size_of
        self._is_started = False

    def __repr__(self) -> str:
        total = "batches" if self._source.total is None else plural(self._source.total, "batch", "batches")
        return f"<Batches: {total} of {self._plan.target_batch:,} samples>"

    def __len__(self) -> int:
        """Return the number of optimizer steps, for a schedule.

        Raises:
            TypeError: the data is a stream, and not ``steps`` alone was given.
        """
        if self._source.total is None:
            raise TypeError("the number of batches in a stream is unknown: give steps=, without epochs=")
        return self._source.total

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
        for index, drawn in enumerate(self._source.batches, self._start):
            if index == self._start and self._passes.ranks is not None:
                check_same_batch(self._passes.ranks, drawn)
            batch = self._batch(index, drawn)
            yield batch
            batch.check_stepped()
        if self._source.total is None:
            self._passes.end()

    def _batch(self, index: int, drawn: list[Piece]) -> Batch[CollatedT]:
        """Return the batch of the samples that all ranks draw."""
        samples = samples_of(drawn)
        places = GlobalBatch(index, 0, list(range(samples)))
        parts = self._split.parts(places, self._plan.micro_batch)
        sizes = [len(part.ids) for part in parts]
        own = list(split(drawn, [parts[0].ids[0], sum(sizes)]))[1] if parts else []
        cut = self._plan.size_cut
        # Without the function that the sizes of the plan come from, the batch is split by count.
        is_cut = cut is not None and self._source.has_samples and cut.by_size_of == bool(self._size_of)
        if is_cut and own:
            make = partial(self._cut_by_size, own)
        else:
            make = partial(self._source.micro_batches, own, sizes)
        return Batch(self._passes, make, index=index, samples=samples, own_samples=sum(sizes))

    def _cut_by_size(self, own: list[Piece]) -> Iterator[tuple[Collated, int]]:
        """Read all samples of this rank, in the order in which they were drawn, and cut them by size.

        Their random draws are those of a split by count, and no size need be known before.
        """
        assert self._plan.size_cut is not None
        samples = self._source.read(own)
        sizes = np.array([size_of_sample(one, self._size_of, place) for place, one in enumerate(samples)])
        by_size = SizeSplit(sizes=sizes, cut=self._plan.size_cut)
        for part in by_size.parts(GlobalBatch(0, 0, list(range(len(samples)))), by_size.largest):
            yield from self._source.collate([samples[place] for place in part.ids])


def batches(
    data: Data[SampleT],
    plan: Plan,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    start: int = 0,
    seed: int = 0,
    sampler: Iterable[int] | None = None,
    collate: Callable[[list[SampleT]], CollatedT] | None = None,
    batched: bool | None = None,
    batch_dim: int = 0,
    size_of: Callable[[Any], float] | None = None,
    counts: Callable[[CollatedT], Mapping[str, float] | Sequence[float]] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Batches[CollatedT]:
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
            a ``DataLoader``, whose batches are cut and concatenated again.
        plan: sets the target batch, the micro-batches and ``last_batch``; for example from `autobatch.plan`.
        steps: optimizer steps of the run, ``start`` included; the run ends at the smaller of ``steps`` and
            ``epochs``.
        epochs: passes over the data; 1 if neither ``steps`` nor ``epochs`` is given.
        start: batches to skip at the front, to resume a run.
        seed: sets the order of map-style data.
        sampler: the order of an epoch of map-style data, as indices; ``range(len(data))`` keeps the order.
        collate: makes a micro-batch out of samples; None for torch's default.
        batched: whether ``data`` yields batches; None to tell by its ``batch_size`` or ``batch_sampler``.
        batch_dim: dimension of the samples in the batches that ``data`` yields: 1 for time-major ones. A
            tensor with fewer dimensions has them in its first.
        size_of: the ``size_of`` of the workload, if it has one. Without it, a plan that cuts batches by these
            sizes is split by count.
        counts: returns the count of each `Loss` of a loss of several terms for the data of a micro-batch, by
            name. All micro-batches of a batch are read, and counted, before the first one is yielded.
        optimizer: one or several. Needed here, and then not in `Batch.step`, if parameters are in 16 bits.
        scaler: the loss scaler of fp16 training; a batch whose gradient overflows takes no step.

    Returns:
        The batches, which can be iterated once.

    Raises:
        InputError: the data or an option is invalid, or ranks were started unlike each other.
    """
    _check(plan, seed=seed, steps=steps, epochs=epochs, start=start)
    functions = {"counts": (counts, "data"), "collate": (collate, "samples"), "size_of": (size_of, "sample")}
    _check_objects(sampler, scaler, **functions)
    if steps is None and epochs is None:
        epochs = 1
    source = open_source(
        data,
        plan,
        steps=steps,
        epochs=epochs,
        start=start,
        seed=seed,
        sampler=sampler,
        collate=collate,
        batched=batched,
        batch_dim=batch_dim,
    )
    several = () if optimizer is None else optimizer
    given = tuple(several) if isinstance(several, list | tuple) else (several,)
    numbers = {"seed": seed, "start": start, "steps": steps, "epochs": epochs}
    ranks, parts = _open_ranks(plan, {**numbers, "number of batches": source.total})
    if ranks is not None:
        check_same_data_on(ranks, data, source, sampler)
    passes = Passes(ranks, given, scaler, plan.gradient_dtype)
    if counts is not None:
        passes.counts = CountsAhead(counts)
    return Batches(source, plan, passes, parts=parts, start=start, size_of=size_of)


def _open_ranks(plan: Plan, numbers: dict[str, int | None]) -> tuple[Group | None, Split]:
    """Join the ranks that a launcher has started, and return them and how they split a batch."""
    check_world_size(plan, launched_world_size(os.environ), "autobatch.batches")
    if plan.world_size == 1:
        return None, Split(multiple=plan.multiple)
    group = join_loop()
    group.check_equal({"the target batch": plan.target_batch, **numbers})
    return group, Split(group.rank, group.world, plan.multiple)


def _begin_exchange(parameters: list[nn.Parameter], ranks: Ranks) -> Tensor:
    """Return the buffer in which ranks sum their gradients, before the first step."""
    own = [parameter.detach() for parameter in parameters]
    norm = float(norm_of([one.double() for one in own])) if own else 0.0
    found = ranks.gather((len(own), sum(one.numel() for one in own), norm))
    for rank, other in enumerate(found):
        if other != found[0]:
            raise InputError(
                f"the weights of the ranks differ before the first step (norm {found[0][2]:g} on rank 0, "
                f"{other[2]:g} on rank {rank}): seed all ranks alike before the model is built, or load "
                "the same weights"
            )
    return exchange_buffer(parameters, own[0].device, world=ranks.world)


def _check(plan: Plan, **numbers: Any) -> None:
    if not isinstance(plan, Plan):
        raise InputError(f"autobatch.batches takes a plan of autobatch.plan, found {kind_of(plan)}")
    for name, value in numbers.items():
        if value is None and name in ("steps", "epochs"):
            continue
        if not isinstance(value, int | np.integer) or isinstance(value, bool):
            raise InputError(f"{name} must be a whole number, found {kind_of(value)}")
        least = 0 if name == "start" else 1
        if value < least and name != "seed":
            raise InputError(f"{name} is {value}: it must be {least} or more")


def _check_objects(
    sampler: object, scaler: object, **functions: tuple[Callable[..., object] | None, str]
) -> None:
    """Check the objects that were given; each function with the name of its only argument."""
    for name, (function, argument) in functions.items():
        whose = f"autobatch.batches({name}=…)"
        if function is not None and not callable(function):
            raise InputError(f"{whose} must be a function, found {kind_of(function)}")
        if function is not None:
            check_takes(function, whose, argument)
    for name, value, method, wanted in (
        ("sampler", sampler, "__iter__", "draw the indices of an epoch"),
        ("scaler", scaler, "is_enabled", "be a torch.amp.GradScaler"),
    ):
        if value is not None and not hasattr(value, method):
            raise InputError(f"autobatch.batches({name}=…) must {wanted}, found {kind_of(value)}")


def _not_here(*_: object) -> Any:
    raise AssertionError("the forward passes run in the user's loop")


class Passes:
    """The passes over the batches of a run, and the optimizers whose gradients they accumulate.

    The first passes over all batches share a train state, and so do the second ones: it knows the items of
    their loss, and the places of their gradients in the exchange of the ranks.

    Args:
        ranks: see `ranks`.
        optimizers: those that are known before the first pass.
        scaler: the loss scaler; None without one.
        dtype: type in which the gradients of 16-bit parameters are summed.
    """

    def __init__(
        self,
        ranks: Group | None,
        optimizers: tuple[Optimizer, ...],
        scaler: torch.amp.GradScaler | None,
        dtype: GradientDtype,
    ) -> None:
        self.ranks = ranks
        """Those that train together; None if this process trains alone."""
        # A disabled scaler would let gradients pass that are not finite.
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.counts: CountsAhead | None = None
        """Counts of several terms of the loss that follow from the data; None without."""
        self.random_state: RandomState | None = None
        """The last that was captured, in any batch: what has not changed since need not be read again."""
        self._opened: list[tuple[TrainState, Engine]] = []
        self._optimizers: tuple[Optimizer, ...] = ()
        self._has_stepped = False
        self._exchange: Tensor | None = None
        # The model is seen by the user's loop only.
        self.gradients = Gradients(nn.Module(), (), dtype=dtype)
        """Those of all known optimizers."""
        self._learn(optimizers, 0)

    def open(self, number: int) -> tuple[TrainState, Engine]:
        """Return the train state and the engine of the passes with this number, from 0."""
        while number >= len(self._opened):
            no_model = nn.Module()
            train_state = TrainState(
                model=no_model,
                loss=_not_here,
                optimizers=(),
                parameters=[],
                device=torch.device("cpu"),
                precision="fp32",
                scaler=self._scaler,
                max_grad_norm=None,
                gradients=self.gradients,
                buffers=BufferSnapshot(no_model),
            )
            engine = Engine()
            if self.ranks is not None:
                engine = Replicate(self.ranks, train_state, _not_here)
            self._opened.append((train_state, engine))
        return self._opened[number]

    def end(self) -> None:
        """Tell ranks that have more data, and so wait in the sum of a batch, that this one has none."""
        train_state, engine = self.open(0)
        if train_state.exchange is not None:
            engine.combine(train_state, OutOfMemory(""))
            check_ends(engine.ranks, has_more=False)

    def exchange(self) -> Tensor:
        """Return the buffer in which the ranks sum the gradients of any pass."""
        if self._exchange is None:
            assert self.ranks is not None
            self._exchange = _begin_exchange(list(_parameters_of(self._optimizers)), self.ranks)
        return self._exchange

    def choose(
        self, train_state: TrainState, optimizers: tuple[Optimizer, ...], micro_batches_done: int
    ) -> None:
        """Let these optimizers take the step of a pass, and free all gradients that they do not read."""
        self._learn(optimizers, micro_batches_done)
        chosen = optimizers or self._optimizers
        if not chosen:
            raise InputError(
                "batch.step() has no optimizer: give it one, or use autobatch.batches(optimizer=…)"
            )
        self._has_stepped = True
        train_state.gradients = (
            self.gradients if chosen == self._optimizers else self.gradients.taken_by(chosen)
        )
        if chosen != train_state.optimizers:
            train_state.optimizers = chosen
            train_state.parameters = list(_parameters_of(chosen))

    def _learn(self, optimizers: tuple[Optimizer, ...], micro_batches_done: int) -> None:
        """Accumulate the gradients of further optimizers from here on."""
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer):
                raise InputError(
                    "autobatch.batches(optimizer=[…]) and batch.step(…) take optimizers of torch.optim, "
                    f"found {kind_of(optimizer)}"
                )
        new = tuple(one for one in optimizers if one not in self._optimizers)
        if not new:
            return
        for optimizer in new:
            refuse_closure(optimizer)
        added, known = _parameters_of(new), _parameters_of(self._optimizers)
        unknown = [one for one in added if one not in known]
        if unknown and self._has_stepped:
            raise InputError(
                f"batch.step() was given {kind_of(new[0])} that no pass before has known, so the gradients "
                "of its parameters may hold those of other passes: give all optimizers of the run to "
                "autobatch.batches(…, optimizer=[first, second])"
            )
        low = [p.dtype for p in unknown if p.requires_grad and p.dtype in LOW_PRECISION]
        if low and micro_batches_done > 1 and self.gradients.dtype == "fp32":
            raise InputError(
                f"batch.step() was given parameters in {str(low[0]).removeprefix('torch.')}, whose "
                "gradients must be summed in float32 from the first micro-batch on: use "
                "autobatch.batches(…, optimizer=…) instead"
            )
        # An optimizer that another one replaces is forgotten with its state.
        kept = [one for one in self._optimizers if any(p not in added for p in _parameters_of((one,)))]
        self._optimizers = (*kept, *new)
        self.gradients = self.gradients.taken_by(self._optimizers)


def _parameters_of(optimizers: Iterable[Optimizer]) -> dict[nn.Parameter, None]:
    """Return the parameters that optimizers train, each once and in their order."""
    return {p: None for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
