"""The part of a micro-batch in the loss of its batch: a total over items, divided by one divisor.

If the loss is a mean over samples, the divisor is the samples of the batch. For a `Loss`, and in 16 bits, it
is a power of two near them, so that dividing by it rounds nothing.

Of several terms, each has a divisor of its own: the items that it counts in the whole batch. Their gradients
are summed in one place, so these divisors must be known before the first backward pass. The data tell them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import Tensor

from autobatch.core.errors import InputError
from autobatch.step.gradients import LOW_PRECISION, is_readable
from autobatch.workload.contract import Collated, Loss, kind_of
from autobatch.workload.user_code import user_code

ONE = ""
"""Name of the only term of a loss."""
Number: TypeAlias = Tensor | float
COUNT_TOLERANCE = 1e-5
"""Relative difference of two sums of the same counts, which may be weights in float32."""


@dataclass(kw_only=True, slots=True)
class Term:
    """Sums of one term of the loss over the micro-batches of one batch."""

    is_mean: bool
    """True if it is a mean over samples, False if it is a `Loss`."""
    divisor: float
    """D: each total was divided by it."""
    is_counted_ahead: bool = False
    """True if the divisor is what the data counted before, which the term must count too."""
    count: Number = 0.0
    """Σ of the counts of the micro-batches that trained."""
    loss: Number = 0.0
    """Σ of the totals, each divided by ``divisor``."""


@dataclass(kw_only=True, slots=True)
class StepTotals:
    """Sums over the micro-batches of one batch."""

    samples: int
    """Samples of the batch."""
    sizes: list[int] = field(default_factory=list)
    """Samples of each micro-batch so far."""
    norms: list[float] | None = None
    """Norms of the gradients of each optimizer if ranks share them; None if this process has whole ones."""
    terms: dict[str, Term] = field(default_factory=dict)
    """Sums of each term of the loss, or of `ONE`; empty before the first micro-batch."""


class CountsAhead:
    """Counts that follow from the data alone, summed over the micro-batches of a batch before they train.

    Args:
        function: the ``counts`` of `autobatch.Workload`.
    """

    def __init__(self, function: Callable[[Collated], Any]) -> None:
        self._function = function
        self.sums: dict[str, float] | None = None
        """Counts of the batch by term, over all ranks; None if a step is only traced."""
        self.sum_over_ranks: Callable[[dict[str, float] | None], dict[str, float]] = lambda own: own or {}
        """Returns the sums of the counts of all ranks; all of them call it, one that has failed with None."""

    def ahead(self, fetched: Iterable[tuple[Collated, int]]) -> Iterator[tuple[Collated, int]]:
        """Count micro-batches of the host, then return them; hold none."""
        try:
            kept = deque(fetched)
            own = self._count(batch for batch, _ in kept)
        except Exception:
            self.sum_over_ranks(None)
            raise
        self.sums = self.sum_over_ranks(own)
        return (kept.popleft() for _ in range(len(kept)))

    def _count(self, batches: Iterable[Collated]) -> dict[str, float]:
        sums: dict[str, float] = {}
        for batch in batches:
            with user_code("counts", self._function):
                counts = self._function(batch)
                if not isinstance(counts, Mapping) or not counts:
                    found = "an empty one" if isinstance(counts, Mapping) else kind_of(counts)
                    raise InputError(
                        f"counts=… must return a mapping of the names of terms to their counts, found {found}"
                    )
                for name, count in counts.items():
                    check_count(count, f"{name!r} in counts=…")
                    check_count(value := float(count), f"{name!r} in counts=…")
                    sums[name] = sums.get(name, 0.0) + value
        return sums


def check_count(count: Any, whose: str) -> None:
    """Check that a count is a number of items, or a 0-d tensor, which is read after the batch.

    Raises:
        InputError: it is neither.
    """
    if not (count.dim() == 0 if isinstance(count, Tensor) else isinstance(count, Real)):
        raise InputError(f"the count of {whose} must be a number or a 0-d tensor, found {kind_of(count)}")
    if not isinstance(count, Tensor) and not 0 <= count < math.inf:
        raise InputError(
            f"the count of {whose} must be finite and at least 0, found {count:g}, so no step was taken: "
            "return the number of items that its total sums over"
        )


def terms_of(loss: object) -> dict[str, Tensor | Loss]:
    """Return the terms that a loss function returned by name, checked; a single one is called `ONE`.

    Raises:
        InputError: it returned no loss, or terms without a name, or with that of their sum.
    """
    terms: dict[Any, Any] = {ONE: loss}
    if not isinstance(loss, Tensor) and isinstance(loss, Mapping):  # an abstract class takes its time
        terms = dict(loss)
        if not terms or "loss" in terms or not all(isinstance(name, str) and name for name in terms):
            raise InputError(
                "a mapping of losses needs a name other than 'loss', which is their sum, for each, found "
                f"{', '.join(map(repr, terms)) or 'none'}: name each term by text"
            )
    for name, term in terms.items():
        whose = f"the term {name!r} of the workload's loss" if name else "the workload's loss"
        total = term.total if isinstance(term, Loss) else term
        if not isinstance(total, Tensor) or total.dim() != 0:
            where = " as the total of its Loss" if isinstance(term, Loss) else ""
            raise InputError(
                f"{whose} must return a 0-d tensor or a Loss, found {kind_of(total)}{where}: return a mean "
                "over the samples, or several terms as a mapping of names to them"
            )
        if isinstance(term, Loss):
            check_count(term.count, whose)
    return terms


def weigh_loss(
    totals: StepTotals, loss: object, size: int, counts: CountsAhead | None
) -> tuple[Tensor, float]:
    """Return what a micro-batch of ``size`` samples adds to the loss of its batch: a 0-d tensor × a weight.

    Args:
        totals: those of the micro-batches before; the sums of this one are added, but for the loss of an only
            term (`add_loss`).
        loss: what the loss function returned for the micro-batch.
        size: its samples; 0 for one that only keeps other ranks company.
        counts: of the batch; None if no term needs them.

    Raises:
        InputError: it returned no loss, or one of another form than for the micro-batch before, or the loss
            has several terms with counts, and nothing or something else counts them ahead.
    """
    terms = terms_of(loss)
    if not totals.terms:
        totals.terms = _begin_terms(totals.samples, terms, counts)
    parts: list[Tensor] = []
    for name, value in terms.items():
        term, is_mean = totals.terms.get(name), not isinstance(value, Loss)
        if term is None or term.is_mean is not is_mean or len(terms) < len(totals.terms):
            raise InputError(
                "the workload's loss returned other terms for one micro-batch than for another: return the "
                "same terms, each as a tensor or as a Loss, for all"
            )
        total, count, share = (value, size, size) if is_mean else (*value, min(size, 1))
        total, weight = at_least_32_bits(total), share / term.divisor if term.divisor else 0.0
        if size:
            term.count = term.count + (count.detach().double() if isinstance(count, Tensor) else count)
        if name:
            parts.append(total * weight)
            term.loss = term.loss + parts[-1].detach()
    totals.sizes.append(size)
    if parts:
        return sum(parts[1:], start=parts[0]), 1.0
    return _kept(total), weight


def add_loss(totals: StepTotals, loss: Tensor, weight: float) -> None:
    """Add the loss of a micro-batch to the only term, after its backward pass; several terms have theirs."""
    term = totals.terms.get(ONE)
    if term is None:
        return
    # On the host if it may be read there at once.
    if is_readable(loss):
        term.loss = term.loss + loss.item() * weight
    elif isinstance(term.loss, Tensor):
        term.loss = term.loss.add(loss.detach(), alpha=weight)
    else:  # the first; each tensor more would take a block that stays until the step
        term.loss = loss.detach() * weight + term.loss if term.loss else loss.detach() * weight


def _begin_terms(
    samples: int, terms: Mapping[str, Tensor | Loss], counts: CountsAhead | None
) -> dict[str, Term]:
    """Return the terms of a batch with their divisors; those of several `Loss` are counts of its data."""
    counted = [name for name, term in terms.items() if name and isinstance(term, Loss)]
    sums = None if counts is None else counts.sums
    if (counted and counts is None) or (sums and {*sums} != {*counted}):
        found, example = ", ".join(sums or ()), ", ".join(f"{name!r}: …" for name in counted)
        raise InputError(
            f"the loss has {len(counted)} terms with a count, counts=… counts {found or 'none'}, but what a "
            "term counts in a batch must be known before the first backward pass, so give "
            f"Workload(counts=lambda batch: {{{example}}}), of a collated micro-batch on the host"
        )
    begun: dict[str, Term] = {}
    for name, term in terms.items():
        divisor = float(samples)
        if name in counted:
            divisor = (sums or {}).get(name, 1.0)
        elif not name and (isinstance(term, Loss) or term.dtype in LOW_PRECISION):
            divisor = 2.0 ** round(math.log2(samples))
        begun[name] = Term(
            is_mean=not isinstance(term, Loss), divisor=divisor, is_counted_ahead=name in (sums or ())
        )
    return begun


def read_totals(totals: StepTotals, others: Sequence[Number | None] = ()) -> list[float]:
    """Bring the sums of a batch to the host, in one transfer with other numbers.

    Returns:
        The other numbers, with 0 in place of None.
    """
    terms = totals.terms.values()
    values = [*others, *(number for term in terms for number in (term.loss, term.count))]
    away = [value for value in values if isinstance(value, Tensor) and not is_readable(value)]
    if len(away) > 1:
        there = iter(torch.stack([value.to(away[0].device, torch.float64) for value in away]).tolist())
        values = [next(there) if any(value is tensor for tensor in away) else value for value in values]
    numbers = [0.0 if value is None else float(value) for value in values]
    read = iter(numbers[len(others) :])
    for term in terms:
        term.loss, term.count = next(read), next(read)
    return numbers[: len(others)]


def divisor_and_items(totals: StepTotals) -> tuple[float, float]:
    """Return what the loss of a batch was divided by, and the items that it counts; both sums are read.

    Raises:
        InputError: the counts of a `Loss` do not sum to a finite number of at least 0, or a term counted
            other items while it trained than before.
    """
    if ONE in totals.terms:
        one = totals.terms[ONE]
        check_count(one.count, "the workload's loss")
        return one.divisor, float(one.count)
    for name, term in totals.terms.items():
        counted = float(term.count)
        if term.is_counted_ahead and not abs(counted - term.divisor) <= COUNT_TOLERANCE * term.divisor:
            raise InputError(
                f"the term {name!r} of the loss counts {counted:.10g} items of a batch while it trains, "
                f"and {term.divisor:.10g} were counted before, so no step was taken: counts=… must count "
                "what the loss does"
            )
    samples = float(totals.samples)
    return samples, samples if any(term.divisor for term in totals.terms.values()) else 0.0


def at_least_32_bits(value: Tensor) -> Tensor:
    """Return a value in float32 if it has 16 bits, else itself."""
    return value.float() if value.dtype in LOW_PRECISION else value


def _kept(value: Tensor) -> Tensor:
    """Return a loss that may live until its backward pass ends: alone in its memory.

    Some means are the first element of the memory of what they average (`mse_loss`, `smooth_l1_loss` and
    `binary_cross_entropy`, whose sizes ATen/native/Loss.cpp sets before it reduces them).
    """
    return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
