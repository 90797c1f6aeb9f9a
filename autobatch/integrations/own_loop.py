"""A training loop of the user's own: the batches of a plan, their micro-batches, and the step of each batch.

The user's loop runs the forward passes. The order of the samples, their split, the feed and the arithmetic of
a step are those of `fit`.
"""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from autobatch.core.errors import InputError, NonFiniteError
from autobatch.core.knobs import LOADER_WORKERS
from autobatch.core.records import Plan
from autobatch.distributed.engine import Engine, Whole
from autobatch.distributed.group import Group, join_loop
from autobatch.distributed.ranks import Ranks
from autobatch.distributed.shared_stream import open_stream
from autobatch.planning import check_world_size, launched_world_size
from autobatch.report.words import plural
from autobatch.step.gradients import Gradients, exchange_buffer, norm_of
from autobatch.step.loss import CountsAhead, StepTotals, Term, check_form, counts_of, normalize_loss, terms_of
from autobatch.step.optimizers import refuse_closure
from autobatch.step.restore import BufferSnapshot
from autobatch.step.train_state import TrainState
from autobatch.step.train_step import StepResult, finish, run_backward
from autobatch.training.loop import LEAST_LOSS_SCALE
from autobatch.workload.contract import LossValue, WholeBatchLoss, Workload, is_stream, kind_of
from autobatch.workload.data import WorstCaseSampler
from autobatch.workload.data_digest import check_same_data, digest_data
from autobatch.workload.feed import Feed, open_feed
from autobatch.workload.nested import form_of
from autobatch.workload.order import GlobalBatch, GlobalBatchSampler, epoch_of, order_digest
from autobatch.workload.reference import WorkloadSource, find_workload
from autobatch.workload.rng import (
    RandomState,
    capture_random_state,
    preserved_random_state,
    restore_random_state,
)
from autobatch.workload.split import Split, split_of
from autobatch.workload.streams import COUNTED, ENDLESS, StreamSampler, count_samples

