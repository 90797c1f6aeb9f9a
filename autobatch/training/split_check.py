"""The check before training that splitting a batch does not change its gradient.

The first samples of the run are collated as a whole and as micro-batches. Both run through the code that
trains, with the same draws: the whole as one micro-batch, the others one after the other. Their gradients
must agree. If they do not, the gradient gᵢ of each micro-batch alone tells the likely cause. If the whole is
a sum of the gᵢ with other weights, the loss is a mean over something else than samples. If it is none, it
depends on several samples at once, or is a sum of several such means.

Rounding is less than an error in float64, so the passes run in it if the model takes it and its copy is
small. If two seeds give two gradients, both sides are means over seeds, and a difference counts if it is
several times what their spread explains. In train mode dropout and BatchNorm stay in eval mode, because they
make every pass differ. What cannot be checked is a note, and ends no run.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import accumulate as running_sums
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from autobatch.core.errors import InputError
from autobatch.core.units import format_share
from autobatch.device.base import Meter
from autobatch.device.oom import Verdict, classify, loses_context
from autobatch.planning import micro_batches, split_evenly
from autobatch.rehearsal.rehearsal import on_copies
from autobatch.rehearsal.setup import Setup
from autobatch.step.gradients import LOW_PRECISION
from autobatch.step.restore import BufferSnapshot
from autobatch.step.train_step import accumulate
from autobatch.training.batchnorm import batch_norms, statistics_notes
from autobatch.workload.contract import Collated, WholeBatchLoss
from autobatch.workload.data import collate_samples, elements, fetch, shallow_copies
from autobatch.workload.data_digest import digest_of
from autobatch.workload.nested import cut, map_tensors
from autobatch.workload.order import GlobalBatchSampler
from autobatch.workload.rng import preserved_random_state, seed_everything
from autobatch.workload.user_code import describe

SplitCheck = Literal["error", "note", "off"]
Parts: TypeAlias = list[tuple[Collated, int]]
"""Micro-batches on the host, each with its number of samples."""
CANDIDATES, READ_SECONDS = 256, 0.5
"""Samples of the run's beginning that the compared ones are chosen from, and the time to read them."""
FEW_SAMPLES, MANY_SAMPLES, SECONDS = 8, 64, 5.0
"""Samples that are compared first; then, unless more than these seconds are expected."""
PARTS = 4
"""Micro-batches that samples are compared in, and the most micro-batches that many samples may be."""
FLOAT64_BUDGET_SHARE = 0.1
"""Share of the budget below which a loss is compared in float64; model copy and gradient count."""
ELEMENTS = 1024
"""Elements read from each parameter's gradient, evenly spaced: enough to compare, for any size of model."""
REPEATS, SPREADS = 8, 4.0
"""Seeds over which the gradients of a random loss are averaged, and the standard errors of such a mean that a
difference must exceed: chance does so once in 200 times at most."""
SHARED = (
    "not checked whether the loss can be split, because the ranks share the model: check it once in one "
    "process, on a smaller model"
)
ANYWAY = "To train anyway, use --split-check note"


class Finding(NamedTuple):
    """Result of the check; without fault and reason, the loss can be split."""

    fault: str | None = None
    """Difference of the gradients with its likely cause, and what to write."""
    unchecked: str | None = None
    """Reason why the check was not made, or hides a difference."""

    def notes(self, *, is_split: bool) -> list[str]:
        """Return what to tell the user about a run whose batches are split, or are one micro-batch each."""
        if self.fault is not None:
            exact = "every batch is one micro-batch, which is exact as long as memory does not run out"
            return [self.fault if is_split else f"{self.fault}. In this run {exact}"]
        if self.unchecked is None or not is_split:
            return []
        return [
            "not checked whether the loss can be split into micro-batches exactly: "
            f"{self.unchecked.rstrip('.')}. Make sure that it is a mean over samples, or a Loss(total, count)"
        ]


