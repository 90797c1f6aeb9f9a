"""The sum of a batch over the ranks, after the last backward pass of each.

Every rank first sends one message on the host: its sums, or that memory ran out. If it did anywhere, no
gradient was touched. Then small gradients travel together, because it is the number of messages that costs
small models time, and large ones in their own memory. A parameter for which no rank has a gradient keeps
none.

Gradients are sums of totals ÷ D, with one D for all ranks: `autobatch.distributed.engine` fixes the items per
sample that it follows from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from autobatch.core.errors import InputError
from autobatch.core.units import MiB
from autobatch.distributed.ranks import Ranks
from autobatch.step.gradients import Gradients
from autobatch.step.loss import StepTotals, Term, numbers_of_terms, read_numbers

TOGETHER_BYTES = 4 * MiB
"""Most bytes of the small gradients, which are copied to travel. The activations that are free by then had
more."""
DENSE, SPARSE = 1, 2
"""Kinds of a gradient; 0 for none."""


def bring_to_host(totals: StepTotals) -> StepTotals:
    """Replace the sums of a rank that are on its device by numbers, which can be sent."""
    totals.loss, count, *read = read_numbers([totals.loss, totals.count, *numbers_of_terms(totals)])
    totals.count = None if totals.count is None else count
    for term, own, count in zip(totals.terms.values(), read[::2], read[1::2], strict=True):
        term.loss, term.count = own, count
    return totals


def kinds_of(gradients: Gradients) -> bytes:
    """Return the kind of the gradient of each parameter."""
    return bytes(
        0 if gradient is None else SPARSE if gradient.is_sparse else DENSE
        for _, gradient in gradients.by_parameter()
    )


def sum_totals(totals: StepTotals, of_ranks: Sequence[StepTotals]) -> None:
    """Replace the sums of one rank by those of all.

    Raises:
        InputError: the losses of the ranks have different forms.
    """
    ran = [own for own in of_ranks if own.sizes]
    if any(own.form != ran[0].form for own in ran):
        raise InputError(
            "the workload's loss returned other terms on one rank than on another: return the same terms, "
            "each as a tensor or as a Loss, on all"
        )
    terms: dict[str, Term] = {}
    for name, term in [item for own in of_ranks for item in own.terms.items()]:
        whole = terms.setdefault(name, Term(items=term.items))
        whole.loss, whole.count = whole.loss + term.loss, whole.count + term.count
    counts = [own.count for own in of_ranks if own.count is not None]
    totals.loss = sum(own.loss for own in of_ranks)
    totals.count = sum(counts) if counts else None
    totals.divisor = max(own.divisor for own in ran)
    totals.terms = terms


def sum_gradients(ranks: Ranks, gradients: Gradients, of_ranks: Sequence[bytes]) -> None:
    """Sum the gradients over the ranks in place, given the kinds that each rank has.

    Raises:
        InputError: a gradient is sparse.
    """
    small, large = defaultdict[tuple[torch.dtype, torch.device], list[Tensor]](list), list[Tensor]()
    dense = list[Tensor]()
    for (parameter, gradient), *kinds in zip(gradients.by_parameter(), *of_ranks, strict=True):
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
    ranks.sum([*joined, *whole], "sum the gradients")
    for own, tensor in zip(small.values(), joined, strict=True):
        parts = torch.split(tensor, [gradient.numel() for gradient in own])
        torch._foreach_copy_(own, [part.view(g.shape) for part, g in zip(parts, own, strict=True)])
    for gradient, tensor in zip(large, whole, strict=True):
        if gradient is not tensor:
            gradient.copy_(tensor)
