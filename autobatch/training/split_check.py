"""The check before training that splitting a batch does not change its gradient.

Samples of the first batch are collated as a whole and as micro-batches. With g the gradient of the whole, and
gᵢ that of a micro-batch with the count cᵢ, accumulation is exact if g = Σ cᵢ gᵢ ÷ Σ cᵢ. If other weights give
g, the loss is a mean over something else than samples. If no weights do, it is a sum of several such means,
or it depends on several samples at once (contrastive losses, normalisation over the batch). For a
`WholeBatchLoss` the two passes over the micro-batches must give g.

Rounding is less than an error in float64. If the model does not take it, or has no room, the passes run in a
type of its own. If two seeds give two gradients, both sides are means over seeds, and a difference counts if
it is several times what their spread explains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import accumulate, islice
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from autobatch.core.errors import InputError
from autobatch.core.units import format_share
from autobatch.device.base import Meter
from autobatch.device.oom import Verdict, classify, loses_context
from autobatch.planning import split_evenly
from autobatch.rehearsal.setup import Setup
from autobatch.step.loss import ONE
from autobatch.training.batchnorm import batch_norm_notes, batch_norms, smallest_micro_batch
from autobatch.training.split_passes import (
    GradientRunner,
    Part,
    PassType,
    SampleGradient,
    names_of,
    open_runner,
)
from autobatch.workload.contract import Collated, WholeBatchLoss, Workload
from autobatch.workload.data import collate_samples, elements, fetch, shallow_copies
from autobatch.workload.nested import PLAIN, children_of, cut, is_column, samples_along, tensors_of
from autobatch.workload.order import GlobalBatchSampler, epoch_of
from autobatch.workload.rng import preserved_random_state, seed_everything
from autobatch.workload.user_code import describe

SplitCheck = Literal["error", "note", "off"]
CANDIDATES = 256
"""Samples of the run's beginning that the compared ones are chosen from."""
READ_SECONDS = 0.5
"""Time after which no more candidates are read."""
CHUNK = 8
"""Samples that are read before the time is asked for again."""
FEW_SAMPLES = 8
"""Samples that are compared first: they show most faults, and how long more of them take."""
MANY_SAMPLES = 64
MOST_MICRO_BATCHES = 4
"""Micro-batches that many samples may be."""
PARTS = 4
SECONDS = 5.0
"""Expected time above which no more than a few samples are compared."""
FLOAT64_BUDGET_SHARE = 0.1
"""Share of the budget below which a loss is compared in float64; model copy and gradient count."""
STATE_TOLERANCE = 0.01
"""Share of a gradient that may depend on what earlier micro-batches of the step have written."""
REPEATS = 8
"""Seeds over which the gradients of a random loss are averaged."""
SPREADS = 4.0
"""Standard errors of such a mean that a difference must exceed: chance does so once in 200 times at most,
and less often the more parameters the draws reach."""
ANYWAY = "To train anyway, use --split-check note"
ONE_MICRO_BATCH = (
    "In this run every batch is one micro-batch, which is exact as long as memory does not run out"
)
MIXED = (
    "the loss depends on several samples at once, or is a sum of several means, each over something else "
    "than samples. For a contrastive loss use WholeBatchLoss(represent=…, loss=…), for several means a Loss "
    'by name for each, {"boxes": Loss(total, count), …}, and for batch statistics a target batch that fits '
    "in one micro-batch"
)
ROWS = (
    "WholeBatchLoss(represent=…) sees other samples beside its own. Compute each row from its own sample "
    "alone, and move what depends on several samples to WholeBatchLoss(loss=…)"
)
PADDING = (
    "a sample is collated differently beside other samples (padding, or a figure of the whole micro-batch). "
    "Let the model ignore padding with a mask, and return Loss(total, count) if collate counts items"
)
Vectors = list[Tensor]