def check_loss_splits(
    setup: Setup,
    *,
    micro_batch: int,
    sampler: GlobalBatchSampler,
    check: SplitCheck = "error",
    share_of: Callable[[int], int] = lambda samples: samples,
) -> list[str]:
    """Check before training that splitting a batch changes nothing but the order of sums.

    Args:
        setup: the workload and its model, which trains on temporary weights here.
        micro_batch: the largest micro-batch of the most expensive samples.
        sampler: the batches of the run.
        check: raise an error or return a note if batches are split and the loss cannot be; ``off`` skips the
            loss and checks only BatchNorm.
        share_of: returns the samples that this process takes of a batch of a given size.

    Returns:
        Notes, one per line.

    Raises:
        InputError: batches are split and the loss cannot be, or a BatchNorm gets a single sample.
    """
    norms, last = batch_norms(setup.model), sampler.size(sampler.total - 1)
    for size in (sampler.target_batch, last):  # only the last batch of a run may be short
        alone = 1 in micro_batches(share_of(size), micro_batch)
        if alone and any(isinstance(norm, nn.BatchNorm1d) for norm in norms):
            raise InputError(
                f"BatchNorm needs 2 samples, and this run has a micro-batch of 1 (its last batch has {last} "
                "samples): choose a target batch that leaves no single sample, or --steps instead of --epochs"
            )
    first = micro_batches(min(sampler.target_batch, sampler.size(0)), micro_batch)
    notes = statistics_notes([norm.momentum for norm in norms], first)
    is_split = min(micro_batch, share_of(sampler.target_batch)) < sampler.target_batch
    finding = Finding() if check == "off" else examine(setup, micro_batch, first_samples(sampler))
    setup.device.release()
    if finding.fault is not None and is_split and check == "error":
        raise InputError(f"{finding.fault}. {ANYWAY}")
    return [*notes, *finding.notes(is_split=is_split)]


def first_samples(sampler: GlobalBatchSampler) -> list[int]:
    """Return the first samples of a run, of which any may be in one batch.

    A sampler of the user's decides what is in one batch, so only its first batch counts.
    """
    most = sampler.size(0) if sampler.order is not None else CANDIDATES
    ids = (index for batch in GlobalBatchSampler.batches(sampler) for index in batch.ids)
    return list(dict.fromkeys(islice(ids, most)))[:CANDIDATES]


def examine(setup: Setup, micro_batch: int, ids: Sequence[int] | None = None) -> Finding:
    """Examine whether splitting a batch of these samples changes its gradient; no state is changed.

    A few samples are compared first, then as many of them as memory and time allow. Without ``ids`` they are
    any samples of the data.
    """
    # The loss scale of fp16 would change between passes.
    precision = "fp32" if setup.precision == "fp16" else setup.precision
    setup = replace(setup, knobs={}, world=1, ema=None, precision=precision)
    with preserved_random_state():
        try:
            candidates = _read(setup, ids)
            many = min(len(candidates), MANY_SAMPLES, PARTS * micro_batch)
            few = min(many, FEW_SAMPLES, max(2, micro_batch))
            if few < 2:
                return Finding(unchecked="it takes 2 samples, and the batch has 1")
            start = setup.clock()
            finding = _compare(setup, _choose(candidates, few), setup.device.training)
            expected = (setup.clock() - start) * many / few
            for size in (many, min(many, micro_batch)):
                if finding.fault is None and few < size and expected <= SECONDS:
                    larger = _compare(setup, _choose(candidates, size), setup.device.enforced)
                    if larger.unchecked is None:
                        return larger
        except Exception as error:  # what cannot be checked ends no run
            if loses_context(error):
                raise
            return Finding(unchecked=describe(error))
        return finding


