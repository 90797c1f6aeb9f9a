"""The sum of a batch over the ranks, after the last backward pass of each.

Every rank first sends one message on the host: its sums, or that memory ran out. If it did anywhere, no
gradient was touched. Then small gradients travel together, because it is the number of messages that costs
small models time, and large ones in their own memory. A parameter for which no rank has a gradient keeps
none.

Gradients are sums of totals ÷ D, with one D for all ranks: `RankEngine` fixes the items per sample that it
follows from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from autobatch.core.errors import InputError
from autobatch.core.units import MiB
from autobatch.distributed.group import Group
from autobatch.step.gradients import Gradients
from autobatch.step.loss import ONE, StepTotals, Term, numbers_of_terms, read_numbers

TOGETHER_BYTES = 4 * MiB
"""Most bytes of the small gradients, which are copied to travel. The activations that are free by then had
more."""
DENSE, SPARSE = 1, 2
"""Kinds of a gradient; 0 for none."""


class RankTotals(NamedTuple):
    """The sums of a batch on one rank, on the host."""

    form: str
    """Form of the loss; empty if no micro-batch ran."""
    divisor: float
    """D."""
    loss: float
    items: float | None
    """Σ of the counts of a `Loss`."""
    terms: dict[str, Term]
    """The sums of each of several terms."""
    kinds: bytes
    """The kind of the gradient of each parameter."""


def totals_of(totals: StepTotals, gradients: Gradients) -> RankTotals:
    """Return the sums of this rank."""
    form = totals.form or {ONE: False}
    words = ", ".join(f"{name} (a {'Loss' if has_count else 'tensor'})" for name, has_count in form.items())
    loss, items, *read = read_numbers([totals.loss, totals.count, *numbers_of_terms(totals)])
    of_terms = zip(totals.terms.items(), read[::2], read[1::2], strict=True)
    return RankTotals(
        form=words if totals.sizes else "",
        divisor=totals.divisor if totals.sizes else 0.0,
        loss=loss,
        items=None if totals.count is None else items,
        terms={name: Term(items=term.items, loss=own, count=count) for (name, term), own, count in of_terms},
        kinds=bytes(
            0 if gradient is None else SPARSE if gradient.is_sparse else DENSE
            for _, gradient in gradients.by_parameter()
        ),
    )


def sum_totals(totals: StepTotals, of_ranks: Sequence[RankTotals]) -> None:
    """Replace the sums of one rank by those of all.

    Raises:
        InputError: the losses of the ranks have different forms.
    """
    forms = sorted({own.form for own in of_ranks} - {""})
    if len(forms) > 1:
        raise InputError(
            f"the workload's loss returned {forms[0]} on one rank, and {forms[1]} on another: return "
            "the same terms of the same kinds"
        )
    counts = [own.items for own in of_ranks if own.items is not None]
    totals.loss = sum(own.loss for own in of_ranks)
    totals.count = sum(counts) if counts else None
    totals.divisor = max(own.divisor for own in of_ranks)
    totals.terms = {}
    for name, term in [item for own in of_ranks for item in own.terms.items()]:
        whole = totals.terms.setdefault(name, Term(items=term.items))
        whole.loss, whole.count = whole.loss + term.loss, whole.count + term.count


def sum_gradients(ranks: Group, gradients: Gradients, of_ranks: Sequence[RankTotals]) -> None:
    """Sum the gradients over the ranks in place.

    Raises:
        InputError: a gradient is sparse.
    """
    small, large = defaultdict[tuple[torch.dtype, torch.device], list[Tensor]](list), list[Tensor]()
    dense = list[Tensor]()
    for kinds, (parameter, gradient) in zip(
        zip(*(own.kinds for own in of_ranks), strict=True), gradients.by_parameter(), strict=True
    ):
        if SPARSE in kinds:
            raise InputError(
                f"ranks sum no sparse gradients, and a parameter of shape {tuple(parameter.shape)} has one: "
                "use sparse=False in its embedding, or one rank"
            )
        if any(kinds):
            dense.append(gradients.new_zeros(parameter) if gradient is None else gradient)
    room = TOGETHER_BYTES
    for gradient in sorted(dense, key=Tensor.numel):
        room -= gradient.nbytes
        (small[gradient.dtype, gradient.device] if room >= 0 else large).append(gradient)
    joined = [torch.cat([gradient.flatten() for gradient in own]) for own in small.values()]
    whole = [gradient.contiguous() for gradient in large]
    with ranks.waiting("sum the gradients"):
        for wait in [ranks.start_sum(tensor) for tensor in [*joined, *whole]]:
            wait()
    for own, tensor in zip(small.values(), joined, strict=True):
        parts = torch.split(tensor, [gradient.numel() for gradient in own])
        torch._foreach_copy_(own, [part.view(g.shape) for part, g in zip(parts, own, strict=True)])
    for gradient, tensor in zip(large, whole, strict=True):
        if gradient is not tensor:
            gradient.copy_(tensor)