Optimizer = torch.optim.Optimizer
logger = logging.getLogger("autobatch")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The samples of one forward and backward pass."""

    data: Any
    """The collated samples, on the device where the collate function has put them."""
    samples: int
    """Number of samples in ``data``."""

    def __repr__(self) -> str:
        return f"<MicroBatch: {plural(self.samples, 'sample')}>"

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.samples

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a micro-batch has no {name!r}: its samples are micro.data")


@dataclass
class Run:
    """The parts that all batches of a run have in common.

    The first passes over all batches share a train state, and so do the second ones: it knows the items of
    their loss, and the places of their gradients in the exchange of the ranks.
    """

    optimizers: tuple[Optimizer, ...]
    ranks: Ranks
    scaler: torch.amp.GradScaler | None
    counts: CountsAhead | None
    """Counts of several terms of the loss that follow from the data; None without."""
    split: Split
    micro_batch: int
    gradients: Gradients
    """Those of all optimizers."""
    exchange: Tensor | None
    """Buffer in which ranks sum their gradients; None for one process."""
    has_further_passes: bool = True
    """True to remember the random states of a batch, for further passes over it.

    False once a batch of a loop with one optimizer has had only one pass, as reading them takes long.
    """
    passes: list[tuple[TrainState, Engine]] = field(default_factory=list)

    def of_pass(self, number: int) -> tuple[TrainState, Engine]:
        """Return the train state and the engine of the passes with this number, from 0."""
        if number == len(self.passes):
            parameters = nn.ParameterList(_parameters_of(self.optimizers))
            train_state = TrainState(
                model=parameters,
                loss=_not_here,
                optimizers=self.optimizers,
                parameters=list(parameters),
                device=torch.device("cpu"),
                precision="fp32",
                scaler=self.scaler,
                max_grad_norm=None,
                gradients=self.gradients,
                buffers=BufferSnapshot(parameters),
                exchange=self.exchange,
            )
            ranks = self.ranks
            engine = Whole(ranks, train_state, _not_here) if isinstance(ranks, Group) else Engine()
            self.passes.append((train_state, engine))
        return self.passes[number]

    def choose(self, number: int, optimizers: tuple[Optimizer, ...]) -> tuple[TrainState, Engine]:
        """Return `of_pass` for some of the optimizers, and free all gradients that these do not read.

        Raises:
            InputError: an optimizer is not one of the run.
        """
        train_state, engine = self.of_pass(number)
        for optimizer in optimizers:
            if optimizer not in self.optimizers:
                raise InputError(
                    f"batch.step() was given {kind_of(optimizer)} that trains nothing in this run: give all "
                    "optimizers to autobatch.batches(…, optimizer=[first, second])"
                )
        chosen = optimizers or self.optimizers
        if chosen != train_state.optimizers:
            train_state.optimizers, train_state.parameters = chosen, list(_parameters_of(chosen))
        is_all = chosen == self.optimizers
        train_state.gradients = self.gradients if is_all else self.gradients.taken_by(chosen)
        self.has_further_passes = len(self.optimizers) > 1 or number > 0
        return train_state, engine


class Batch:
    """The samples of one optimizer step, in micro-batches; or of several steps, with a pass for each."""

    def __init__(self, run: Run, feed: Feed, drawn: GlobalBatch) -> None:
        self.index = drawn.index
        """Number of the batch in the run, from 0."""
        self.samples = len(drawn.ids)
        """The plan's target batch, or fewer if the data ends within this batch; those of all ranks."""
        self._run, self._feed, self._drawn = run, feed, drawn
        self._sizes = [len(part.ids) for part in run.split.parts(drawn, run.micro_batch)]
        self._states: list[RandomState] = []
        """Before each micro-batch was made for the first time."""
        self._begin_pass(0)

    def __repr__(self) -> str:
        own = sum(self._sizes)
        share = "" if own == self.samples else f", {own:,} of them on this rank"
        return f"<Batch {self.index}: {plural(self.samples, 'sample')}{share}>"

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a batch has no {name!r}, because it comes in micro-batches: write `for micro in batch:`, and "
            "use micro.data"
        )

    def _begin_pass(self, number: int) -> None:
        self._number = number
        self._micro_batches = self._made() if self._run.counts is None else self._counted(self._made())
        self._totals = StepTotals(samples=self.samples)
        self._open: int | None = None
        """Samples of the micro-batch that waits for `backward`; None if there is none."""
        self._is_stepped = False

    def __iter__(self) -> Iterator[MicroBatch]:
        """Begin a pass over the micro-batches, the first or, after a step, a further one.

        Each pass yields the same micro-batches. Samples with an index are read again for it, with the same
        random draws. A pass that was left before its end continues.

        Raises:
            InputError: no step was taken after the pass before, `backward` was not called for the previous
                micro-batch, or the samples cannot be collated.
        """
        if self._is_stepped:
            self._run.has_further_passes = True
            self._begin_pass(self._number + 1)
        elif self._sizes and len(self._totals.sizes) == len(self._sizes):
            raise self._refused(
                "its micro-batches were asked for again before its step was taken",
                "call batch.step() after each pass over them",
            )
        # No generator, because its frame would hold each micro-batch until the next one is there.
        return map(self._opened, self._micro_batches)

    def _opened(self, made: tuple[Any, int]) -> MicroBatch:
        self._check_closed()
        self._open = made[1]
        return MicroBatch(*made)

    def _made(self) -> Iterator[tuple[Any, int]]:
        """Make the micro-batches of a pass, a further one with the random draws of the first."""
        is_first, batch, size = self._number == 0, self._drawn, self._run.micro_batch
        fed = self._feed.collated(batch, size) if is_first else self._feed.repeated(batch, size)
        for place, samples in enumerate(self._sizes):
            if is_first and self._run.has_further_passes:
                self._states.append(capture_random_state())
            with nullcontext() if is_first else preserved_random_state():
                if not is_first and self._states:
                    restore_random_state(self._states[place])
                made = deque((next(fed),))  # popped, so that this frame does not hold it
            yield made.pop(), samples

    def _counted(self, made: Iterable[tuple[Any, int]]) -> Iterator[tuple[Any, int]]:
        """Count the terms in all micro-batches of a pass, on all ranks, and then yield them."""
        counts, kept = self._run.counts, deque(made)
        assert counts is not None
        counts.begin()
        for place in range(len(kept)):
            counts.add(kept[place][0])
        own = dict(counts.sums())
        of_ranks = self._run.ranks.gather(own)
        for name in {name: None for known in of_ranks for name in known}:
            items = sum(known.get(name, 0.0) for known in of_ranks)
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
            raise self._refused(
                "batch.backward() was called without a micro-batch",
                "call it once in each round of `for micro in batch:`, with the sum of its losses",
            )
        if not (isinstance(loss, Tensor) and not loss.dim()) and not isinstance(loss, tuple | list | Mapping):
            raise InputError(
                "batch.backward() takes the mean over the samples of the micro-batch, a 0-d tensor, or "
                f"autobatch.Loss(total, count); found {form_of(loss)}"
            )
        gradients, totals = self._run.gradients, self._totals
        if not totals.sizes:
            gradients.clear()
        terms = terms_of(loss)
        if counted := check_form(totals, terms).counted:
            self._check_counts(counted, terms)
        train_state, _ = self._run.of_pass(self._number)
        weighted = normalize_loss(train_state, totals, terms, self._open)
        with gradients.summed_apart():
            run_backward(train_state, totals, weighted, self._open)
        self._open = None

    def _check_counts(self, names: Sequence[str], terms: Mapping[str, Any]) -> None:
        """Check that the counts of several terms in the whole batch are known, as in a single micro-batch."""
        totals = self._totals
        if self._run.counts is not None:
            self._run.counts.sums(totals.form)
        elif self._open == self.samples:
            totals.terms |= {name: Term(items=count) for name, count in counts_of(terms).items()}
        elif not totals.sizes:
            wanted = ", ".join(f"{name!r}: …" for name in names)
            raise self._refused(
                "each term of its loss is divided by all that it counts in several micro-batches",
                f"write Workload(counts=lambda batch: {{{wanted}}}), with the count of each Loss as it "
                "follows from the samples of one micro-batch",
            )

    def step(self, *optimizers: Optimizer, max_grad_norm: float | None = None) -> StepResult:
        """Take the optimizer step of a pass over the batch and free its gradients; every rank calls it.

        It reads the gradients of the parameters of these optimizers. All others that the pass has left, for
        example in the discriminator while the generator trains, are freed unread.

        Args:
            optimizers: those that step, of those given to `batches`; without any, all of them.
            max_grad_norm: the 2-norm to clip the gradient of the batch to; None for no clipping.

        Returns:
            Loss and gradient norm of the whole batch, and whether the step was ``applied``. It is not applied
            if the loss counted nothing or if the loss scale overflowed. Advance a schedule only after a step
            that was applied.

        Raises:
            InputError: samples of the batch are left, or the loss does not depend on the trained parameters.
            NonFiniteError: the loss or the gradient is not finite; no step was taken.
        """
        if self._is_stepped:
            raise self._refused("its step was already taken", "call it once per pass over the micro-batches")
        self._check_closed()
        if len(self._totals.sizes) < len(self._sizes):
            done, own = sum(self._totals.sizes), sum(self._sizes)
            raise self._refused(
                f"batch.step() was called after {done} of {own} samples", "finish `for micro in batch:` first"
            )
        train_state, engine = self._run.choose(self._number, optimizers)
        train_state.max_grad_norm = max_grad_norm
        if not self._totals.sizes:
            train_state.gradients.clear()
        engine.combine(train_state, self._totals)
        result, scaler = finish(train_state, self._totals, mark=lambda _: None), train_state.scaler
        self._is_stepped = True
        if result.applied or not result.count or (scaler and scaler.get_scale() >= LEAST_LOSS_SCALE):
            return result
        what = "gradient" if math.isfinite(result.loss) else f"loss ({result.loss})"
        raise NonFiniteError(
            f"the {what} of batch {self.index} is not finite, so no step was taken: check its samples, the "
            "learning rate and the precision"
        )

    def check_stepped(self) -> None:
        """Check that no gradient of this batch can leak into the next one.

        Raises:
            InputError: micro-batches were drawn, but no step was taken.
        """
        if not self._is_stepped and (self._open is not None or self._totals.sizes):
            raise self._refused(
                "no step was taken", "call batch.step() after the loop over its micro-batches"
            )

    def _check_closed(self) -> None:
        if self._open is not None:
            raise self._refused(
                f"batch.backward() was not called for micro-batch {len(self._totals.sizes) + 1}",
                "call it with the loss of every micro-batch, in place of loss.backward()",
            )

    def _refused(self, found: str, advice: str) -> InputError:
        return InputError(f"batch {self.index}: {found}: {advice}")


