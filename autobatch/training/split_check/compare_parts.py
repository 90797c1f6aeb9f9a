"""Comparison of the gradient of a whole batch with the gradients of its parts, and the cause of a difference.

If the forward pass draws at random, its draws are made the same for a sample in both (`SampleDraws`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from autobatch.training.split_check.random_draws import SEED, NoDropout, SampleDraws
from autobatch.training.split_check.sample_gradient import GradientRunner, SampleGradient
from autobatch.training.split_check.split_samples import Parts, SplitSamples
from autobatch.workload.contract import Collated, WholeBatchLoss
from autobatch.workload.rng import seed_everything

MIXED = "the loss depends on several samples at once"


class UncheckedError(Exception):
    """The reason why whole and parts cannot be compared; its text follows "could not be checked: "."""


def find_fault(runner: GradientRunner, loss: object, samples: SplitSamples, tolerance: float) -> str | None:
    """Return the fault of a loss that makes its parts differ from the whole; None if it has none.

    Args:
        runner: runs the loss.
        loss: the workload's loss.
        samples: the whole batch and its parts.
        tolerance: relative error below which gradients agree.

    Raises:
        UncheckedError: the two cannot be compared.
    """
    if samples.parts is None:
        raise UncheckedError(
            "the collate function draws at random, and what it returns cannot be cut along dimension 0"
        )
    with ExitStack() as held:
        whole, draws = _whole_gradient(runner, samples, tolerance, held)
        fault = _Comparison(runner, loss, whole, draws, tolerance).fault_in(samples)
        if fault is not None and draws is not None and draws.is_flat:
            draws.is_interleaved = True
            draws.start(0, samples.samples)
            whole = runner.run(samples.whole, samples.samples)
            other = _Comparison(runner, loss, whole, draws, tolerance).fault_in(samples)
            # The wrong order of rows looks like a loss that mixes samples.
            fault = other if other is None or MIXED in fault else fault
        if fault is not None and draws is not None and draws.doubts:
            raise UncheckedError(
                f"the forward pass draws at random over the micro-batch ({', '.join(sorted(draws.doubts))})"
            )
    return fault


def _whole_gradient(
    runner: GradientRunner, samples: SplitSamples, tolerance: float, held: ExitStack
) -> tuple[SampleGradient, SampleDraws | None]:
    """Return the gradient of the whole batch, with the mode that fixes its draws if it needs one.

    Raises:
        UncheckedError: the gradient is zero, not finite, or changes from run to run.
    """
    draws = None
    seed_everything(SEED)
    whole = runner.run(samples.whole, samples.samples)
    seed_everything(SEED + 1)
    if _differ(whole, runner.run(samples.whole, samples.samples), tolerance):
        draws = _fixed_draws(runner, samples, held)
        draws.start(0, samples.samples)
        whole = runner.run(samples.whole, samples.samples)
        draws.end()
        draws.start(0, samples.samples)
        if _differ(whole, runner.run(samples.whole, samples.samples), tolerance):
            raise UncheckedError(
                f"the gradients of two passes over the same {samples.samples} samples differ although their "
                "random numbers are the same: the model or the loss keeps state between passes, or draws "
                "from a generator of its own"
            )
    length = float(whole.elements.norm())
    if not 0.0 < length < float("inf"):
        kind = "zero" if length == 0.0 else "not finite"
        raise UncheckedError(f"the gradient of {samples.samples} samples is {kind}")
    return whole, draws


def _fixed_draws(runner: GradientRunner, samples: SplitSamples, held: ExitStack) -> SampleDraws:
    """Enter the modes that fix the draws of a forward pass, until ``held`` is closed."""
    held.enter_context(NoDropout())
    draws: SampleDraws = held.enter_context(SampleDraws())
    assert samples.parts
    part, size = samples.parts[0]
    recorded = []
    for batch, number in ((part, size), (samples.whole, samples.samples)):
        draws.start(0, number)
        with draws.recorded() as shapes:
            runner.run(batch, number)
        recorded.append(shapes)
    draws.compare(recorded[0], size, recorded[1], samples.samples)
    return draws


def _differ(one: SampleGradient, other: SampleGradient, tolerance: float) -> bool:
    """Check whether two gradients of the same samples differ; those that are not finite do not."""
    return float((one.elements - other.elements).norm()) > tolerance * float(one.elements.norm())


@dataclass(frozen=True)
class _Comparison:
    """A whole batch to compare parts with."""

    runner: GradientRunner
    loss: object
    whole: SampleGradient
    draws: SampleDraws | None
    tolerance: float

    def fault_in(self, samples: SplitSamples) -> str | None:
        """Return the fault that the parts show; None if they agree with the whole."""
        assert samples.parts is not None
        fault = self._fault_of(samples.parts)
        if fault is None or samples.collated is None or samples.cut is None or self._fault_of(samples.cut):
            return fault
        return (
            f"{fault.partition(': ')[0]}: a sample is collated differently beside other samples (padding, or "
            "a figure of the whole micro-batch), and the loss depends on that. Let the model ignore padding "
            "with a mask, and return Loss(total, count) if collate counts items"
        )

    def _fault_of(self, parts: Parts) -> str | None:
        return self._cached_fault(parts) if isinstance(self.loss, WholeBatchLoss) else self._fault(parts)

    def _cached_fault(self, parts: Parts) -> str | None:
        cached = self.runner.run_cached(_Placed(self.runner, parts, self.draws), self.whole.samples)
        error = self._error(cached.elements)
        if error <= self.tolerance:
            return None
        return (
            f"the gradient of {self.whole.samples} samples at once and by their cached rows differs by "
            f"{error:.1%}: WholeBatchLoss(represent=…) must compute each row from its own sample alone. Move "
            "what depends on several samples to WholeBatchLoss(loss=…)"
        )

    def _fault(self, parts: Parts) -> str | None:
        whole, tolerance = self.whole, self.tolerance
        found = [self._run(first, *part) for first, part in _with_places(parts)]
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
                f"is not: {_cause(whole, [], mixes_samples=False)}"
            )
        columns = torch.stack([part.elements for part in found], dim=1)
        shares = [part.weight / total for part in found]
        mean = columns @ torch.tensor(shares, dtype=torch.float64, device=columns.device)
        error = self._error(mean)
        if error <= tolerance:
            return None
        weights = _fitted(columns, whole.elements)
        residual = self._error(columns @ weights)
        start = f"the gradient of {whole.samples} samples at once and in parts differs by {error:.1%}: "
        return start + _cause(whole, weights.tolist(), mixes_samples=residual > tolerance)

    def _run(self, first: int, batch: Collated, size: int) -> SampleGradient:
        if self.draws is None:
            seed_everything(SEED)
            return self.runner.run(batch, size)
        self.draws.start(first, size)
        found = self.runner.run(batch, size)
        self.draws.end()
        return found

    def _error(self, elements: torch.Tensor) -> float:
        """Return the relative distance from the gradient of the whole."""
        return float((elements - self.whole.elements).norm() / self.whole.elements.norm())


def _fitted(columns: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return the weights with which the columns come closest to the whole."""
    # By singular values: the default driver returns zeros if a part has no gradient, as one without targets.
    weights: torch.Tensor = torch.linalg.lstsq(columns, whole[:, None], driver="gelsd").solution[:, 0]
    return weights


