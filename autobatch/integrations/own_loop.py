"""A training loop of the user's own: the batches of a plan, their micro-batches, and the step of each batch.

The user's loop runs the forward passes. The order of the samples, their split, the feed and the arithmetic of
a step are those of `fit`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from autobatch.api.run import check_data_of_ranks
from autobatch.core.errors import InputError, NonFiniteError
from autobatch.core.options import Options
from autobatch.core.records import LOADER_WORKERS, Plan
from autobatch.distributed.engine import Whole
from autobatch.distributed.group import join_loop
from autobatch.distributed.ranks import Ranks, launched_world
from autobatch.step.gradients import Gradients, differentiate, norm_of
from autobatch.step.loss import CountsAhead, StepTotals, add_loss, weigh_loss
from autobatch.step.restore import BufferSnapshot
from autobatch.step.train_state import TrainState
from autobatch.step.train_step import StepResult, finish
from autobatch.training.loop import LEAST_LOSS_SCALE
from autobatch.workload.contract import LossValue, WholeBatchLoss, Workload, is_stream, kind_of
from autobatch.workload.data import WorstCaseSampler, digest_data, digest_of
from autobatch.workload.feed import Feed
from autobatch.workload.order import GlobalBatch, GlobalBatchSampler, Split, split_of
from autobatch.workload.streams import StreamSampler, open_sampler
from autobatch.workload.user_code import WorkloadSource, find_workload

Optimizer = torch.optim.Optimizer


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The samples of one forward and backward pass."""

    data: Any
    """The collated samples, on the device where the collate function has put them."""
    samples: int
    """Number of samples in ``data``."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.samples

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a micro-batch has no {name!r}: its samples are micro.data")

    def __iter__(self) -> NoReturn:
        raise TypeError("a micro-batch cannot be unpacked: its samples are micro.data")


class Batch:
    """The samples of one optimizer step, in micro-batches."""

    def __init__(self, run: Batches, drawn: GlobalBatch) -> None:
        self.index = drawn.index
        """Number of the batch in the run, from 0."""
        self.samples = len(drawn.ids)
        """The plan's target batch, or fewer if the data ends within this batch; those of all ranks."""
        self._state, self._engine = run.train_state, run.engine
        self._totals = StepTotals(samples=self.samples)
        parts = run.split.parts(drawn, run.micro_batch)
        self._sizes = [len(part.ids) for part in parts]
        self._open: int | None = None
        """Samples of the micro-batch that waits for `backward`; None if there is none."""
        self._mark: object = None
        """Mark of the gradients since the last backward pass."""
        self._is_stepped = False
        counts = self._state.counts
        # No zip, which would hold each micro-batch until the next one is there.
        made = map(lambda *pair: pair, run.feed.collated(parts, run.micro_batch), self._sizes)
        self._micro_batches: Iterator[tuple[Any, int]] = made if counts is None else counts.ahead(made)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a batch has no {name!r}, because it comes in micro-batches: write `for micro in batch:`, and "
            "use micro.data"
        )

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches, once; a loop that was left before its end continues.

        Raises:
            InputError: they were all yielded before, `backward` was not called for the previous one, or the
                samples cannot be collated.
        """
        if self._sizes and len(self._totals.sizes) == len(self._sizes):
            raise self._refused(
                "its micro-batches were asked for again",
                "for a further step on the same samples, zip several autobatch.batches (docs/loops.md)",
            )
        return map(self._opened, self._micro_batches)

    def _opened(self, made: tuple[Any, int]) -> MicroBatch:
        if self._open is not None:
            raise self._refused(
                f"batch.backward() was not called for micro-batch {len(self._totals.sizes) + 1}",
                "call it with the loss of every micro-batch, in place of loss.backward()",
            )
        self._open = made[1]
        return MicroBatch(*made)

    def backward(self, loss: LossValue) -> None:
        """Add the gradient of the current micro-batch to the gradient of the batch.

        Args:
            loss: the mean over the samples of the micro-batch, a 0-d tensor; or a `Loss` if it is a mean over
                something else; or several terms, as in `Workload`.

        Raises:
            InputError: ``loss`` is not a loss, or has terms whose counts in the whole batch are unknown;
                there is no current micro-batch; or something has changed the gradients since the last one.
        """
        if self._open is None:
            raise self._refused(
                "batch.backward() was called without a micro-batch",
                "call it once in each round of `for micro in batch:`, with the sum of its losses",
            )
        self._begin_or_go_on()
        state, totals = self._state, self._totals
        value, weight = weigh_loss(totals, loss, self._open, state.counts)
        with state.gradients.summed_apart():
            differentiate(state.scaler.scale(value), weight)
        add_loss(totals, value, weight)
        self._open, self._mark = None, state.gradients.mark()

    def _begin_or_go_on(self) -> None:
        """Free the gradients before the first backward pass; check that nothing else has changed them."""
        gradients = self._state.gradients
        if not self._totals.sizes:
            gradients.clear()
        elif gradients.mark() != self._mark:
            raise self._refused(
                "something between its backward passes has changed the gradients or the weights",
                "leave out optimizer.zero_grad(), optimizer.step() and the clipping, which batch.step() does",
            )

    def step(self, *, max_grad_norm: float | None = None) -> StepResult:
        """Take the optimizer step of the batch, and free its gradients; every rank calls it.

        Args:
            max_grad_norm: the 2-norm to clip the gradient of the batch to; None for no clipping.

        Returns:
            Loss and gradient norm of the whole batch, and whether the step was ``applied``. It is not applied
            if the loss counted nothing or if the loss scale overflowed. Advance a schedule only after a step
            that was applied.

        Raises:
            InputError: samples of the batch are left, the loss does not depend on the trained parameters, or
                something has changed the gradients since the last backward pass.
            NonFiniteError: the loss or the gradient is not finite; no step was taken.
        """
        if self._is_stepped:
            raise self._refused("its step was already taken", "call it once, after its micro-batches")
        state, totals = self._state, self._totals
        if len(totals.sizes) < len(self._sizes):
            raise self._refused(
                f"batch.step() was called after {sum(totals.sizes)} of {sum(self._sizes)} samples",
                "finish `for micro in batch:` first, with batch.backward() for each",
            )
        self._begin_or_go_on()
        state.max_grad_norm = max_grad_norm
        self._engine.combine(state, totals)
        result = finish(state, totals)
        self._is_stepped = True
        has_overflowed = state.scaler.is_enabled() and state.scaler.get_scale() >= LEAST_LOSS_SCALE
        if result.applied or not result.count or has_overflowed:
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

    def _refused(self, found: str, advice: str) -> InputError:
        return InputError(f"batch {self.index}: {found}: {advice}")


@dataclass(eq=False, repr=False)
class Batches:
    """The batches of a run; see `batches`."""

    train_state: TrainState
    engine: Whole
    split: Split
    micro_batch: int
    sampler: GlobalBatchSampler
    start: int
    feed: Feed
    is_started: bool = False

    def __len__(self) -> int:
        """Return the number of batches, for a schedule."""
        return max(0, self.sampler.total - self.start)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches.

        Raises:
            InputError: the step of the previous batch was not taken, the data ends too soon, or the batches
                were iterated before.
        """
        if self.is_started:
            raise InputError(
                "these batches were already iterated, and a batch may span two epochs: ask for all epochs at "
                "once with autobatch.batches(…, epochs=N)"
            )
        self.is_started = True
        with closing(self.feed):
            for drawn in self.sampler.batches(self.start):
                batch = Batch(self, drawn)
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
        optimizer: one or several, which train your model and step together.
        steps: optimizer steps of the run, ``start`` included; the run ends at the smaller of ``steps`` and
            ``epochs``.
        epochs: passes over the data; 1 if neither ``steps`` nor ``epochs`` is given. A stream takes
            ``steps`` alone.
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
    _check(plan, optimizers, start=start, steps=steps, epochs=epochs)
    known = find_workload(workload, seed)
    if isinstance(known.loss, WholeBatchLoss):
        raise InputError(
            "a WholeBatchLoss needs the rows of the whole batch, which autobatch.batches does not keep: use "
            "autobatch.fit"
        )
    if plan.world_size != (world := launched_world(os.environ)):
        raise InputError(
            f"the plan is for {plan.world_size} ranks, and autobatch.batches runs in {world} processes, so a "
            f"step would not have {plan.target_batch} samples: plan with world_size={world}"
        )
    ranks = Ranks() if plan.world_size == 1 else join_loop()
    lengths = {"seed": seed, "steps": steps, "epochs": epochs}
    ranks.check_equal({"target batch": plan.target_batch, "start": start, **lengths})
    sampler = _sampler_of(
        known, ranks, Options(target_batch=plan.target_batch, seed=seed, steps=steps, epochs=epochs)
    )
    if isinstance(sampler, StreamSampler):
        sampler.skip(sampler.seen(start))
    split = split_of(plan, WorstCaseSampler(known, seed=seed).sizes, rank=ranks.rank, world=ranks.world)
    state = _train_state_of(known, plan, optimizers, scaler)
    if ranks.world > 1:
        weights = [parameter.detach().double() for parameter in state.model.parameters()]
        held = f"{sum(weight.numel() for weight in weights):,} of norm {float(norm_of(weights)):.12g}"
        ranks.check_equal({"weights before the first step (seed all ranks alike)": held})
    engine = Whole(ranks, state)
    workers = int(plan.knobs.get(LOADER_WORKERS) or known.workers or 0)
    has_gpu = workers and torch.cuda.is_available()
    gpu = torch.device("cuda", torch.cuda.current_device()) if has_gpu else None
    return Batches(
        train_state=state,
        engine=engine,
        split=split,
        micro_batch=plan.largest_micro_batch,
        sampler=sampler,
        start=start,
        feed=Feed(known, sampler, split, workers=workers, device=gpu),
    )