class Batches:
    """The batches of a run; see `batches`."""

    def __init__(
        self, run: Run, sampler: GlobalBatchSampler, start: int, feeding: AbstractContextManager[Feed]
    ) -> None:
        self._run, self._sampler, self._start, self._feeding = run, sampler, start, feeding
        self._is_started = False

    def __repr__(self) -> str:
        return f"<Batches: {plural(len(self), 'batch', 'batches')} of {self._sampler.target_batch:,} samples>"

    def __len__(self) -> int:
        """Return the number of batches, for a schedule."""
        return max(0, self._sampler.total - self._start)

    def __iter__(self) -> Iterator[Batch]:
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
        with self._feeding as feed:
            for drawn in self._sampler.batches(self._start):
                batch = Batch(self._run, feed, drawn)
                yield batch
                batch.check_stepped()


def batches(
    workload: WorkloadSource,
    plan: Plan,
    *,
    optimizer: Optimizer | Sequence[Optimizer],
    steps: int | None = None,
    epochs: int | None = None,
    start: int = 0,
    seed: int = 0,
    scaler: torch.amp.GradScaler | None = None,
) -> Batches:
    """Return batches of exactly the plan's target batch, for a training loop of your own.

        for batch in autobatch.batches(workload, plan, optimizer=optimizer, epochs=3):
            for micro in batch:
                inputs, labels = micro.data
                batch.backward(cross_entropy(model(inputs), labels))
            batch.step(max_grad_norm=1.0)

    The samples come as in `autobatch.fit` with this seed, and stay where the collate function has put them.
    Under torchrun, each rank trains its part of every batch, and ``batch.step`` sums the gradients over the
    ranks: seed all ranks alike, and do not wrap the model in DDP.

    Args:
        workload: the one that was planned for: has the data, their order, ``collate``, ``size_of``,
            ``counts`` and the loader processes.
        plan: sets the target batch, the micro-batches; of `autobatch.plan`.
        optimizer: one or several, which train your model. Of several, each pass over a batch chooses.
        steps: optimizer steps of the run, ``start`` included; the run ends at the smaller of ``steps`` and
            ``epochs``.
        epochs: passes over the data; 1 if neither ``steps`` nor ``epochs`` is given.
        start: optimizer steps to skip, to continue a run.
        seed: sets the order of data with an index.
        scaler: the loss scaler of fp16 training; a batch whose gradient overflows takes no step.

    Returns:
        The batches, which can be iterated once.

    Raises:
        InputError: the workload, the plan or an option is invalid, or ranks were started unlike each other.
    """
    if steps is None and epochs is None:
        epochs = 1
    optimizers = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
    numbers = {"seed": seed, "start": start, "steps": steps, "epochs": epochs}
    _check(plan, scaler, optimizers, numbers)
    known = find_workload(workload, seed)
    if isinstance(known.loss, WholeBatchLoss):
        raise InputError(
            "a WholeBatchLoss needs the rows of the whole batch, which autobatch.batches does not keep: use "
            "autobatch.fit"
        )
    check_world_size(plan, launched_world_size(os.environ), "autobatch.batches")
    ranks = Ranks() if plan.world_size == 1 else join_loop()
    ranks.check_equal({"target batch": plan.target_batch, **numbers})
    sampler = _sampler_of(known, plan, ranks, seed=seed, steps=steps, epochs=epochs)
    if isinstance(sampler, StreamSampler):
        sampler.view.skip(sampler.seen(start))
    split = split_of(plan, WorstCaseSampler(known, seed=seed).sizes, rank=ranks.rank, world=ranks.world)
    run = Run(
        optimizers,
        ranks,
        # A disabled scaler would let gradients pass that are not finite.
        scaler if scaler is not None and scaler.is_enabled() else None,
        None if known.counts is None else CountsAhead(known.counts),
        split,
        plan.micro_batch if plan.size_cut is None else plan.size_cut.max_micro_batch,
        Gradients(nn.Module(), optimizers, dtype=plan.gradient_dtype),
        _begin_exchange(list(_parameters_of(optimizers)), ranks) if ranks.world > 1 else None,
    )
    workers = int(plan.knobs.get(LOADER_WORKERS) or known.loading.workers or 0)
    has_gpu = workers and torch.cuda.is_available()
    gpu = torch.device("cuda", torch.cuda.current_device()) if has_gpu else None
    return Batches(run, sampler, start, open_feed(known, sampler, split, workers=workers, device=gpu))