class _Placed:
    """Parts on the device for the two passes of a `WholeBatchLoss`, each from the same random states."""

    def __init__(self, runner: GradientRunner, parts: Parts, draws: SampleDraws | None) -> None:
        self._runner = runner
        self._parts = parts
        self._draws = draws

    def __iter__(self) -> Iterator[tuple[Collated, int]]:
        """Yield each part with its samples; afterwards the draws are those of the whole batch."""
        for first, (batch, size) in _with_places(self._parts):
            if self._draws is not None:
                self._draws.start(first, size)
            else:
                seed_everything(SEED)
            yield self._runner.placed(batch), size
        if self._draws is not None:
            self._draws.place(0, sum(size for _, size in self._parts))


def _with_places(parts: Parts) -> Iterator[tuple[int, tuple[Collated, int]]]:
    """Yield each part with the place of its first sample in the whole."""
    first = 0
    for part in parts:
        yield first, part
        first += part[1]


def _cause(whole: SampleGradient, weights: list[float], *, mixes_samples: bool) -> str:
    """Name the likely cause of a fault, and its remedy."""
    if mixes_samples:
        return (
            f"{MIXED}, so the batch cannot be split. If samples are padded to the longest of their batch, "
            "mask the padding in the model and the loss. For a contrastive loss or a penalty on the whole "
            "batch use WholeBatchLoss(represent=…, loss=…), which is accumulated exactly. For batch "
            "statistics use a target batch that fits in one micro-batch"
        )
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
