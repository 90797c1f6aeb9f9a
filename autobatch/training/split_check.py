"""The check before training that splitting a batch does not change its gradient.

The first samples of the run are collated as a whole and as micro-batches. Both run through the code that
trains, with the same draws: the whole as one micro-batch, the others one after the other. Their gradients
must agree. If they do not, the gradient gᵢ of each micro-batch alone tells the likely cause. If the whole is
a sum of the gᵢ with other weights, the loss is a mean over something else than samples. If it is none, it
depends on several samples at once (contrastive losses, normalisation over the batch), or is a sum of several
such means.

Rounding is less than an error in float64, so the passes run in it if the model takes it and its copy is
small. If two seeds give two gradients, both sides are means over seeds, and a difference counts if it is
several times what their spread explains. In train mode dropout and BatchNorm stay in eval mode, because they
make every pass differ. What cannot be checked is a note, and ends no run.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from itertools import accumulate as running_sums
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from autobatch.core.errors import InputError
from autobatch.core.units import format_share
from autobatch.device.base import Meter
from autobatch.device.oom import Verdict, classify, loses_context
from autobatch.planning import split_evenly
from autobatch.rehearsal.rehearsal import on_copies
from autobatch.rehearsal.setup import Setup
from autobatch.step.gradients import LOW_PRECISION
from autobatch.step.train_state import TrainState
from autobatch.step.train_step import accumulate
from autobatch.training.batchnorm import batch_norm_notes, batch_norms, smallest_micro_batch
from autobatch.workload.contract import Collated, WholeBatchLoss, Workload
from autobatch.workload.data import collate_samples, elements, fetch, shallow_copies
from autobatch.workload.data_digest import digest_of
from autobatch.workload.nested import cut, map_tensors
from autobatch.workload.order import GlobalBatchSampler, epoch_of
from autobatch.workload.rng import preserved_random_state, seed_everything
from autobatch.workload.user_code import describe

SplitCheck = Literal["error", "note", "off"]
CANDIDATES = 256
"""Samples of the run's beginning that the compared ones are chosen from."""
READ_SECONDS = 0.5
"""Time after which no more candidates are read, eight at a time."""
FEW_SAMPLES = 8
"""Samples that are compared first: they show most faults, and how long more of them take."""
MANY_SAMPLES = 64
PARTS = 4
"""Micro-batches that samples are compared in, and the most micro-batches that many samples may be."""
SECONDS = 5.0
"""Expected time above which no more than a few samples are compared."""
FLOAT64_BUDGET_SHARE = 0.1
"""Share of the budget below which a loss is compared in float64; model copy and gradient count."""
FP16_SCALE = 1024.0
"""Loss scale of fp16, in which gradients below 6e-8 would be 0."""
ELEMENTS = 1024
"""Elements read from each parameter's gradient, evenly spaced: enough to compare, for any size of model."""
REPEATS = 8
"""Seeds over which the gradients of a random loss are averaged."""
SPREADS = 4.0
"""Standard errors of such a mean that a difference must exceed: chance does so once in 200 times at most,
and less often the more parameters the draws reach."""
ANYWAY = "To train anyway, use --split-check note"
SEVERAL = (
    "the loss depends on several samples at once, or is a sum of several means, each over something else "
    "than samples. For a contrastive loss use WholeBatchLoss(represent=…, loss=…), for several means a Loss "
    'by name for each, {"boxes": Loss(total, count), …}, and for batch statistics a target batch that fits '
    "in one micro-batch"
)