def _check(plan: Plan, scaler: object, optimizers: Sequence[object], numbers: Mapping[str, Any]) -> None:
    """Raise if an argument of `batches` is invalid."""
    if not isinstance(plan, Plan):
        raise InputError(
            "autobatch.batches takes a workload and its plan, batches(workload, autobatch.plan(workload, …), "
            f"optimizer=…), found {kind_of(plan)} in place of the plan"
        )
    if plan.parallel == "shard":
        raise InputError(
            "the plan is for a model that ranks share, as only autobatch.fit trains it: plan with "
            "parallel='replicate'"
        )
    for name, value in numbers.items():
        least = {"seed": -math.inf, "start": 0}.get(name, 1)
        is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if value is not None and not is_whole:
            raise InputError(f"{name} must be a whole number, found {kind_of(value)}")
        if value is not None and value < least:
            raise InputError(f"{name} is {value}: it must be {least} or more")
    if scaler is not None and not hasattr(scaler, "is_enabled"):
        raise InputError(
            f"autobatch.batches(scaler=…) must be a torch.amp.GradScaler, found {kind_of(scaler)}"
        )
    for optimizer in optimizers or (None,):
        if not isinstance(optimizer, Optimizer):
            raise InputError(
                "autobatch.batches(optimizer=…) takes one or several optimizers of torch.optim, found "
                f"{kind_of(optimizer)}"
            )
        refuse_closure(optimizer)