def _check(plan: Plan, optimizers: Sequence[object], **numbers: int | None) -> None:
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
        least = int(name != "start")
        if value is not None and not (hasattr(value, "__index__") and value >= least):
            raise InputError(f"{name} must be a whole number of {least} or more, found {value!r}")
    for optimizer in optimizers or (None,):
        if not isinstance(optimizer, Optimizer):
            raise InputError(
                "autobatch.batches(optimizer=…) takes one or several optimizers of torch.optim, found "
                f"{kind_of(optimizer)}"
            )


def _sampler_of(workload: Workload, ranks: Ranks, options: Options) -> GlobalBatchSampler:
    """Return the batches of the run, which are the same on all ranks.

    Raises:
        InputError: the sampler of the workload is invalid, the ranks read other data, or a stream is to be
            read without a number of steps.
    """
    stream = workload.train_data if is_stream(workload.train_data) else None
    sampler = open_sampler(workload, stream, options, ranks.broadcast)
    if ranks.world > 1 and stream is None:
        digest = None if sampler.order is None else digest_of(sampler.order(0))
        ranks.check_equal({"number of batches": sampler.total, "order of the sampler": digest})
        check_data_of_ranks(digest_data(workload.train_data), ranks)
    return sampler


def _train_state_of(
    workload: Workload, plan: Plan, optimizers: tuple[Optimizer, ...], scaler: torch.amp.GradScaler | None
) -> TrainState:
    """Return what a step needs of the user's model: the parameters that its optimizers train."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    parameters = nn.ParameterList({id(p): p for group in groups for p in group["params"]}.values())
    return TrainState(
        model=parameters,
        loss=workload.loss,  # runs in the user's loop
        optimizers=optimizers,
        device=torch.device("cpu"),
        precision="fp32",
        scaler=scaler or torch.amp.GradScaler("cpu", enabled=False),
        max_grad_norm=None,
        gradients=Gradients(parameters, optimizers, dtype=plan.gradient_dtype),
        buffers=BufferSnapshot(parameters),
        counts=None if workload.counts is None else CountsAhead(workload.counts),
    )