def _read(setup: Setup, ids: Sequence[int] | None) -> list[Any]:
    """Read samples, eight at a time, until there are enough or the time is over."""
    data, start, samples = setup.workload.train_data, setup.clock(), list[Any]()
    if ids is None or setup.stream is not None:  # a stream has its first samples at hand
        ids = range(0, len(data), max(1, len(data) // CANDIDATES))  # type: ignore[arg-type]
    while len(samples) < min(len(ids), CANDIDATES) and setup.clock() - start <= READ_SECONDS:
        samples += fetch(data, ids[len(samples) : len(samples) + 8])
    return samples


def _choose(samples: list[Any], size: int) -> list[Any]:
    """Return some samples, among them the smallest and the largest, sorted by size.

    Contiguous parts of them then differ as much as possible in what a wrong loss may weigh by.
    """
    sizes = [elements(sample) for sample in samples]
    by_size = sorted(range(len(samples)), key=sizes.__getitem__)
    each = max(1, size // 8)
    chosen = list(dict.fromkeys([*by_size[:each], *by_size[-each:], *range(len(samples))]))[:size]
    return [samples[place] for place in sorted(chosen, key=lambda place: (sizes[place], place))]


class _Pass(NamedTuple):
    """Forward and backward passes over some micro-batches, one after the other."""

    gradient: Tensor
    """Elements of the gradient of their loss, in float64 on the host."""
    items: float
    """Items that their `Loss` counts; their samples if it is a mean over samples."""
    is_counted: bool
    """True for a `Loss`."""
    written: dict[str, Tensor]
    """Elements of the buffers and frozen parameters that the forward passes have changed."""


@contextmanager
def _open_passes(
    setup: Setup,
    session: Callable[[], AbstractContextManager[Meter]],
    dtype: torch.dtype | None,
    *,
    is_eval: bool,
) -> Iterator[Callable[..., _Pass]]:
    """Open a function that runs micro-batches as a step does, on temporary weights, within the block.

    Args:
        setup: the workload.
        session: opens the meter, which counts the copies and the batches.
        dtype: type of the model and its batches; None for their own, and the precision of the run.
        is_eval: whether the whole model is in eval mode, or only dropout and BatchNorm.
    """
    setup = setup if dtype is None else replace(setup, precision="fp32")
    with session() as meter, on_copies(setup, meter) as train_state:
        model = train_state.model
        for tensor in [*model.parameters(), *model.buffers()]:
            if dtype is not None and tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
        meter.count(tensor.data for tensor in [*model.parameters(), *model.buffers()])
        for module in model.modules():
            if is_eval or isinstance(module, nn.modules.dropout._DropoutNd | _BatchNorm):
                module.training = False
        buffers = train_state.buffers = BufferSnapshot(model, copy_all=True)
        frozen = [pair for pair in model.named_parameters() if not pair[1].requires_grad]

        def state() -> dict[str, Tensor]:
            return {name: _elements(t, t).clone() for name, t in (*model.named_buffers(), *frozen)}

        def made(part: tuple[Collated, int], *, resets: bool) -> tuple[Collated, int]:
            if resets:
                buffers.restore(keep=True)
            batch = copy.deepcopy(part[0])  # because a loss may change it
            if dtype is not None:
                batch = map_tensors(batch, lambda t: t.to(dtype) if t.is_floating_point() else t)
            return batch, part[1]

        def run(parts: Parts, seed: int = 1, *, resets: bool = False) -> _Pass:
            """Run them with the draws of a seed, each from the buffers at the start if ``resets``."""
            seed_everything(seed)
            samples = sum(size for _, size in parts)
            fetched = (made(part, resets=resets) for part in parts)
            try:
                totals = accumulate(train_state, train_state.feed(fetched, meter), samples, lambda _: None)
                # Moved and converted at once: a model may have thousands of parameters.
                gradient = torch.cat([_elements(*pair) for pair in train_state.gradients.by_parameter()])
                after = state()
            finally:
                train_state.gradients.clear()
                buffers.restore()
            items = float(samples if totals.count is None else totals.count)
            return _Pass(
                gradient.to("cpu", torch.float64) * (totals.divisor / (items or 1.0)),
                items,
                totals.count is not None,
                {name: now for name, now in after.items() if not torch.equal(now, before.get(name, now))},
            )

        before = state()
        yield run


def _elements(parameter: Tensor, gradient: Tensor | None) -> Tensor:
    """Return elements of the gradient of a parameter, evenly spaced."""
    stride = max(1, parameter.numel() // ELEMENTS)
    if gradient is None:
        return parameter.new_zeros(len(range(0, parameter.numel(), stride)))
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense.detach().flatten()[::stride]


def _compare(
    setup: Setup, samples: list[Any], session: Callable[[], AbstractContextManager[Meter]]
) -> Finding:
    """Compare samples with their parts, in the first type and mode of passes that tells."""

    def collated(some: list[Any], seed: int = 1) -> Collated:
        seed_everything(seed)
        return collate_samples(shallow_copies(some), setup.workload.collate)

    sizes = split_evenly(len(samples), max(2, min(PARTS, len(samples) // 2)))
    places = [slice(stop - size, stop) for stop, size in zip(running_sums(sizes), sizes, strict=True)]
    whole = collated(samples)
    if digest_of(whole) == digest_of(collated(samples, seed=2)):
        batches = [collated(samples[place]) for place in places]
    else:
        try:
            batches = [cut(whole, place, len(samples)) for place in places]
        except InputError as error:
            return Finding(unchecked=f"the collate function draws at random, and {error}")
    parts = list(zip(batches, sizes, strict=True))
    types = {parameter.dtype for parameter in setup.model.parameters()}
    nbytes = sum(parameter.numel() for parameter in setup.model.parameters()) * 16
    takes_float64 = types == {torch.float64} or nbytes < setup.device.budget_bytes * FLOAT64_BUDGET_SHARE
    is_low = setup.precision != "fp32" or not types.isdisjoint(LOW_PRECISION)
    hidden, failed = None, Finding()
    for dtype in (torch.float64, None) if takes_float64 else (None,):
        # Each part rounds its gradient, to 8 significant bits in bf16. float32 also stands for models with
        # operations in TF32; float64 for those with some in float32.
        tolerance = 1e-5 if dtype is torch.float64 else 3e-2 if is_low else 1e-2
        # In eval mode dropout of attention and the like ends, and terms that only training has.
        for is_eval in (False, True):
            try:
                with _open_passes(setup, session, dtype, is_eval=is_eval) as run:
                    finding = _judge(run, [(whole, len(samples))], parts, tolerance, setup)
            except Exception as error:
                # A model that trains may still fail here (another type or mode), by no fault of its loss.
                if loses_context(error):
                    raise
                is_memory = classify(error) is not Verdict.NONE
                reason = f"memory ran out for {len(samples)} samples" if is_memory else describe(error)
                failed = Finding(unchecked=reason)
                continue
            if finding.unchecked is None:
                return finding
            hidden = hidden or finding
        if hidden is not None:
            return hidden
    return failed


def _judge(run: Callable[..., _Pass], whole: Parts, parts: Parts, tolerance: float, setup: Setup) -> Finding:
    """Compare a batch with its parts, in passes that round by less than a relative ``tolerance``."""
    size = whole[0][1]
    first, other, again = (run(whole, seed) for seed in (1, 2, 1))
    length = float(first.gradient.norm())
    if not 0.0 < length < math.inf:
        return Finding(unchecked=f"the gradient of {size} samples is {'not finite' if length else 'zero'}")
    if float((first.gradient - again.gradient).norm()) > tolerance * length:
        return Finding(
            unchecked=f"two passes over the same {size} samples with the same draws differ: the model or the "
            "loss keeps state between passes, or draws from a generator of its own"
        )
    is_random = float((first.gradient - other.gradient).norm()) > tolerance * length
    seeds = range(1, 1 + (REPEATS if is_random else 1))

    def gradients(some: Parts, **options: bool) -> Tensor:
        return torch.stack([run(some, seed, **options).gradient for seed in seeds])

    wholes, in_turn = gradients(whole), gradients(parts)
    mean = wholes.mean(0)
    norm = float(mean.norm())

    def difference(of_parts: Tensor) -> tuple[float, float]:
        """Return the distance as a share of the whole, and how much of it rounding and draws explain."""
        apart = wholes - of_parts
        spread = float((apart - apart.mean(0)).norm()) / math.sqrt(max(1, len(seeds) - 1)) / norm
        return float(apart.mean(0).norm()) / norm, max(tolerance, SPREADS * spread / math.sqrt(len(seeds)))

    error, allowed = difference(in_turn)
    cause = ""
    if not error <= allowed and first.written:
        apart, explained = difference(gradients(parts, resets=True))
        alone = run(parts[:1]).written
        sees = any(not torch.equal(now, alone.get(name, now)) for name, now in first.written.items())
        if apart <= explained and sees:
            names = ", ".join(sorted(first.written)[:PARTS])
            cause = (
                f"the forward pass writes {names}, and micro-batches see each other through it. Write it "
                "once per batch, after the step (in Workload(after_step=…))"
            )
        else:
            error, allowed = apart, explained
    if error <= allowed:
        hides = (
            f"its draws alone change the gradient of {size} samples, which hides differences of less than "
            f"{format_share(allowed)}"
        )
        return Finding(unchecked=hides if allowed > tolerance else None)
    if not cause:
        columns = torch.stack([gradients([part]).mean(0) for part in parts], dim=1)
        passes = first, run(parts)
        cause = _cause_in_hooks(setup.model) or _cause_in_loss(setup, passes, mean, columns, allowed)
    share = format_share(error) if error < 10 else f"{error:.1e} times"
    return Finding(
        f"the gradient of {size} samples has the norm {norm:.4g} at once and "
        f"{float(in_turn.mean(0).norm()):.4g} in micro-batches, which differs by {share}: {cause}"
    )


def _cause_in_hooks(model: nn.Module) -> str | None:
    """Return what to do about the first hook on a gradient; None if the model has none.

    torch lists hooks under private names only.
    """
    kinds = ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks")
    for name, owner in (*model.named_parameters(), *model.named_modules()):
        if any(getattr(owner, kind, None) for kind in kinds):
            return (
                f"a hook changes the gradient of {name or 'the model'!r}, for example clips it, in each "
                "micro-batch and not once per step. Use --max-grad-norm, or change it in the optimizer"
            )
    return None


def _cause_in_loss(
    setup: Setup, passes: tuple[_Pass, _Pass], mean: Tensor, columns: Tensor, allowed: float
) -> str:
    """Return the likely cause of a difference, and what to write.

    ``passes`` are those over the whole and its parts, ``mean`` and ``columns`` the gradients of the whole and
    of each part alone.
    """
    whole, parts = passes
    if isinstance(setup.workload.loss, WholeBatchLoss):
        return (
            "WholeBatchLoss(represent=…) sees other samples beside its own. Compute each row from its own "
            "sample alone, and move what depends on several samples to WholeBatchLoss(loss=…)"
        )
    if whole.is_counted and abs(whole.items - parts.items) > allowed * abs(parts.items):
        return (
            f"the count of the workload's Loss is {whole.items:g} for these samples at once and "
            f"{parts.items:g} in micro-batches. Count the items that total sums over"
        )
    # By singular values: the default driver returns zeros if a part has no gradient, as one without targets.
    weights = torch.linalg.lstsq(columns.nan_to_num(), mean[:, None], driver="gelsd").solution[:, 0]
    if float((columns @ weights - mean).norm()) > allowed * float(mean.norm()):
        return (
            "the loss depends on several samples at once, or is a sum of several means, each over something "
            "else than samples. For a contrastive loss use WholeBatchLoss(represent=…, loss=…), for several "
            'means a Loss by name for each, {"boxes": Loss(total, count), …}, for padding a mask, and for '
            "batch statistics a target batch that fits in one micro-batch"
        )
    if whole.is_counted:
        return "the total of the workload's Loss must be the sum over the items that count counts"
    if float(weights.sum()) > 1.5:
        return (
            "the workload's loss is a sum over the batch. Return the mean over its samples, or "
            "Loss(total, count) with the sum and the number of its items"
        )
    return (
        "the workload's loss is a mean over something else than samples (counted tokens, class weights, "
        "pixels). Return Loss(total, count) with the sum and the number of its items"
    )