class Finding(NamedTuple):
    """Result of the check; without fault and reason, the loss can be split."""

    fault: str | None = None
    """Difference of the gradients with its likely cause, and what to write."""
    unchecked: str | None = None
    """Reason why the check was not made, or hides a difference."""
    remark: str | None = None
    """What else splitting a batch changes."""

    def notes(self, *, is_split: bool) -> list[str]:
        """Return what to tell the user about a run whose batches are split, or are one micro-batch each."""
        if not is_split:
            exact = "every batch is one micro-batch, which is exact as long as memory does not run out"
            return [] if self.fault is None else [f"{self.fault}. In this run {exact}"]
        unchecked = self.unchecked and (
            "not checked whether the loss can be split into micro-batches exactly: "
            f"{self.unchecked.rstrip('.')}. Make sure that it is a mean over samples, or a Loss(total, count)"
        )
        return [line for line in (self.fault, unchecked, self.remark) if line]


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
        InputError: batches are split and the loss cannot be, or a BatchNorm gets a single value.
    """
    notes = batch_norm_notes(setup.model, sampler, micro_batch)
    is_split = min(micro_batch, share_of(sampler.target_batch)) < sampler.target_batch
    if batch_norms(setup.model) and smallest_micro_batch(sampler, micro_batch, share_of) == 1:
        _check_single_sample(setup, sampler)
    finding = Finding()
    if check != "off":
        finding = examine_loss(setup, micro_batch, first_samples(sampler))
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


def examine(setup: Setup, micro_batch: int, ids: list[int] | None) -> Finding:
    """Examine the loss of a setup; see `examine_loss`. None stands for batches of one micro-batch."""
    if ids is None:
        samples, order = epoch_of(setup.workload, 0)
        sizes = {"samples": samples, "target_batch": micro_batch, "steps": CANDIDATES}
        ids = first_samples(GlobalBatchSampler(**sizes, seed=0, order=order))
    return examine_loss(setup, micro_batch, ids)


def examine_loss(setup: Setup, micro_batch: int, ids: Sequence[int]) -> Finding:
    """Examine whether splitting a batch of these samples changes its gradient; no state is changed.

    A few samples are compared first, then as many of them as memory and time allow.
    """
    setup = replace(setup, knobs={}, world=1, ema=None)
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
            for size in dict.fromkeys([many, min(many, micro_batch)]) if expected <= SECONDS else ():
                if size <= few or finding.fault is not None:
                    break
                larger = _compare(setup, _choose(candidates, size), setup.device.enforced)
                if larger.fault is not None or larger.unchecked is None:
                    return larger
        except Exception as error:  # what cannot be checked ends no run
            if loses_context(error):
                raise
            return Finding(unchecked=describe(error))
        return finding


def _read(setup: Setup, ids: Sequence[int]) -> list[Any]:
    """Read samples until the time is over. A stream has its first samples at hand."""
    data, start = setup.workload.train_data, setup.clock()
    if setup.stream is not None:
        ids = range(min(len(data), CANDIDATES))  # type: ignore[arg-type]
    samples: list[Any] = []
    for first in range(0, len(ids), 8):
        samples += fetch(data, ids[first : first + 8])
        if setup.clock() - start > READ_SECONDS:
            break
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


# Samples, collated as a whole and in parts


class _Part(NamedTuple):
    """Some samples, collated on the host."""

    batch: Collated
    size: int


class _Split(NamedTuple):
    """Samples, collated as a whole and in parts."""

    whole: _Part
    alone: list[_Part]
    """Parts that were collated alone, as training does; empty if the collate function draws at random."""
    cut: list[_Part]
    """Parts that were cut from the whole; empty if it has no samples along dimension 0."""


def _collate(workload: Workload, samples: list[Any]) -> _Split:
    """Collate samples as a whole and in parts."""

    def collated(some: list[Any], seed: int = 1) -> Collated:
        seed_everything(seed)
        return collate_samples(shallow_copies(some), workload.collate)

    sizes = split_evenly(len(samples), max(2, min(PARTS, len(samples) // 2)))
    places = [slice(stop - size, stop) for stop, size in zip(running_sums(sizes), sizes, strict=True)]
    whole = collated(samples)
    is_random = digest_of(whole) != digest_of(collated(samples, seed=2))
    alone = [] if is_random else [collated(samples[place]) for place in places]
    parts: list[Collated] = []
    with suppress(InputError):
        parts = [cut(whole, place, len(samples)) for place in places]
    return _Split(_Part(whole, len(samples)), list(map(_Part, alone, sizes)), list(map(_Part, parts, sizes)))


# Passes over them


class _Gradient(NamedTuple):
    """Gradient of the loss of some samples."""

    elements: Tensor
    """Elements of it, in float64 on the host."""
    items: float
    """Items that their `Loss` counts; their number if it is a mean over samples."""
    is_counted: bool
    """True for a `Loss`."""


class _Passes:
    """Forward and backward passes as a step runs them, each from the same buffers."""

    def __init__(
        self, setup: Setup, train_state: TrainState, meter: Meter, dtype: torch.dtype | None
    ) -> None:
        self._train_state, self._meter, self._dtype = train_state, meter, dtype
        self.loss = setup.workload.loss
        if train_state.scaler is not None:
            kind = setup.device.torch_device.type
            train_state.scaler = torch.amp.GradScaler(kind, init_scale=FP16_SCALE)
        types = {parameter.dtype for parameter in train_state.parameters}
        is_low = setup.precision != "fp32" or not types.isdisjoint(LOW_PRECISION)
        # Each part rounds its gradient, to 8 significant bits in bf16 and 11 in fp16. float32 also stands for
        # models with operations in TF32; float64 for those with some in float32.
        self.tolerance = 3e-2 if is_low else 1e-5 if types == {torch.float64} else 1e-2
        """Relative error that rounding stays below."""
        self._before = _state_of(train_state.model)
        self.written: dict[str, Tensor] = {}
        """Elements of buffers and frozen parameters that the last pass has changed, as it left them."""

    def run_apart(self, parts: Sequence[_Part], seed: int) -> Tensor:
        """Return the mean over micro-batches that run alone, each from the buffers at the start."""
        gradients = [self.run([part], seed) for part in parts]
        # A part that counts nothing may have a total, as negatives of a focal loss have without positives.
        weights = [gradient.items or 1.0 for gradient in gradients]
        parts_of_mean = [
            g.elements * weight / sum(weights) for g, weight in zip(gradients, weights, strict=True)
        ]
        return torch.stack(parts_of_mean).sum(0)

    def run(self, parts: Sequence[_Part], seed: int) -> _Gradient:
        """Run micro-batches forward and backward, one after the other, with the draws of a seed."""
        train_state, dtype = self._train_state, self._dtype
        seed_everything(seed)
        # Copies, because a loss may change its batch.
        fetched = ((copy.deepcopy(part.batch), part.size) for part in parts)
        if dtype is not None:
            fetched = (
                (map_tensors(batch, lambda t: t.to(dtype) if t.is_floating_point() else t), size)
                for batch, size in fetched
            )
        samples = sum(part.size for part in parts)
        try:
            totals = accumulate(train_state, train_state.feed(fetched, self._meter), samples, lambda _: None)
            items = float(samples if totals.count is None else totals.count)
            # Moved and converted at once: a model may have thousands of parameters.
            found = torch.cat([_elements(*pair) for pair in train_state.gradients.by_parameter()])
            now = _state_of(train_state.model)
            self.written = {
                name: now[name]
                for name, before in self._before.items()
                if name in now and not torch.equal(now[name], before)
            }
        finally:
            train_state.gradients.clear()
            train_state.buffers.restore()
        scale = 1.0 if train_state.scaler is None else FP16_SCALE
        factor = totals.divisor / (items or 1.0) / scale
        return _Gradient(found.to("cpu", torch.float64) * factor, items, totals.count is not None)


@contextmanager
def _open_passes(
    setup: Setup,
    session: Callable[[], AbstractContextManager[Meter]],
    dtype: torch.dtype | None,
    *,
    is_still: bool = True,
    is_eval: bool = False,
) -> Iterator[_Passes]:
    """Open passes on temporary weights within the block.

    Args:
        setup: the workload.
        session: opens the meter, which counts the copies and the batches.
        dtype: type of the model and its batches; None for their own, and the precision of the run.
        is_still: whether dropout and BatchNorm are in eval mode.
        is_eval: whether the whole model is.
    """
    setup = setup if dtype is None else replace(setup, precision="fp32")
    with session() as meter, on_copies(setup, meter) as train_state:
        model = train_state.model
        for tensor in [*model.parameters(), *model.buffers()]:
            if dtype is not None and tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
        meter.count(tensor.data for tensor in [*model.parameters(), *model.buffers()])
        if is_eval:
            model.eval()
        for module in model.modules() if is_still else ():
            if isinstance(module, nn.modules.dropout._DropoutNd | _BatchNorm):
                module.eval()
        yield _Passes(setup, train_state, meter, dtype)


def _state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return elements of buffers and frozen parameters, without the statistics of BatchNorm."""
    left_out = {id(buffer) for norm in batch_norms(model) for buffer in norm.buffers()}
    frozen = (pair for pair in model.named_parameters() if not pair[1].requires_grad)
    return {
        name: _elements(tensor, tensor).clone()
        for name, tensor in (*model.named_buffers(), *frozen)
        if id(tensor) not in left_out
    }


