"""The part of a micro-batch in the loss of its batch: a total over items, divided by one divisor.

If the loss is a mean over samples, the divisor is the samples of the batch. For a `Loss`, and in 16 bits, it
is a power of two near the items of the batch, so that dividing by it rounds nothing.

Of several terms, each has a divisor of its own: the items that it counts in the whole batch. Their gradients
are summed in one place, so these divisors must be known before the first backward pass.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from autobatch.core.errors import InputError
from autobatch.step.gradients import LOW_PRECISION, is_readable
from autobatch.workload.contract import Collated, Loss, kind_of
from autobatch.workload.nested import form_of
from autobatch.workload.user_code import user_code

COUNT_TOLERANCE = 1e-5
"""Relative difference of two sums of the same counts, which may be weights in float32."""
ONE = ""
"""Name of the only term of a loss."""
Number: TypeAlias = Tensor | float


class HasScale(Protocol):
    """The part of a train state that knows how many items its loss counts."""

    items_per_sample: float | None


@dataclass(kw_only=True, slots=True)
class Term:
    """Sums of one of several terms over the micro-batches of one batch."""

    items: Number
    """Items that the term counts in the whole batch, over all ranks: its divisor."""
    expected: Number | None = None
    """Those of them that this rank counted before it trained; None if nothing was counted."""
    count: Number = 0.0
    """Σ of the counts of the micro-batches that trained."""
    loss: Number = 0.0
    """Σ of the totals, each divided by ``items``."""

    def on_host(self) -> Term:
        """Return the same sums as numbers."""
        items, expected, count, loss = read_numbers([self.items, self.expected, self.count, self.loss])
        return Term(items=items, expected=None if self.expected is None else expected, count=count, loss=loss)

    def plus(self, other: Term) -> Term:
        """Return the sums of two ranks."""
        known = [term.expected for term in (self, other) if term.expected is not None]
        return Term(
            items=self.items,
            expected=sum(known) if known else None,
            count=self.count + other.count,
            loss=self.loss + other.loss,
        )


@dataclass(kw_only=True, slots=True)
class StepTotals:
    """Sums over the micro-batches of one batch."""

    samples: int
    """Samples of the batch."""
    loss: Tensor | float = 0.0
    """Σ of the backpropagated losses, before any loss scale."""
    count: Tensor | float | None = None
    """Σ of the counts of `Loss`; None if the loss is a mean over samples, or has several terms."""
    divisor: float = 1.0
    """D: each total was divided by it."""
    sizes: list[int] = field(default_factory=list)
    """Samples of each micro-batch so far."""
    norms: list[float] | None = None
    """Norms of the gradients of each optimizer if ranks share them; None if this process has whole ones."""
    form: Form | None = None
    """Form of the loss; None before the first micro-batch."""
    terms: dict[str, Term] = field(default_factory=dict)
    """Sums of each of several terms, whose losses add up to ``loss``; else empty."""


class WeightedLoss(NamedTuple):
    """The part of a micro-batch in a term of the loss of its batch: ``loss`` × ``weight``."""

    loss: Tensor
    """A 0-d tensor of 32 bits or more."""
    weight: Number
    term: Term | None = None
    """The one of several; None for the only one."""


class Form(dict[str, bool]):
    """The names of the terms of a loss, `ONE` for a single one, and whether each is a `Loss`."""

    @property
    def has_several(self) -> bool:
        """True for several terms, and for one with a name."""
        return ONE not in self

    @property
    def counted(self) -> list[str]:
        """The names of those of several terms whose counts only the loss knows."""
        return [name for name, has_count in self.items() if has_count and self.has_several]

    def __str__(self) -> str:
        """Describe the form in words."""
        kinds = ["a Loss" if has_count else "a tensor" for has_count in self.values()]
        return ", ".join(f"{name} ({kind})" if name else kind for name, kind in zip(self, kinds, strict=True))


def terms_of(loss: object) -> dict[str, Tensor | Loss]:
    """Return the terms that a loss function returned by name, checked; a single one is called `ONE`.

    Raises:
        InputError: it returned no loss.
    """
    terms = named_terms(loss)
    for name, term in terms.items():
        whose = f"the term {name!r} of the workload's loss" if name else "the workload's loss"
        total = term.total if isinstance(term, Loss) else term
        if not isinstance(total, Tensor) or total.dim() != 0:
            what = "the total of its Loss" if isinstance(term, Loss) else "it"
            raise InputError(f"{whose} must return a 0-d tensor or a Loss, found {form_of(total)} as {what}")
        if isinstance(term, Loss):
            _check_count(term.count, whose)
    return terms


def named_terms(loss: object) -> dict[str, Any]:
    """Return whatever a loss function returned as terms by name; a single one is called `ONE`.

    Raises:
        InputError: terms have no names, or a name of the loss.
    """
    if not isinstance(loss, Mapping):
        if isinstance(loss, list | tuple) and not isinstance(loss, Loss):
            raise InputError(
                f"the workload's loss must return a 0-d tensor or a Loss, found {kind_of(loss)}: several "
                "terms are a mapping of names to Loss(total, count) and means"
            )
        return {ONE: loss}
    if not loss or "loss" in loss or not all(isinstance(name, str) and name for name in loss):
        raise InputError(
            "a mapping of losses needs a name other than 'loss', which is their sum, for each, found "
            f"{', '.join(map(repr, loss)) or 'none'}: name each term by text"
        )
    return dict(loss)


def check_form(totals: StepTotals, terms: Mapping[str, Tensor | Loss]) -> Form:
    """Return the form of the loss, after a check that it is that of the micro-batches before.

    Raises:
        InputError: it is another.
    """
    found = Form({name: isinstance(term, Loss) for name, term in terms.items()})
    if totals.form is None:
        totals.form = found
    if found != totals.form:
        advice = (
            "return the same terms" if found.has_several or totals.form.has_several else "return one kind"
        )
        raise InputError(
            f"the workload's loss returned {totals.form} for one micro-batch and {found} for another: "
            f"{advice}"
        )
    return found


class CountsAhead:
    """Counts that follow from the data alone, summed over the micro-batches of a batch before they train.

    Args:
        function: the ``counts`` of `autobatch.Workload`.
    """

    def __init__(self, function: Callable[[Collated], Any]) -> None:
        self._function = function
        self._sums: dict[str, float] = {}

    def begin(self) -> None:
        """Forget the counts of the batch before."""
        self._sums = {}

    def ahead(self, fetched: Iterable[tuple[Collated, int]]) -> Iterator[tuple[Collated, int]]:
        """Add the counts of all micro-batches on the host, then yield them and hold none."""
        kept = deque(fetched)
        for place in range(len(kept)):
            self.add(kept[place][0])
        while kept:
            yield kept.popleft()

    def add(self, batch: Collated) -> None:
        """Add the counts of a collated micro-batch on the host.

        Raises:
            InputError: the function returned something else than counts by name.
        """
        with user_code("counts", self._function):
            counts = self._function(batch)
            if not isinstance(counts, Mapping):
                raise InputError(
                    "counts=… must return a mapping of the names of terms to their counts, found "
                    f"{kind_of(counts)}"
                )
            for name, count in counts.items():
                _check_count(count, f"{name!r} in counts=…")
                self._sums[name] = self._sums.get(name, 0.0) + float(count)

    def sums(self, form: Form | None = None) -> dict[str, float]:
        """Return the counts of the terms that have one; empty if no micro-batch was looked at.

        Raises:
            InputError: the names are not those of the terms of a loss of this form.
        """
        if form is not None and self._sums and {*self._sums} != {*form.counted}:
            raise InputError(
                f"counts=… counts {', '.join(self._sums)}, and the terms of the loss that have a "
                f"count are {', '.join(form.counted) or 'none'}: count these, or leave counts=… out"
            )
        return self._sums


def counts_of(terms: Mapping[str, Tensor | Loss]) -> dict[str, Number]:
    """Return the counts of the terms that have one."""
    found = {name: term.count for name, term in terms.items() if isinstance(term, Loss)}
    return {n: c.detach().double() if isinstance(c, Tensor) else c for n, c in found.items()}


def normalize_loss(
    train_state: HasScale, totals: StepTotals, terms: Mapping[str, Tensor | Loss], size: int
) -> list[WeightedLoss]:
    """Return the part of a micro-batch of ``size`` samples in the loss of its batch: ``total ÷ D``.

    The ``totals`` are those of the micro-batches before; the counts of this one are added. Of several terms,
    they have the divisor of each that is a `Loss`.

    Raises:
        InputError: the terms are of another form than those of the micro-batch before.
    """
    several = check_form(totals, terms).has_several
    counts = counts_of(terms)
    if several:
        totals.divisor = float(totals.samples)
        return [_weigh(totals, name, term, counts.get(name), size) for name, term in terms.items()]
    loss = terms[ONE]
    if isinstance(loss, Loss):
        if train_state.items_per_sample is None:
            # The only wait for the device during accumulation, once per run.
            items = float(counts[ONE]) / max(size, 1)
            train_state.items_per_sample = items if 0 < items < math.inf else None
        if totals.count is None:
            totals.count, totals.divisor = 0.0, divisor_of(train_state.items_per_sample, totals.samples)
        totals.count = totals.count + counts[ONE]
        return [WeightedLoss(_kept(loss.total), 1 / totals.divisor)]
    if not totals.sizes:
        low = loss.dtype in LOW_PRECISION
        totals.divisor = divisor_of(None, totals.samples) if low else float(totals.samples)
    return [WeightedLoss(_kept(loss), size / totals.divisor)]


def _weigh(
    totals: StepTotals, name: str, loss: Tensor | Loss, count: Number | None, size: int
) -> WeightedLoss:
    """Return the part of a micro-batch in one of several terms."""
    if isinstance(loss, Tensor):
        term = totals.terms.setdefault(name, Term(items=float(totals.samples)))
        term.count = term.count + size
        return WeightedLoss(_kept(loss), size / totals.samples, term)
    assert count is not None
    term = totals.terms[name]
    term.count, items = term.count + count, term.items
    if isinstance(items, Tensor) and not is_readable(items):
        # A term without items has no weight. The host does not wait to know whether it has any.
        weight: Number = torch.where(items > 0, items.reciprocal(), 0.0)
    else:
        weight = 1 / float(items) if items else 0.0
    return WeightedLoss(_kept(loss.total), weight, term)


def read_numbers(values: list[Number | None]) -> list[float]:
    """Bring numbers to the host in one transfer, with 0 in place of None."""
    away = [value for value in values if isinstance(value, Tensor) and not is_readable(value)]
    if len(away) > 1:
        read = iter(torch.stack([value.to(away[0].device, torch.float64) for value in away]).tolist())
        values = [next(read) if any(value is tensor for tensor in away) else value for value in values]
    return [0.0 if value is None else float(value) for value in values]


def read_terms(totals: StepTotals, values: list[float]) -> dict[str, float]:
    """Return the mean of each term that counted any item, from the values of `numbers_of_terms`.

    Raises:
        InputError: the items of a term are no number of at least 0, or it counted others while it trained.
    """
    means = {}
    for (name, term), first in zip(totals.terms.items(), range(0, len(values), 4), strict=True):
        loss, items, count, expected = values[first : first + 4]
        if not 0 <= items < math.inf:
            raise invalid_count(items, f"the term {name!r}")
        if term.expected is not None and not abs(count - expected) <= COUNT_TOLERANCE * abs(expected):
            raise InputError(
                f"the term {name!r} of the loss counts {count:.10g} items of a batch while it trains, and "
                f"{expected:.10g} were counted before, so no step was taken: counts=… must count "
                "what the loss does"
            )
        if items:
            means[name] = loss
    return means


def numbers_of_terms(totals: StepTotals) -> list[Number | None]:
    """Return the sums of each of several terms: loss, items, count and the expected count."""
    terms = totals.terms.values()
    return [n for term in terms for n in (term.loss, term.items, term.count, term.expected)]


def divisor_of(items_per_sample: float | None, samples: int) -> float:
    """Return D for a `Loss`: a power of two near the items of a batch of this size; None if unknown."""
    return float(2.0 ** round(math.log2((items_per_sample or 1.0) * samples)))


def invalid_count(count: float, whose: str) -> InputError:
    """Build the error of a count that is no number of items."""
    return InputError(
        f"the count of {whose} must be finite and at least 0, found {count:g}, so no step was taken: return "
        "the number of items that its total sums over"
    )


def _kept(value: Tensor) -> Tensor:
    """Return a loss that may live until its backward pass ends: in at least 32 bits, alone in its memory.

    Some means are the first element of the memory of what they average (`mse_loss`, `smooth_l1_loss` and
    `binary_cross_entropy`, whose sizes ATen/native/Loss.cpp sets before it reduces them).
    """
    value = at_least_32_bits(value)
    return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value


def at_least_32_bits(value: Tensor) -> Tensor:
    """Return a value in float32 if it has 16 bits, else itself."""
    return value.float() if value.dtype in LOW_PRECISION else value


def _check_count(count: Any, whose: str) -> None:
    if not (count.dim() == 0 if isinstance(count, Tensor) else isinstance(count, Real)):
        raise InputError(f"the count of {whose} must be a number or a 0-d tensor, found {form_of(count)}")
    if not isinstance(count, Tensor) and not 0 <= count < math.inf:
        raise invalid_count(count, whose)
