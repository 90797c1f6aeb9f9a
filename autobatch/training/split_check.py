"""The check before training that splitting a batch does not change its gradient, and the note on BatchNorm.

The first samples of the run are collated as a whole and as micro-batches. Both run through the code that
trains, with the same draws: the whole as one micro-batch, the others one after the other. Their gradients
must agree. If they do not, the likely causes are listed.

Rounding is less than an error in float64, so the passes run in it if the model takes it and its copy is
small. In train mode dropout and BatchNorm stay in eval mode, because they make every pass differ. If two
seeds give two gradients nevertheless, a difference proves nothing. What cannot be checked is a note, and ends
no run.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from autobatch.core.errors import InputError
from autobatch.core.records import Plan
from autobatch.core.units import significant
from autobatch.device.oom import Verdict, classify, loses_context
from autobatch.planning import micro_batches, split_over_ranks
from autobatch.rehearsal.rehearsal import on_copies
from autobatch.rehearsal.setup import Setup
from autobatch.report.facts import plural
from autobatch.step.gradients import LOW_PRECISION
from autobatch.step.loss import divisor_and_items, read_totals
from autobatch.step.restore import BufferSnapshot
from autobatch.step.train_step import accumulate
from autobatch.workload.contract import Collated, WholeBatchLoss
from autobatch.workload.data import collate_samples, digest_of, elements, fetch
from autobatch.workload.nested import cut, map_tensors
from autobatch.workload.order import GlobalBatchSampler, sampler_of
from autobatch.workload.rng import preserved_random_state, seed_everything
from autobatch.workload.user_code import describe

SplitCheck = Literal["error", "note", "off"]
SAMPLES, PARTS = 64, 4
"""Samples that are compared, which are no more than so many micro-batches; they are compared in as many."""
FLOAT64_BUDGET_SHARE = 0.1
"""Share of the budget below which a loss is compared in float64; model copy and gradient count."""
ELEMENTS = 1024
"""Elements read from each parameter's gradient, evenly spaced: enough to compare, for any size of model."""
CAUSES = (
    "likely causes are a sum over the batch or a mean over something else than samples (counted tokens, "
    "class weights, pixels), for which return Loss(total, count), one by name for each of several means; a "
    "loss that depends on several samples at once, for which use WholeBatchLoss(represent=…, loss=…); "
    "padding without a mask; a hook that changes gradients, for which use --max-grad-norm; and state that "
    "each forward pass writes, which belongs after the optimizer's step (docs/loss.md)"
)
"""Causes of a difference, and what to do about each."""
CAUSE_OF_SUM = "the loss is a sum over the batch, so return its mean over the samples, or Loss(total, count)"
CAUSE_IN_ROWS = (
    "WholeBatchLoss(represent=…) sees other samples beside its own. Compute each row from its own sample "
    "alone, and move what depends on several samples to WholeBatchLoss(loss=…)"
)


class Finding(NamedTuple):
    """Result of the check; without fault and reason, the loss can be split."""

    fault: str | None = None
    """Difference of the gradients with its likely causes, and what to write."""
    unchecked: str | None = None
    """Reason why the check was not made, or hides a difference."""

    def notes(self, asked: SplitCheck, plan: Plan) -> list[str]:
        """Return what to tell the user about a plan, which may split batches or not.

        Raises:
            InputError: batches are split, the loss cannot be, and the user asked for an error.
        """
        is_split = plan.world_size > 1 or plan.micro_batch_of_longest < plan.target_batch
        if self.fault is not None:
            if is_split and asked == "error":
                raise InputError(f"{self.fault}. To train anyway, use --split-check note")
            exact = "every batch is one micro-batch, which is exact as long as memory does not run out"
            return [self.fault if is_split else f"{self.fault}. In this run {exact}"]
        if self.unchecked is None or not is_split:
            return []
        return [
            "not checked whether the loss can be split into micro-batches exactly: "
            f"{self.unchecked.rstrip('.')}. Make sure that it is a mean over samples, or a Loss(total, count)"
        ]


SHARED = Finding(unchecked="the ranks share the model, so check it once in one process, on a smaller model")


def examine_run(setup: Setup, micro_batch: int, target_batch: int, seed: int = 0) -> Finding:
    """Examine whether splitting the first batch of a run changes its gradient; see `examine`.

    Args:
        setup: the workload and its model; of a stream, its first samples are at hand.
        micro_batch: the largest micro-batch of the longest samples.
        target_batch: samples of an optimizer step.
        seed: of the run.
    """
    first = next(sampler_of(setup.workload, target_batch, seed, steps=1).batches())
    return examine(setup, micro_batch, list(dict.fromkeys(first.ids)))