class Finding(NamedTuple):
    """Result of the check; without fault and reason, the loss can be split."""

    fault: str | None = None
    """Difference of the gradients with its likely cause, and what to write."""
    unchecked: str | None = None
    """Reason why the check was not made, or hides a difference."""
    remark: str | None = None
    """What else splitting a batch changes."""

    @property
    def is_certain(self) -> bool:
        """False if a difference may be hidden."""
        return self.fault is not None or self.unchecked is None

    def notes(self, *, is_split: bool) -> list[str]:
        """Return what to tell the user about a run whose batches are split, or are one micro-batch each."""
        if not is_split:
            return [] if self.fault is None else [f"{self.fault}. {ONE_MICRO_BATCH}"]
        unchecked = self.unchecked and (
            "not checked whether the loss can be split into micro-batches exactly: "
            f"{self.unchecked.rstrip('.')}. Make sure that it is a mean over samples, or a Loss(total, count)"
        )
        return [line for line in (self.fault, unchecked, self.remark) if line]


class _Split(NamedTuple):
    """Samples, collated as a whole and in parts."""

    whole: Part
    collated: list[Part] | None
    """Parts that were collated alone; None if the collate function draws at random."""
    cut: list[Part] | None
    """Parts that were cut from the whole; None if it has no samples along dimension 0."""

    @property
    def parts(self) -> list[Part] | None:
        """The parts to compare; None if there are none with the content of the whole."""
        return self.collated or self.cut


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
    share = share_of(sampler.target_batch)
    is_split = min(micro_batch, share) < sampler.target_batch
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
    """Examine the loss of an open setup; see `examine_loss`. None stands for batches of one micro-batch."""
    if ids is None:
        samples, order = epoch_of(setup.workload, 0)
        ids = first_samples(
            GlobalBatchSampler(
                samples=samples, target_batch=micro_batch, seed=0, steps=CANDIDATES, order=order
            )
        )
    return examine_loss(setup, micro_batch, ids)


def examine_loss(setup: Setup, micro_batch: int, ids: Sequence[int]) -> Finding:
    """Examine whether splitting a batch of these samples changes its gradient; no state is changed.

    A few samples are compared first, then as many of them as memory and time allow.
    """
    with preserved_random_state():
        try:
            candidates = _read(setup, ids)
            many = min(len(candidates), MANY_SAMPLES, MOST_MICRO_BATCHES * micro_batch)
            few = min(many, FEW_SAMPLES, max(2, micro_batch))
            if few < 2:
                return Finding(unchecked="it takes 2 samples, and the batch has 1")
            start = setup.clock()
            finding = _compare(setup, _choose(candidates, few), setup.device.training)
            expected = (setup.clock() - start) * many / few
            for size in {many: None, min(many, micro_batch): None} if expected <= SECONDS else ():
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
    for first in range(0, len(ids), CHUNK):
        samples += fetch(data, ids[first : first + CHUNK])
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


def _compare(
    setup: Setup, samples: list[Any], session: Callable[[], AbstractContextManager[Meter]]
) -> Finding:
    """Compare samples with their parts, in the first type of pass that the workload runs in."""
    split = _collate(setup.workload, samples)
    reason = "the collate function draws at random, and what it returns has no samples along dimension 0"
    for kind in _pass_types(setup) if split.parts else ():
        found: list[Finding] = []
        # In eval mode dropout of attention and the like ends, and terms that only training has.
        for train_mode in (True, False):
            try:
                with (
                    session() as meter,
                    open_runner(setup, meter, kind._replace(train_mode=train_mode)) as runner,
                ):
                    found.append(_judge(runner, split))
            except Exception as error:
                # A model that trains may still fail here (another type or mode), by no fault of its loss.
                if loses_context(error):
                    raise
                reason = describe(error)
                if classify(error) is not Verdict.NONE:
                    reason = f"memory ran out for {len(samples)} samples"
                continue
            if found[-1].is_certain:
                break
        if found:
            return (found[-1] if found[-1].is_certain else found[0])._replace(remark=found[0].remark)
    return Finding(unchecked=reason)