def _elements(parameter: Tensor, gradient: Tensor | None) -> Tensor:
    """Return elements of the gradient of a parameter, evenly spaced."""
    stride = max(1, parameter.numel() // ELEMENTS)
    if gradient is None:
        return parameter.new_zeros(len(range(0, parameter.numel(), stride)))
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense.detach().flatten()[::stride]


# Comparison of their gradients


class _UncheckedError(Exception):
    """The reason why gradients cannot be compared."""


def _compare(
    setup: Setup, samples: list[Any], session: Callable[[], AbstractContextManager[Meter]]
) -> Finding:
    """Compare samples with their parts, in the first type of pass that the workload runs in."""
    split = _collate(setup.workload, samples)
    if not split.alone and not split.cut:
        reason = "the collate function draws at random, and what it returns has no samples along dimension 0"
        return Finding(unchecked=reason)
    types = {parameter.dtype for parameter in setup.model.parameters()}
    size = sum(parameter.numel() for parameter in setup.model.parameters()) * 16
    takes_float64 = types == {torch.float64} or size < setup.device.budget_bytes * FLOAT64_BUDGET_SHARE
    findings: list[Finding] = []
    reason = ""
    for dtype in (torch.float64, None) if takes_float64 else (None,):
        # In eval mode dropout of attention and the like ends, and terms that only training has.
        for is_eval in (False, True):
            try:
                with _open_passes(setup, session, dtype, is_eval=is_eval) as passes:
                    findings.append(_judge(passes, split, setup))
            except Exception as error:
                # A model that trains may still fail here (another type or mode), by no fault of its loss.
                if loses_context(error):
                    raise
                reason = str(error) if isinstance(error, _UncheckedError) else describe(error)
                if classify(error) is not Verdict.NONE:
                    reason = f"memory ran out for {len(samples)} samples"
                continue
            if findings[-1].unchecked is None:
                return findings[-1]._replace(remark=findings[0].remark)
        if findings:
            return findings[0]
    return Finding(unchecked=reason)


class _Difference(NamedTuple):
    """Difference of the gradients of a whole and of its parts, as means over some seeds."""

    whole: Tensor
    parts: Tensor
    error: float
    """Distance of the two, as a share of the whole."""
    allowed: float
    """Error that rounding and draws explain."""

    @property
    def is_fault(self) -> bool:
        """True if the parts do not give the gradient of the whole."""
        return not self.error <= self.allowed


def _judge(passes: _Passes, split: _Split, setup: Setup) -> Finding:
    """Compare a batch with its parts."""
    parts, size = split.alone or split.cut, split.whole.size
    # What it changes of large buffers is not undone, but what later passes change of them is.
    passes.run([split.whole], 1)
    first, other, again = (passes.run([split.whole], seed).elements for seed in (1, 2, 1))
    most = passes.tolerance * float(first.norm())
    if float((first - again).norm()) > most:
        raise _UncheckedError(
            f"two passes over the same {size} samples differ although their draws are the same: the model or "
            "the loss keeps state between passes, or draws from a generator of its own"
        )
    written, names = passes.written, ", ".join(sorted(passes.written)[:PARTS])
    seeds = range(1, 1 + (REPEATS if float((first - other).norm()) > most else 1))
    wholes = torch.stack([first, *(passes.run([split.whole], seed).elements for seed in seeds[1:])])

    def differ(run: Callable[[Sequence[_Part], int], Tensor], parts: list[_Part]) -> _Difference:
        return _difference(wholes, torch.stack([run(parts, seed) for seed in seeds]), passes.tolerance)

    def in_turn(parts: Sequence[_Part], seed: int) -> Tensor:
        return passes.run(parts, seed).elements

    if not 0.0 < float(wholes.mean(0).norm()) < math.inf:
        raise _UncheckedError(
            f"the gradient of {size} samples is {'zero' if not wholes.any() else 'not finite'}"
        )
    found, cause = differ(in_turn, parts), None
    remark = names and f"the forward pass writes {names} in each micro-batch of a step, not once per step"
    if found.is_fault and written:
        alone = differ(passes.run_apart, parts)
        passes.run(parts[:1], 1)
        sees_samples = any(
            not torch.equal(values, passes.written.get(name, values)) for name, values in written.items()
        )
        if alone.is_fault or not sees_samples:
            remark += f": later micro-batches read it, which changes the gradient by {_share(found.error)}"
            found = alone
        else:
            cause = (
                f"the forward pass writes {names}, and micro-batches see each other through it. Write it "
                "once per batch, after the step (in Workload(after_step=…))"
            )
    if not found.is_fault:
        hidden = None
        if found.allowed > passes.tolerance:
            hidden = (
                f"its draws alone change the gradient of {size} samples, which hides differences of less "
                f"than {format_share(found.allowed)}"
            )
        return Finding(None, hidden, remark or None)
    cause = cause or _cause_in_hooks(setup.model)
    if cause is None and split.alone and split.cut and not differ(in_turn, split.cut).is_fault:
        cause = (
            "a sample is collated differently beside other samples (padding, or a figure of the whole "
            "micro-batch). Let the model ignore padding with a mask, and return Loss(total, count) if "
            "collate counts items"
        )
    cause = cause or _cause(passes, split.whole, parts, found, seeds)
    return Finding(
        f"the gradient of {size} samples has the norm {float(found.whole.norm()):.4g} at once and "
        f"{float(found.parts.norm()):.4g} in micro-batches, which differs by {_share(found.error)}: {cause}"
    )


def _share(error: float) -> str:
    return format_share(error) if error < 10 else f"{error:.1e} times"


def _difference(wholes: Tensor, of_parts: Tensor, tolerance: float) -> _Difference:
    """Compare gradients of a whole and of its parts, a row for each seed."""
    length, repeats = float(wholes.mean(0).norm()), len(wholes)
    apart = wholes - of_parts
    spread = float((apart - apart.mean(0)).norm()) / math.sqrt(max(1, repeats - 1)) / length
    return _Difference(
        whole=wholes.mean(0),
        parts=of_parts.mean(0),
        error=float(apart.mean(0).norm()) / length,
        allowed=max(tolerance, SPREADS * spread / math.sqrt(repeats)),
    )


def _cause_in_hooks(model: nn.Module) -> str | None:
    """Return what to do about the first hook on a gradient; None if the model has none.

    torch lists hooks under private names only.
    """
    kinds = ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks")
    named: list[tuple[str, Any]] = [*model.named_parameters(), *model.named_modules()]
    hooked = [name for name, owner in named if any(getattr(owner, kind, None) for kind in kinds)]
    if not hooked:
        return None
    return (
        f"a hook changes the gradient of {hooked[0] or 'the model'!r}, for example clips it, in each "
        "micro-batch and not once per step. Use --max-grad-norm, or change the gradient in the optimizer"
    )


def _cause(passes: _Passes, whole: _Part, parts: list[_Part], found: _Difference, seeds: range) -> str:
    """Return the likely cause of a difference, and what to write."""
    if isinstance(passes.loss, WholeBatchLoss):
        return (
            "WholeBatchLoss(represent=…) sees other samples beside its own. Compute each row from its own "
            "sample alone, and move what depends on several samples to WholeBatchLoss(loss=…)"
        )
    at_once, together = passes.run([whole], 1), passes.run(parts, 1)
    is_counted = at_once.is_counted
    if is_counted and abs(at_once.items - together.items) > found.allowed * abs(together.items):
        return (
            f"the count of the workload's Loss is {at_once.items:g} for these samples at once and "
            f"{together.items:g} in micro-batches. Count the items that total sums over"
        )
    of_each = [[passes.run([part], seed).elements for seed in seeds] for part in parts]
    columns = torch.stack([torch.stack(of_seeds).mean(0) for of_seeds in of_each], dim=1)
    if columns.isfinite().all():
        # By singular values: the default driver returns zeros if a part has no gradient, as one without
        # targets.
        weights = torch.linalg.lstsq(columns, found.whole[:, None], driver="gelsd").solution[:, 0]
        if float((columns @ weights - found.whole).norm()) > found.allowed * float(found.whole.norm()):
            return SEVERAL
        if not is_counted and float(weights.sum()) > 1.5:
            return (
                "the workload's loss is a sum over the batch. Return the mean over its samples, or "
                "Loss(total, count) with the sum and the number of its items"
            )
    if is_counted:
        return "the total of the workload's Loss must be the sum over the items that count counts"
    return (
        "the workload's loss is a mean over something else than samples (counted tokens, class weights, "
        "pixels). Return Loss(total, count) with the sum and the number of its items"
    )


def _check_single_sample(setup: Setup, sampler: GlobalBatchSampler) -> None:
    """Raise if BatchNorm cannot train on a single sample, rather than in the last step of the run."""
    setup = replace(setup, knobs={}, world=1, ema=None)
    try:
        with (
            preserved_random_state(),
            _open_passes(setup, setup.device.training, None, is_still=False) as passes,
        ):
            samples = fetch(setup.workload.train_data, [0])
            passes.run([_Part(collate_samples(samples, setup.workload.collate), 1)], 1)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            return
        last = sampler.size(sampler.total - 1)
        raise InputError(
            f"BatchNorm needs 2 samples, and this run has a micro-batch of 1 (its last batch has {last} "
            "samples): choose a target batch that leaves no single sample, or --steps instead of --epochs"
        ) from None
    except Exception:  # other errors occur in training too, and are reported there
        return