def examine(setup: Setup, micro_batch: int, ids: Sequence[int]) -> Finding:
    """Examine whether splitting a batch of these samples changes its gradient; no state is changed.

    The model runs on temporary weights. Where that many samples do not fit, those of one micro-batch are
    compared.
    """
    # The loss scale of fp16 would change between passes.
    precision = "fp32" if setup.precision == "fp16" else setup.precision
    setup = replace(setup, knobs={}, ema=None, precision=precision)
    most = min(len(ids), SAMPLES, PARTS * micro_batch)
    finding = Finding(unchecked="it takes 2 samples, and the batch has 1")
    try:
        with preserved_random_state():
            for count in sorted({most, micro_batch}, reverse=True):
                if finding.unchecked is not None and 2 <= count <= most:
                    # Sorted, their parts differ in what a wrong loss may weigh by.
                    samples = sorted(fetch(setup.workload.train_data, ids[:count]), key=elements)
                    finding = _compare(setup, samples)
    except Exception as error:  # what cannot be checked ends no run
        if loses_context(error):
            raise
        finding = Finding(unchecked=describe(error))
    finally:
        setup.device.release()
    return finding


def _compare(setup: Setup, samples: list[Any]) -> Finding:
    """Compare samples with their parts, in the first type and mode of passes that tells."""
    size = len(samples)

    def collated(some: list[Any], seed: int = 1) -> Collated:
        seed_everything(seed)
        # Shallow copies, because a collate function may take entries out of its samples.
        return collate_samples([copy.copy(sample) for sample in some], setup.workload.collate)

    count = max(2, min(PARTS, size // 2))
    places = [slice(*ends) for ends in pairwise(size * part // count for part in range(count + 1))]
    whole = collated(samples)
    if digest_of(whole) == digest_of(collated(samples, seed=2)):
        batches = [collated(samples[place]) for place in places]
    else:
        try:
            batches = [cut(whole, place, size) for place in places]
        except InputError as error:
            return Finding(unchecked=f"the collate function draws at random, and {error}")
    parts = [(batch, place.stop - place.start) for batch, place in zip(batches, places, strict=True)]
    types = {parameter.dtype for parameter in setup.model.parameters()}
    nbytes = sum(parameter.numel() for parameter in setup.model.parameters()) * 16
    takes_float64 = types == {torch.float64} or nbytes < setup.device.budget_bytes * FLOAT64_BUDGET_SHARE
    is_low = setup.precision != "fp32" or not types.isdisjoint(LOW_PRECISION)
    failed = Finding()
    for dtype in (torch.float64, None) if takes_float64 else (None,):
        # Each part rounds its gradient, to 8 significant bits in bf16. float32 also stands for models with
        # operations in TF32; float64 for those with some in float32.
        tolerance = 1e-5 if dtype is torch.float64 else 3e-2 if is_low else 1e-2
        hidden = None
        # In eval mode dropout of attention and the like ends, and terms that only training has.
        for is_eval in (False, True):
            try:
                with _open_passes(setup, dtype, is_eval=is_eval) as run:
                    finding = _judge(run, (whole, size), parts, tolerance, setup)
            except Exception as error:
                # A model that trains may still fail here (another type or mode), by no fault of its loss.
                if loses_context(error):
                    raise
                is_memory = classify(error) is not Verdict.NONE
                failed = Finding(
                    unchecked=f"memory ran out for {size} samples" if is_memory else describe(error)
                )
                continue
            if finding.unchecked is None:
                return finding
            hidden = hidden or finding
        if hidden is not None:
            return hidden
    return failed


Run: TypeAlias = Callable[..., Tensor]
"""Runs micro-batches one after the other, from the same state each time, with a ``seed``. Returns elements of
the gradient of their loss, in float64."""


@contextmanager
def _open_passes(setup: Setup, dtype: torch.dtype | None, *, is_eval: bool) -> Iterator[Run]:
    """Open a function that runs micro-batches as a step does, on temporary weights, within the block.

    Args:
        setup: the workload.
        dtype: type of the model and its batches; None for their own, and the precision of the run.
        is_eval: True for the whole model in eval mode; False for only its dropout and BatchNorm.
    """
    setup = setup if dtype is None else replace(setup, precision="fp32")
    with setup.device.session(is_probe=True) as meter, on_copies(setup, meter) as train_state:
        model = train_state.model
        for tensor in [*model.parameters(), *model.buffers()]:
            if dtype is not None and tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
        meter.count(tensor.data for tensor in [*model.parameters(), *model.buffers()])
        for module in model.modules():
            if is_eval or isinstance(module, nn.modules.dropout._DropoutNd | _BatchNorm):
                module.training = False
        train_state.buffers = BufferSnapshot(model, copy_all=True)

        def copied(batch: Collated) -> Collated:
            """Return a copy of a batch, because a loss may change it."""
            return map_tensors(
                copy.deepcopy(batch), lambda t: t.to(dtype) if dtype and t.is_floating_point() else t
            )

        def run(*parts: tuple[Collated, int], seed: int = 1) -> Tensor:
            seed_everything(seed)
            samples = sum(size for _, size in parts)
            fed = train_state.feed(((copied(batch), size) for batch, size in parts))
            try:
                totals = accumulate(train_state, fed, samples)
                # Moved and converted at once: a model may have thousands of parameters.
                gradient = torch.cat([_elements(*pair) for pair in train_state.gradients.by_parameter()])
            finally:
                train_state.gradients.clear()
                train_state.buffers.restore()
            read_totals(totals)
            divisor, items = divisor_and_items(totals)
            return gradient.to("cpu", torch.float64) * (divisor / (items or 1.0))

        yield run


def _elements(parameter: Tensor, gradient: Tensor | None) -> Tensor:
    """Return elements of the gradient of a parameter, evenly spaced."""
    stride = max(1, parameter.numel() // ELEMENTS)
    if gradient is None:
        return parameter.new_zeros(len(range(0, parameter.numel(), stride)))
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense.detach().flatten()[::stride]


def _judge(
    run: Run, whole: tuple[Collated, int], parts: list[tuple[Collated, int]], tolerance: float, setup: Setup
) -> Finding:
    """Compare a batch with its parts, in passes that round by less than a relative ``tolerance``."""
    size, first, split = whole[1], run(whole), run(*parts)
    norm = float(first.norm())

    def differs(other: Tensor) -> bool:
        return not float((first - other).norm()) <= tolerance * norm

    if not 0.0 < norm < math.inf:
        return Finding(unchecked=f"the gradient of {size} samples is {'not finite' if norm else 'zero'}")
    if differs(run(whole)):
        return Finding(
            unchecked=f"two passes over the same {size} samples with the same draws differ: the model or the "
            "loss keeps state between passes, or draws from a generator of its own"
        )
    if not differs(split):
        return Finding()
    error = float((first - split).norm()) / norm
    by = f"{significant(100 * error)} %" if error < 10 else f"{error:.1e} times"
    said = (
        f"the gradient of {size} samples has the norm {norm:.4g} at once and {float(split.norm()):.4g} in "
        f"micro-batches, which differs by {by}"
    )
    if differs(run(whole, seed=2)):
        return Finding(unchecked=f"{said}, and its draws alone change the gradient")
    if isinstance(setup.workload.loss, WholeBatchLoss):
        return Finding(f"{said}: {CAUSE_IN_ROWS}")
    return Finding(f"{said}: {CAUSES if differs(split * len(parts)) else CAUSE_OF_SUM}")


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the layers that normalise by batch statistics in train mode."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def statistics_notes(momenta: Sequence[float | None], sizes: Sequence[int]) -> list[str]:
    """Return notes on batch statistics; empty without BatchNorm or for a single micro-batch."""
    if not momenta or len(sizes) == 1:
        return []
    size = f"{sizes[-1]} to {sizes[0]}" if sizes[-1] < sizes[0] else f"{sizes[0]}"
    momentum = momenta[0]
    # n updates with 1 - (1 - m) ** (1 / n) weigh as much as one with m.
    rate = 0.0 if momentum is None else 1 - (1 - momentum) ** (1 / len(sizes))
    matching = f", which a momentum of {rate:.4g} instead of {momentum:g} would undo" if rate else ""
    return [
        f"BatchNorm ({plural(len(momenta), 'layer')}) computes its statistics over micro-batches of {size} "
        f"samples, not over the batch of {sum(sizes)}: results depend on the micro-batch, and the running "
        f"averages move {len(sizes)} times per step{matching}"
    ]


def check_batch_norms(model: nn.Module, plan: Plan, sampler: GlobalBatchSampler) -> list[str]:
    """Return notes on the batch statistics of a run, none of whose micro-batches may be a single sample.

    Raises:
        InputError: a BatchNorm would get a single sample.
    """
    norms, last = batch_norms(model), sampler.size(sampler.total - 1)
    for size in (sampler.target_batch, last):  # only the last batch of a run may be short
        shares = split_over_ranks(size, plan.world_size, plan.multiple)
        alone = any(1 in micro_batches(share, plan.micro_batch_of_longest) for share in shares)
        if alone and any(isinstance(norm, nn.BatchNorm1d) for norm in norms):
            raise InputError(
                f"BatchNorm needs 2 samples, and this run has a micro-batch of 1 (its last batch has {last} "
                "samples): choose a target batch that leaves no single sample, or --steps instead of --epochs"
            )
    first = micro_batches(min(sampler.target_batch, sampler.size(0)), plan.micro_batch_of_longest)
    return statistics_notes([norm.momentum for norm in norms], first)