def _pass_types(setup: Setup) -> list[PassType]:
    """Return the types of passes to try, in order."""
    parameters = list(setup.model.parameters())
    is_double = all(one.dtype is torch.float64 for one in parameters)
    is_small = sum(one.numel() for one in parameters) * 16 < setup.device.budget_bytes * FLOAT64_BUDGET_SHARE
    # A loss may build tensors of the model's own type, which do not go with a converted one.
    exact = [torch.float64] * (is_double or is_small) + [torch.float32] * (not is_double)
    return [*(PassType(dtype) for dtype in exact), PassType(None, setup.precision)]


# Samples, collated as a whole and in parts


def _collate(workload: Workload, samples: list[Any]) -> _Split:
    """Collate samples as a whole and in parts.

    Parts are collated alone, as training collates them, if the collate function gives the same result twice.
    If it draws at random (masks of a masked language model), they are cut from the whole.
    """

    def collated(some: list[Any], seed: int = 1) -> Collated:
        seed_everything(seed)
        return collate_samples(shallow_copies(some), workload.collate)

    sizes = split_evenly(len(samples), max(2, min(PARTS, len(samples) // 2)))
    places = [slice(stop - size, stop) for stop, size in zip(accumulate(sizes), sizes, strict=True)]
    whole = collated(samples)
    is_same = _content(whole) == _content(collated(samples, seed=2))
    alone = [collated(samples[place]) for place in places]
    can_cut = _has_samples_first(whole, len(samples)) and _has_samples_first(alone[0], sizes[0])
    can_cut = can_cut and list(_plain_values(whole)) == list(_plain_values(alone[0]))
    return _Split(
        Part(whole, len(samples)),
        list(map(Part, alone, sizes)) if is_same else None,
        [Part(cut(whole, place), size) for place, size in zip(places, sizes, strict=True)]
        if can_cut
        else None,
    )


def _content(batch: Any) -> list[Any]:
    """Return the values of a collated batch in a form that can be compared, NaN included."""
    tensors = [
        (one.shape, one.dtype, one.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
        for one in tensors_of(batch)
    ]
    return [*tensors, *_plain_values(batch)]


def _has_samples_first(batch: Collated, samples: int) -> bool:
    """Check that dimension 0 of each part of a batch counts its samples."""
    try:
        return set(samples_along(batch)) == {samples}
    except InputError:
        return False


def _plain_values(value: Any) -> Iterator[Any]:
    """Yield the values of a collated batch that belong to all of its samples."""
    if isinstance(value, PLAIN):
        yield value
    elif not is_column(value):
        for one in children_of(value):
            yield from _plain_values(one)


# Comparison of their gradients


class _UncheckedError(Exception):
    """The reason why a term cannot be compared."""


class _Difference(NamedTuple):
    """Gradients of a whole and of its parts, each the mean over some seeds."""

    whole: SampleGradient
    samples: int
    total: float
    """Sum of the weights of the parts."""
    columns: Tensor
    """Gradient of each part."""
    length: float
    """Norm of the gradient of the whole."""
    length_of_parts: float
    error: float
    """Distance of the two, as a share of ``length``."""
    spread: float
    """Distance of two seeds, as a share of ``length``; 0 if no draw matters."""
    allowed: float
    """Error that rounding and draws explain."""

    @property
    def is_fault(self) -> bool:
        """True if the parts do not give the gradient of the whole."""
        return not self.error <= self.allowed

    def is_sum_with(self, weights: Tensor) -> bool:
        """Check whether the whole is the sum of the parts with other weights."""
        return float((self.columns @ weights - self.whole.elements).norm()) <= self.allowed * self.length


def _judge(runner: GradientRunner, split: _Split) -> Finding:
    """Compare a batch with its parts, for each of several terms of the loss alone."""
    assert split.parts is not None
    is_whole_loss = isinstance(runner.loss, WholeBatchLoss)
    terms = [ONE] if is_whole_loss else list(runner.terms_of(split.whole, 1))
    names, sees_samples = ("", False) if is_whole_loss else _written(runner, split.whole, split.parts[0])
    found, reason = list[Finding](), ""
    for term in terms:
        try:
            found.append(_judge_term(runner, split, term, names, sees_samples=sees_samples))
        except _UncheckedError as error:  # the other terms may have a gradient
            reason = str(error)
            continue
        if found[-1].fault is not None:
            prefix = f"in the term {term!r} of the loss, " if term else ""
            return found[-1]._replace(fault=f"{prefix}{found[-1].fault}")
    return next((one for one in found if not one.is_certain), found[0] if found else Finding(None, reason))


def _written(runner: GradientRunner, whole: Part, first: Part) -> tuple[str, bool]:
    """Return what a forward pass writes, in words, and whether that depends on the samples."""
    runner.run(whole, 1)
    by_whole = runner.state.written()
    runner.run(first, 1)
    by_first = runner.state.written()
    is_same = by_whole.keys() == by_first.keys() and all(
        torch.equal(one, by_first[k]) for k, one in by_whole.items()
    )
    return names_of({*by_whole, *by_first}), not is_same


def _judge_term(
    runner: GradientRunner, split: _Split, term: str, names: str, *, sees_samples: bool
) -> Finding:
    """Compare a batch with its parts in one term, which run as training runs them, one after the other.

    Args:
        runner: runs the passes.
        split: the batch.
        term: name of the term.
        names: what a forward pass writes, in words.
        sees_samples: whether that depends on the samples.
    """
    parts = split.parts
    assert parts is not None
    one, other, again = (runner.run(split.whole, seed, term).elements for seed in (1, 2, 1))
    most = runner.tolerance * float(one.norm())
    if float((one - again).norm()) > most:
        raise _UncheckedError(
            f"two passes over the same {split.whole.size} samples differ although their draws are the "
            "same: the model or the loss keeps state between passes, or draws from a generator of its own"
        )
    is_random = float((one - other).norm()) > most
    seeds = range(1, 1 + (REPEATS if is_random else 1))
    found = _differ(runner, split.whole, parts, term, seeds)
    remark = None
    if names:
        remark = f"the forward pass writes {names} in each micro-batch of a step, not once per step"
        alone = _differ(runner, split.whole, parts, term, seeds, from_start=True)
        if found.is_fault and not alone.is_fault:
            effect = f"later micro-batches read it, which changes the gradient by {_share(found.error)}"
            if sees_samples and found.error > STATE_TOLERANCE:
                return Finding(
                    f"{_effect(found)}: the forward pass writes {names}, and micro-batches see each other "
                    "through it. Write it once per batch, after the step (in Workload(after_step=…))"
                )
            remark = f"{remark}: {effect}"
        found = alone
    if not found.is_fault:
        unchecked = (
            f"its draws alone change the gradient of {found.samples} samples by {_share(found.spread)}, "
            f"which hides differences of less than {_share(found.allowed)}"
        )
        return Finding(None, unchecked if found.allowed > runner.tolerance else None, remark)
    is_whole_loss = isinstance(runner.loss, WholeBatchLoss)
    cause = _cause_in_hooks(runner.model) or _cause(found, is_whole_loss=is_whole_loss)
    if split.collated is not None and split.cut is not None:
        of_cut = _differ(runner, split.whole, split.cut, term, seeds, from_start=True)
        cause = cause if of_cut.is_fault else PADDING
    return Finding(f"{_effect(found)}: {cause}", None, remark)


def _differ(
    runner: GradientRunner,
    whole: Part,
    parts: list[Part],
    term: str,
    seeds: range,
    *,
    from_start: bool = False,
) -> _Difference:
    """Run a batch and its parts with each seed; ``from_start`` puts back what each part wrote."""
    wholes, columns = Vectors(), Vectors()
    for seed in seeds:
        of_whole = runner.run(whole, seed, term)
        wholes.append(of_whole.elements)
        if isinstance(runner.loss, WholeBatchLoss):
            of_parts = [runner.run_cached(parts, seed)]
        else:
            of_parts = [
                runner.run(part, seed, term, from_start=from_start or not number)
                for number, part in enumerate(parts)
            ]
        columns.append(torch.stack([part.elements for part in of_parts], dim=1))
    mean = torch.stack(wholes).mean(0)
    length = float(mean.norm())
    if not 0.0 < length < math.inf:
        raise _UncheckedError(f"the gradient of {whole.size} samples is {'not finite' if length else 'zero'}")
    total = sum(part.weight for part in of_parts)
    # A part that counts nothing may have a total, as negatives of a focal loss have without positives.
    shares = [(part.weight or 1.0) / (total or 1.0) for part in of_parts]
    exact = torch.tensor(shares, dtype=torch.float64, device="cpu")
    apart = torch.stack([one - part @ exact for one, part in zip(wholes, columns, strict=True)])
    of_means, repeats = torch.stack(columns).mean(0), len(seeds)
    spread = float((apart - apart.mean(0)).norm()) / math.sqrt(max(1, repeats - 1)) / length
    return _Difference(
        whole=replace(of_whole, elements=mean),
        samples=whole.size,
        total=total,
        columns=of_means,
        length=length,
        length_of_parts=float((of_means @ exact).norm()),
        error=float(apart.mean(0).norm()) / length,
        spread=spread,
        allowed=max(runner.tolerance, SPREADS * spread / math.sqrt(repeats)),
    )


def _effect(found: _Difference) -> str:
    """Return the difference in words, with both figures."""
    return (
        f"the gradient of {found.samples} samples has the norm {found.length:.4g} at once and "
        f"{found.length_of_parts:.4g} in micro-batches, which differs by {_share(found.error)}"
    )


def _share(error: float) -> str:
    return format_share(error) if error < 10 else f"{error:.1e} times"


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


def _cause(found: _Difference, *, is_whole_loss: bool) -> str:
    """Return the likely cause of a difference, and what to write."""
    whole, total = found.whole, found.total
    if is_whole_loss:
        return ROWS
    if whole.is_counted and abs(whole.weight - total) > found.allowed * abs(total):
        return (
            f"the count of the workload's Loss is {whole.weight:g} for these samples at once and {total:g} "
            "in micro-batches. Count the items that total sums over"
        )
    if found.columns.isfinite().all():
        # By singular values: the default driver returns zeros if a part has no gradient, as one without
        # targets.
        weights = torch.linalg.lstsq(found.columns, whole.elements[:, None], driver="gelsd").solution[:, 0]
        if not found.is_sum_with(weights):
            return MIXED
        if not whole.is_counted and float(weights.sum()) > 1.5:
            return (
                "the workload's loss is a sum over the batch. Return the mean over its samples, or "
                "Loss(total, count) with the sum and the number of its items"
            )
    if whole.is_counted:
        return "the total of the workload's Loss must be the sum over the items that count counts"
    return (
        "the workload's loss is a mean over something else than samples (counted tokens, class weights, "
        "pixels). Return Loss(total, count) with the sum and the number of its items"
    )


def _check_single_sample(setup: Setup, sampler: GlobalBatchSampler) -> None:
    """Raise if BatchNorm cannot train on a single sample, rather than in the last step of the run."""
    modes = [(module, module.training) for module in setup.model.modules()]
    try:
        with (
            preserved_random_state(),
            setup.device.training() as meter,
            open_runner(setup, meter, PassType(None)) as runner,
        ):
            for module, is_training in modes:
                module.training = is_training
            runner.run(
                Part(collate_samples(fetch(setup.workload.train_data, [0]), setup.workload.collate), 1), 1
            )
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