def _sampler_of(workload: Workload, plan: Plan, ranks: Ranks, **fields: Any) -> GlobalBatchSampler:
    """Return the batches of the run, which are the same on all ranks.

    Raises:
        InputError: the sampler of the workload is invalid, or the ranks read other data.
    """
    stream: Any = workload.train_data
    if is_stream(stream):
        samples = ENDLESS
        if fields["epochs"] is not None:
            samples, remarks = ranks.once(lambda: count_samples(stream))
            for line in (COUNTED, *remarks):
                logger.warning(line)
        view = open_stream(stream, ranks, fields["seed"], plan.target_batch)
        return StreamSampler(**fields, target_batch=plan.target_batch, samples=samples, view=view)
    samples, order = epoch_of(workload, fields["seed"])
    sampler = GlobalBatchSampler(**fields, target_batch=plan.target_batch, samples=samples, order=order)
    if ranks.world > 1:
        digest = None if order is None else order_digest(order)
        ranks.check_equal({"number of batches": sampler.total, "order of the sampler": digest})
        names = [f"rank {rank}" for rank in range(ranks.world)]
        check_same_data(ranks.gather(digest_data(workload.train_data)), names)
    return sampler


def _not_here(*_: object) -> Any:
    raise AssertionError("the forward passes run in the user's loop")


def _parameters_of(optimizers: Sequence[Optimizer]) -> dict[nn.Parameter, None]:
    """Return the parameters that optimizers train, each once and in their order."""
    return {p: None for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def _begin_exchange(parameters: list[nn.Parameter], ranks: Ranks) -> Tensor:
    """Return the buffer in which ranks sum their gradients, before the first step.

    Raises:
        InputError: the ranks have other weights.
    """
    own = [parameter.detach() for parameter in parameters]
    norm = float(norm_of([weight.double() for weight in own])) if own else 0.0
    of_ranks = ranks.gather((len(own), sum(weight.numel() for weight in own), norm))
    for rank, other in enumerate(of_ranks):
        if other != of_ranks[0]:
            raise InputError(
                f"the weights of the ranks differ before the first step (norm {of_ranks[0][2]:g} on rank 0, "
                f"{other[2]:g} on rank {rank}): seed all ranks alike before the model is built, or load "
                "the same weights"
            )
    return exchange_buffer(parameters, own[0].device, world=ranks.world)
