"""Comparison of the gradient of a whole batch with those of its parts, and the cause of a difference.

The gradient g of a whole batch is compared with the gradients of its parts, each computed alone. If their
mean with the weights of accumulation is g, accumulation is exact. If other weights give g, the loss is a mean
over something else than samples. If no weights do, it is a sum of several such means, or it depends on
several samples at once (contrastive losses, normalisation over the batch). For a `WholeBatchLoss` the two
passes over the parts must give g.

Each pass begins with the same state of the modules. If it draws at random, its draws are made the same for a
sample in the whole and in its part (`SameDraws`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

import torch
from torch import Tensor

from autobatch.core.errors import InputError
from autobatch.core.units import format_share
from autobatch.device.base import Meter
from autobatch.device.oom import Verdict, classify, first_line
from autobatch.rehearsal.setup import Setup
from autobatch.step.loss import ONE, Form, StepTotals, check_form
from autobatch.training.split_check.passes import (
    SEED,
    GradientRunner,
    NoDropout,
    PassType,
    SameDraws,
    SampleGradient,
    names_of,
    open_runner,
)
from autobatch.training.split_check.samples import Part, SplitSamples
from autobatch.workload.contract import Collated, WholeBatchLoss, Workload
from autobatch.workload.rng import seed_everything

FLOAT64_BUDGET_SHARE = 0.1
"""Share of the budget below which a loss is compared in float64; model copy and gradient count."""
STATE_TOLERANCE = 0.01
"""Share of a gradient that may depend on what earlier micro-batches of the step have written."""
ONE_MICRO_BATCH = (
    "In this run every batch is one micro-batch, which is exact as long as memory does not run out"
)
NO_MEAN = (
    "the loss depends on several samples at once, or is a sum of several means, each over something else "
    "than samples"
)
NO_MEAN_ADVICE = (
    "For a contrastive loss or a penalty on the whole batch use WholeBatchLoss(represent=…, loss=…), which "
    "is accumulated exactly. For several means (boxes, class weights, tokens) return a Loss of its own for "
    'each, by name: {"boxes": Loss(total, count), "classes": …}. For batch statistics use a target batch '
    "that fits in one micro-batch"
)


class UncheckedError(Exception):
    """The reason why whole and parts cannot be compared; its text follows "could not be checked: "."""


class NoGradientError(UncheckedError):
    """The whole has a gradient of zero."""


class Finding(NamedTuple):
    """Result of a comparison; without fault and reason, the loss can be split."""

    fault: str | None = None
    """Reason why the gradient of a batch is not that of its parts."""
    unchecked: str | None = None
    """Reason why the check could not be made."""
    remarks: tuple[str, ...] = ()
    """What else splitting a batch changes."""
    writes: str = ""
    """What the forward pass writes besides the statistics of BatchNorm, in words."""

    def notes(self, *, is_split: bool) -> list[str]:
        """Return what to tell the user about a run whose batches are split, or are one micro-batch each."""
        if not is_split:
            return [] if self.fault is None else [f"{self.fault}. {ONE_MICRO_BATCH}"]
        found = [] if self.fault is None else [self.fault]
        if self.unchecked is not None:
            found.append(
                "whether the loss can be split into micro-batches exactly could not be checked: "
                f"{self.unchecked.rstrip('.')}. Make sure that it is a mean over samples, or return "
                "Loss(total, count)"
            )
        return [*found, *self.remarks]

    def explaining(self, found: Finding) -> Finding:
        """Return what a comparison found, with what is known about written state."""
        fault = found.fault
        if fault is not None and self.writes and NO_MEAN in fault:
            fault = f"{fault.partition(': ')[0]}: {_state_cause(self.writes)}"
        remarks = (*found.remarks, *self.remarks)
        return found._replace(fault=fault or self.fault, remarks=remarks, writes=self.writes)


def pass_types(setup: Setup, *, in_training: bool) -> list[PassType]:
    """Return the types of passes to try, in order.

    Eval mode comes first before training, because dropout and BatchNorm do nothing in it. In training it is
    train mode, which may add terms to the loss.
    """
    parameters = list(setup.model.parameters())
    is_double = all(one.dtype is torch.float64 for one in parameters)
    is_small = sum(one.numel() for one in parameters) * 16 < setup.device.budget_bytes * FLOAT64_BUDGET_SHARE
    # A loss may build tensors of the model's own type, which do not go with a converted one.
    exact = [torch.float64] * (is_double or is_small) + [torch.float32] * (not is_double)
    found = [PassType(dtype, in_training) for dtype in exact]
    return [*found, PassType(exact[-1], True), PassType(None, True, setup.precision)]


def compare(
    setup: Setup, meter: Meter, split: SplitSamples, kinds: Sequence[PassType]
) -> tuple[Finding, PassType | None]:
    """Compare a batch with its parts, in the first type of pass that the workload runs in.

    Returns:
        The finding, and the type of pass; None if the workload raised in all, or memory ran out.
    """
    finding = Finding()
    for kind in kinds:
        try:
            with open_runner(setup, meter, kind) as runner:
                return _compare_terms(runner, setup.workload, split), kind
        except UncheckedError as error:
            return Finding(unchecked=str(error)), kind
        except InputError:
            raise
        except Exception as error:
            # A model that trains may still fail here (another type, eval mode, memory): no fault of its loss.
            reason = f"the model or the loss raised {first_line(error)}"
            if classify(error) is not Verdict.NONE:
                reason = f"memory ran out for {split.samples} samples"
            finding = Finding(unchecked=reason)
    return finding, None


def _compare_terms(runner: GradientRunner, workload: Workload, split: SplitSamples) -> Finding:
    """Compare a batch with its parts, for each of several terms of the loss alone.

    Raises:
        UncheckedError: see `_Comparison`; a term without a gradient is left out if others have one.
    """
    form = Form({ONE: False})
    if not isinstance(workload.loss, WholeBatchLoss) and split.parts is not None:
        form = check_form(StepTotals(samples=split.samples), runner.terms_of(split.whole))
    skipped: list[NoGradientError] = []
    for runner.term in form:
        try:
            fault = _Comparison(runner, workload.loss, split).fault()
        except NoGradientError as error:
            skipped.append(error)
            continue
        if fault is not None:
            return Finding(f"in the term {runner.term!r} of the loss, {fault}" if runner.term else fault)
    if len(skipped) == len(form):
        raise skipped[0]
    if not form.counted or workload.counts is not None:
        return Finding()
    names = ", ".join(form.counted)
    return Finding(
        remarks=(
            f"each of the terms {names} is divided by all that it counts in a batch, so a first forward pass "
            "over its micro-batches counts, which takes about a third more time: Workload(counts=…) spares "
            "it if the counts follow from the data",
        )
    )


def find_written(setup: Setup, meter: Meter, split: SplitSamples, micro_batches: int) -> Finding:
    """Find what a forward pass in train mode writes, and whether later micro-batches of a step read it.

    The first two parts run. The micro-batches of a step are named in the message.
    """
    if split.parts is None or len(split.parts) < 2 or isinstance(setup.workload.loss, WholeBatchLoss):
        return Finding()  # a WholeBatchLoss puts everything back between its passes
    for kind in pass_types(setup, in_training=True):
        with suppress(Exception), open_runner(setup, meter, kind) as runner:  # training reports what fails
            return _find_written(runner, split.parts[0], split.parts[1], micro_batches)
    return Finding()


def _find_written(runner: GradientRunner, one: Part, other: Part, micro_batches: int) -> Finding:
    """Compare the gradient of a part with that after another part, whose writes are left in place."""

    def run(part: Part, *, from_start: bool = True) -> Tensor:
        seed_everything(SEED)
        return runner.run(part.batch, part.size, from_start=from_start).elements

    run(one)
    first = runner.state.written()
    alone = run(other)
    second = runner.state.written()
    names = names_of(sorted({*first, *second}))
    if not names:
        return Finding()
    run(one)
    change = float((run(other, from_start=False) - alone).norm() / alone.norm())
    sees_samples = first.keys() != second.keys() or any(not torch.equal(first[k], second[k]) for k in first)
    by = f"changes by {format_share(change)}" if change else "does not change"
    effect = f"the gradient of {other.size} samples {by} after {one.size} others"
    if sees_samples and change > max(STATE_TOLERANCE, runner.tolerance):
        return Finding(f"{effect}: {_state_cause(names)}", writes=names)
    remark = (
        f"the forward pass writes {names}: each of the {micro_batches} micro-batches of a step does, one "
        f"after the other, where one pass over the whole batch would write once; {effect}"
    )
    return Finding(remarks=(remark,), writes=names)


def _state_cause(names: str) -> str:
    return (
        f"the forward pass writes {names}, and micro-batches see each other through it. Write it once per "
        "batch, after the step (in Workload(after_step=…)), or use a target batch that fits in one "
        "micro-batch"
    )


class _Comparison:
    """A whole batch beside its parts, with the same draws.

    Raises:
        UncheckedError: the two cannot be compared; `fault` raises it too.
    """

    def __init__(self, runner: GradientRunner, loss: object, split: SplitSamples) -> None:
        if split.parts is None:
            raise UncheckedError(
                "the collate function draws at random, and what it returns cannot be cut along dimension 0"
            )
        self._runner, self._loss, self._split, self._parts = runner, loss, split, split.parts
        self._draws = SameDraws(split.samples)

    def fault(self) -> str | None:
        """Return the fault of the loss that makes the parts differ from the whole; None if it has none."""
        draws = self._draws
        with ExitStack() as stack:
            is_random = self._draws_at_random()
            if is_random:
                stack.enter_context(NoDropout())
                stack.enter_context(draws)
            fault = self._find_fault()
            if fault is not None and draws.is_flat:
                # The wrong order of rows looks like a loss that mixes samples.
                draws.is_interleaved = True
                other = self._find_fault()
                fault = other if other is None or NO_MEAN in fault else fault
            if fault is not None:
                self._check_repeats()
        if fault is not None and is_random and draws.doubts:
            raise UncheckedError(
                f"the forward pass draws at random over the micro-batch ({', '.join(sorted(draws.doubts))})"
            )
        return fault

    def _draws_at_random(self) -> bool:
        """Check whether two seeds give the whole batch two gradients."""
        found = []
        for seed in (SEED, SEED + 1):
            seed_everything(seed)
            found.append(self._runner.run(self._split.whole, self._split.samples).elements)
        return self._differ(*found)

    def _check_repeats(self) -> None:
        """Raise if the whole batch has another gradient now."""
        samples = self._split.samples
        if self._differ(self._whole.elements, self._run(Part(self._split.whole, samples, 0)).elements):
            raise UncheckedError(
                f"the gradients of two passes over the same {samples} samples differ although their "
                "random numbers are the same: the model or the loss keeps state between passes, through "
                "which micro-batches see each other, or draws from a generator of its own"
            )

    def _find_fault(self) -> str | None:
        """Run the whole batch, with its draws recorded, and then its parts."""
        split = self._split
        self._draws.record()
        self._whole = self._runner.run(split.whole, split.samples)
        self._draws.end()
        length = float(self._whole.elements.norm())
        if not 0.0 < length < float("inf"):
            if length == 0.0:
                raise NoGradientError(f"the gradient of {split.samples} samples is zero")
            raise UncheckedError(f"the gradient of {split.samples} samples is not finite")
        find = self._fault_in_rows if isinstance(self._loss, WholeBatchLoss) else self._fault_in_means
        fault = find(self._parts)
        if fault is None or split.collated is None or split.cut is None or find(split.cut) is not None:
            return fault
        return (
            f"{fault.partition(': ')[0]}: a sample is collated differently beside other samples (padding, or "
            "a figure of the whole micro-batch), and the loss depends on that. Let the model ignore padding "
            "with a mask, and return Loss(total, count) if collate counts items"
        )

    def _fault_in_rows(self, parts: list[Part]) -> str | None:
        """Return the fault that the two passes over the parts of a `WholeBatchLoss` show."""
        cached = self._runner.run_cached(_Placed(self._runner, parts, self._draws), self._whole.samples)
        error = self._error(cached)
        if error <= self._runner.tolerance:
            return None
        return (
            f"the gradient of {self._whole.samples} samples at once and by their cached rows differs by "
            f"{format_share(error)}: WholeBatchLoss(represent=…) must compute each row from its own sample "
            "alone. Move what depends on several samples to WholeBatchLoss(loss=…)"
        )

    def _fault_in_means(self, parts: list[Part]) -> str | None:
        """Return the fault that the gradients of parts show, each of which ran alone."""
        whole, tolerance = self._whole, self._runner.tolerance
        found = [self._run(part) for part in parts]
        total = sum(part.weight for part in found)
        if whole.count is not None and abs(whole.count - total) > tolerance * abs(total):
            return (
                f"the count of the workload's Loss is {whole.count:g} for {whole.samples} samples at once "
                f"and {total:g} for the same samples in parts: count must be the number of items that total "
                "sums over"
            )
        sick = [part.samples for part in found if not part.elements.isfinite().all()]
        if sick:
            return (
                f"the gradient of {whole.samples} samples at once is finite, but that of {sick[0]} of them "
                f"is not: {_other_mean(whole, [])}"
            )
        columns = torch.stack([part.elements for part in found], dim=1)
        # A part that counts nothing may have a total, as negatives of a focal loss have without positives.
        shares = [(part.weight or 1.0) / (total or 1.0) for part in found]
        exact = torch.tensor(shares, dtype=torch.float64, device="cpu")
        error = self._error(columns @ exact)
        if error <= tolerance:
            return None
        # By singular values: the default driver returns zeros if a part has no gradient, as one without
        # targets.
        weights = torch.linalg.lstsq(columns, whole.elements[:, None], driver="gelsd").solution[:, 0]
        is_mean = self._error(columns @ weights) <= tolerance
        cause = _other_mean(whole, weights.tolist()) if is_mean else f"{NO_MEAN}. {NO_MEAN_ADVICE}"
        effect = (
            f"the gradient of {whole.samples} samples at once and in parts differs by {format_share(error)}"
        )
        return f"{effect}: {cause}"

    def _run(self, part: Part) -> SampleGradient:
        """Run some samples with the draws that were recorded for them."""
        self._draws.replay(part.first, part.size)
        found = self._runner.run(part.batch, part.size)
        self._draws.end()
        return found

    def _error(self, elements: Tensor) -> float:
        """Return the relative distance from the gradient of the whole."""
        return float((elements - self._whole.elements).norm() / self._whole.elements.norm())

    def _differ(self, one: Tensor, other: Tensor) -> bool:
        """Check whether two gradients of the same samples differ; those that are not finite do not."""
        return float((one - other).norm()) > self._runner.tolerance * float(one.norm())


class _Placed:
    """Parts on the device for the two passes of a `WholeBatchLoss`, each with its draws."""

    def __init__(self, runner: GradientRunner, parts: Sequence[Part], draws: SameDraws) -> None:
        self._runner, self._parts, self._draws = runner, parts, draws

    def __iter__(self) -> Iterator[tuple[Collated, int]]:
        """Yield each part with its samples; afterwards the draws are those of the whole batch."""
        for part in self._parts:
            self._draws.replay(part.first, part.size)
            yield self._runner.placed(part.batch), part.size
        self._draws.place(0, sum(part.size for part in self._parts))


def _other_mean(whole: SampleGradient, weights: list[float]) -> str:
    """Name the likely cause if the whole is a mean of the parts with other weights, and what to change."""
    if whole.count is not None:
        return "the total of the workload's Loss must be the sum over the items that count counts"
    if sum(weights) > 1.5:
        return (
            "the workload's loss is a sum over the batch: return the mean over its samples, or "
            "Loss(total, count) with the sum and the number of its items"
        )
    return (
        "the workload's loss is a mean over something else than samples (counted tokens, class weights, "
        "pixels): return Loss(total, count) with the sum and the number of its items"
    )
