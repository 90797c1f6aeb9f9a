"""The part of a micro-batch in the loss of its batch: a total over items, divided by one divisor.

If the loss is a mean over samples, the divisor is the samples of the batch. For a `Loss`, and in 16 bits, it
is a power of two near them, so that dividing by it rounds nothing.

Of several terms, each has a divisor of its own: the items that it counts in the whole batch. Their gradients
are summed in one place, so these divisors must be known before the first backward pass. The data tell them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from autobatch.core.errors import InputError
from autobatch.step.counts import check_count
from autobatch.step.gradients import LOW_PRECISION, is_readable
from autobatch.workload.contract import Loss
from autobatch.workload.nested import form_of

if TYPE_CHECKING:
    from autobatch.step.train_state import TrainState

ONE = ""
"""Name of the only term of a loss."""
Number: TypeAlias = Tensor | float


@dataclass(kw_only=True, slots=True)
class Term:
    """Sums of one of several terms over the micro-batches of one batch."""

    items: float
    """Items that the term counts in the whole batch, over all ranks: its divisor."""
    count: Number = 0.0
    """Σ of the counts of the micro-batches that trained."""
    loss: Number = 0.0
    """Σ of the totals, each divided by ``items``."""


@dataclass(kw_only=True, slots=True)
class StepTotals:
    """Sums over the micro-batches of one batch."""

    samples: int
    """Samples of the batch."""
    loss: Number = 0.0
    """Σ of the backpropagated losses, before any loss scale."""
    count: Number | None = None
    """Σ of the counts of `Loss`; None if the loss is a mean over samples, or has several terms."""
    divisor: float = field(init=False)
    """D: each total was divided by it."""
    sizes: list[int] = field(default_factory=list)
    """Samples of each micro-batch so far."""
    norms: list[float] | None = None
    """Norms of the gradients of each optimizer if ranks share them; None if this process has whole ones."""
    form: dict[str, bool] | None = None
    """For each term of the loss, whether it is a `Loss`; None before the first micro-batch."""
    terms: dict[str, Term] = field(default_factory=dict)
    """Sums of each of several terms, whose losses add up to ``loss``; else empty."""
    is_counted_ahead: bool = False
    """True if the terms must count what was counted before they trained."""

    def __post_init__(self) -> None:
        """Begin with the divisor of a mean over samples."""
        self.divisor = float(self.samples)


def terms_of(loss: object) -> dict[str, Tensor | Loss]:
    """Return the terms that a loss function returned by name, checked; a single one is called `ONE`.

    Raises:
        InputError: it returned no loss, or terms without a name, or with that of their sum.
    """
    terms: dict[Any, Any] = {ONE: loss}
    if isinstance(loss, Mapping):
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
                f"{whose} must return a 0-d tensor or a Loss, found {form_of(total)}{where}: return a mean "
                "over the samples, or several terms as a mapping of names to them"
            )
        if isinstance(term, Loss):
            check_count(term.count, whose)
    return terms


def begin_terms(
    train_state: TrainState, totals: StepTotals, terms: Mapping[str, Tensor | Loss] | None
) -> None:
    """Set the divisors of several terms before a batch trains, from the counts of its data over all ranks.

    It runs once per batch, in the first micro-batch; a rank without samples has no ``terms``.

    Raises:
        InputError: the loss has several terms with counts, and nothing or something else counts them ahead.
    """
    counted = [name for name, term in (terms or {}).items() if name and isinstance(term, Loss)]
    sums = None if train_state.counts is None else train_state.counts.sums
    is_other = bool(sums) and terms is not None and {*(sums or ())} != {*counted}
    if (counted and train_state.counts is None) or is_other:
        found, example = ", ".join(sums or ()), ", ".join(f"{name!r}: …" for name in counted)
        raise InputError(
            f"the loss has {len(counted)} terms with a count, counts=… counts {found or 'none'}, but what a "
            "term counts in a batch must be known before the first backward pass, so give "
            f"Workload(counts=lambda batch: {{{example}}}), of a collated micro-batch on the host"
        )
    if train_state.counts is not None:
        totals.is_counted_ahead = sums is not None
        # In the order of the loss.
        totals.terms = {name: Term(items=(sums or {}).get(name, 1.0)) for name in counted or sums or ()}


def weigh_loss(train_state: TrainState, totals: StepTotals, loss: object, size: int) -> tuple[Tensor, float]:
    """Return what a micro-batch of ``size`` samples adds to the loss of its batch: a 0-d tensor × a weight.

    Args:
        train_state: knows the counts of the batch.
        totals: those of the micro-batches before; the counts of this one are added.
        loss: what the loss function returned for the micro-batch.
        size: its samples; 0 for one that only keeps other ranks company.

    Raises:
        InputError: it returned no loss, or one of another form than for the micro-batch before.
    """
    terms = terms_of(loss)
    if not size:
        counted = {name: term for name, term in terms.items() if isinstance(term, Loss)}
        terms |= {name: Loss(term.total * 0, term.count * 0) for name, term in counted.items()}
    form = {name: isinstance(term, Loss) for name, term in terms.items()}
    if totals.form is None:
        totals.form = form
        begin_terms(train_state, totals, terms)
    if form != totals.form:
        raise InputError(
            "the workload's loss returned other terms for one micro-batch than for another: return the same "
            "terms, each as a tensor or as a Loss, for all"
        )
    if ONE not in terms:
        return _weigh_terms(totals, terms, size), 1.0
    term = terms[ONE]
    if not totals.sizes and (isinstance(term, Loss) or term.dtype in LOW_PRECISION):
        totals.divisor = 2.0 ** round(math.log2(totals.samples))
    if not isinstance(term, Loss):
        return _kept(term), size / totals.divisor
    totals.count = _summable(term.count) + (0.0 if totals.count is None else totals.count)
    return _kept(term.total), 1 / totals.divisor


def _weigh_terms(totals: StepTotals, terms: Mapping[str, Tensor | Loss], size: int) -> Tensor:
    """Return the sum of several terms, each divided by its items. One without items adds nothing."""
    parts = list[Tensor]()
    for name, value in terms.items():
        term = totals.terms.setdefault(name, Term(items=float(totals.samples)))
        total, count, share = (*value, 1) if isinstance(value, Loss) else (value, size, size)
        part = at_least_32_bits(total) * (share / term.items if term.items else 0.0)
        term.count, term.loss = term.count + _summable(count), term.loss + part.detach()
        parts.append(part)
    return sum(parts[1:], start=parts[0])


def numbers_of_terms(totals: StepTotals) -> list[Number | None]:
    """Return the loss and the count of each of several terms."""
    return [number for term in totals.terms.values() for number in (term.loss, term.count)]


def read_numbers(values: list[Number | None]) -> list[float]:
    """Bring numbers to the host in one transfer, with 0 in place of None."""
    away = [value for value in values if isinstance(value, Tensor) and not is_readable(value)]
    if len(away) > 1:
        read = iter(torch.stack([value.to(away[0].device, torch.float64) for value in away]).tolist())
        values = [next(read) if any(value is tensor for tensor in away) else value for value in values]
    return [0.0 if value is None else float(value) for value in values]


def at_least_32_bits(value: Tensor) -> Tensor:
    """Return a value in float32 if it has 16 bits, else itself."""
    return value.float() if value.dtype in LOW_PRECISION else value


def _kept(value: Tensor) -> Tensor:
    """Return a loss that may live until its backward pass ends: in at least 32 bits, alone in its memory.

    Some means are the first element of the memory of what they average (`mse_loss`, `smooth_l1_loss` and
    `binary_cross_entropy`, whose sizes ATen/native/Loss.cpp sets before it reduces them).
    """
    value = at_least_32_bits(value)
    return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value


def _summable(count: Number) -> Number:
    return count.detach().double() if isinstance(count, Tensor) else count
