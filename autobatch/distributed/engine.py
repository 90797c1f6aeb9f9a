"""The engine of a loop: how ranks sum a batch, and how they agree on what happens to it.

With a whole model on every rank (`Whole`), each runs its micro-batches alone, and the batch is summed after
them. Every rank first sends one message on the host: its sums, or that memory ran out. If it did anywhere, no
gradient was touched: all ranks drop the batch, and run it again. One process is a rank without others.

Small gradients travel together, because it is the number of messages that costs small models time, and large
ones in their own memory. A parameter for which no rank has a gradient keeps none. Gradients are sums of
totals ÷ D, with one D for all ranks.

A loss of several terms needs what each of them counts on all ranks before the first pass. The ranks exchange
their counts in one message, in which one that has failed sends none.

With a sharded model (`Shared`), FSDP2 gathers parameters and reduces gradients in every micro-batch, so all
ranks run as many of them: a rank with fewer runs some that add nothing. Gradients are summed as they are, and
each rank has the sums of its shards. If memory runs out on one rank, the others wait for it in the middle of
a pass, and nothing can be repeated: all ranks leave, and start again in smaller micro-batches.

Everything after the sum (checks, clipping, the step, counters) is the same on every rank.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from autobatch.core.errors import AutobatchError, InputError
from autobatch.core.signals import StopRequest
from autobatch.core.units import MiB
from autobatch.distributed.ranks import Ranks
from autobatch.step.gradients import Gradients, norm_of
from autobatch.step.loss import StepTotals, read_totals
from autobatch.step.restore import BufferSnapshot
from autobatch.step.train_state import MicroBatches, TrainState
from autobatch.workload.contract import Collated
from autobatch.workload.rng import preserved_random_state

TOGETHER_BYTES = 4 * MiB
"""Most bytes of the small gradients, which are copied to travel. The activations that are free by then had
more."""


def present(gradients: Gradients) -> bytes:
    """Return for each parameter whether it has a gradient.

    Raises:
        InputError: a gradient is sparse.
    """
    pairs = gradients.by_parameter()
    for parameter, gradient in pairs:
        if gradient is not None and gradient.is_sparse:
            raise InputError(
                f"ranks sum no sparse gradients, and a parameter of shape {tuple(parameter.shape)} has one: "
                "use sparse=False in its embedding, or one rank"
            )
    return bytes(gradient is not None for _, gradient in pairs)


def sum_totals(totals: StepTotals, of_ranks: Sequence[StepTotals]) -> None:
    """Replace the sums of one rank by those of all.

    Raises:
        InputError: the losses of the ranks have different forms.
    """
    whole, *others = [own.terms for own in of_ranks if own.terms]
    forms = [
        {name: (term.is_mean, term.divisor) for name, term in terms.items()} for terms in (whole, *others)
    ]
    if any(form != forms[0] for form in forms):
        raise InputError(
            "the workload's loss returned other terms on one rank than on another: return the same terms, "
            "each as a tensor or as a Loss, on all"
        )
    for terms in others:
        for name, term in terms.items():
            whole[name].loss += term.loss
            whole[name].count += term.count
    totals.terms = whole
    by_optimizer = zip(*(own.norms for own in of_ranks if own.norms is not None), strict=True)
    totals.norms = [math.hypot(*norms) for norms in by_optimizer] or None


class DroppedError(AutobatchError):
    """This rank leaves a batch that it could train, because of a request to stop or of another rank."""


class OutOfMemory(NamedTuple):
    """An out-of-memory error before the optimizer step."""

    message: str
    is_fatal: bool = False
    """True if this process cannot continue after it."""
    size: int = 0
    """Samples of the micro-batch that ran; 0 if this rank leaves for another reason."""
    smaller: int = 0
    """Largest micro-batch for the next try."""


class Whole:
    """The engine of ranks that have a whole model each."""

    is_alone = True
    """True if this rank may leave a batch without the others before `combine`."""

    def __init__(self, ranks: Ranks | None = None, train_state: TrainState | None = None) -> None:
        self.ranks = ranks or Ranks()
        self.request = StopRequest()
        """Ends the run before the next optimizer step."""
        if train_state is not None and train_state.counts is not None and self.ranks.world > 1:
            train_state.counts.sum_over_ranks = self.sum_counts

    def padded(self, micro_batches: MicroBatches, missing: Callable[[], int]) -> MicroBatches:
        """Return the micro-batches of this rank as they are to run, if other ranks have so many more."""
        return micro_batches

    def sum_counts(self, counts: dict[str, float] | None) -> dict[str, float]:
        """Return the sums of the counts of all ranks by term; all of them call it once in an attempt.

        Args:
            counts: of this rank; None if it has failed.

        Raises:
            DroppedError: another rank has failed.
        """
        of_ranks: list[dict[str, float] | None] = self.ranks.gather(counts)
        if counts is not None and None in of_ranks:
            raise DroppedError("another rank has failed before it trained its samples")
        sums = Counter[str]()
        for of_rank in of_ranks:
            sums.update(of_rank or {})
        return dict(sums)

    def combine(self, train_state: TrainState, outcome: StepTotals | OutOfMemory) -> StepTotals | OutOfMemory:
        """Sum gradients and totals over the ranks, unless one of them ran out of memory and has none.

        Every rank gets the totals of the batch, or the same `OutOfMemory`: the one with the least size.
        """
        if self.ranks.world == 1:
            return outcome
        if isinstance(outcome, StepTotals):
            read_totals(outcome)
        message = self.request.own, outcome, present(train_state.gradients)
        signals, of_ranks, gradients = zip(*self.ranks.gather(message), strict=True)
        self.request.agree(signals)
        errors = [(own.size, rank, own) for rank, own in enumerate(of_ranks) if isinstance(own, OutOfMemory)]
        if isinstance(outcome, StepTotals) and not errors:
            if not outcome.sizes:
                # A loss scale begins with its first use, which a rank without samples does not have.
                train_state.scaler.scale(torch.zeros((), device=train_state.device))
            sum_totals(outcome, of_ranks)
            self.sum_gradients(train_state.gradients, gradients)
            return outcome
        # A rank that only leaves has no size.
        failed = [error for error in errors if error[0]]
        if not failed:
            return OutOfMemory("")
        _, rank, worst = min(failed)
        return worst._replace(
            message=f"rank {rank}: {worst.message}",
            is_fatal=any(error.is_fatal for *_, error in failed),
            smaller=min(error.smaller for *_, error in failed),
        )

    def sum_gradients(self, gradients: Gradients, of_ranks: Sequence[bytes]) -> None:
        """Sum the gradients over the ranks in place, given for each rank which ones are `present`."""
        dense = [
            gradients.new_zeros(parameter) if gradient is None else gradient
            for (parameter, gradient), *is_present in zip(gradients.by_parameter(), *of_ranks, strict=True)
            if any(is_present)
        ]
        together, room = defaultdict[object, list[Tensor]](list), TOGETHER_BYTES
        for number, gradient in enumerate(sorted(dense, key=Tensor.numel)):
            room -= gradient.nbytes
            together[(gradient.dtype, gradient.device) if room >= 0 else number].append(gradient)
        whole = [
            own[0].contiguous() if len(own) == 1 else torch.cat([gradient.flatten() for gradient in own])
            for own in together.values()
        ]
        self.ranks.sum(whole, "sum the gradients")
        for own, tensor in zip(together.values(), whole, strict=True):
            if tensor is not own[0]:
                parts = torch.split(tensor.flatten(), [gradient.numel() for gradient in own])
                torch._foreach_copy_(own, [part.view(g.shape) for part, g in zip(parts, own, strict=True)])


class Shared(Whole):
    """The engine of a sharded model, through which the loss of the train state runs already.

    Args:
        ranks: the processes that share it.
        train_state: the model, and what its steps need.
        make: returns a micro-batch on the device that adds nothing, for a rank that has fewer than others.
    """

    is_alone = False

    def __init__(self, ranks: Ranks, train_state: TrainState, make: Callable[[], Collated]) -> None:
        super().__init__(ranks, train_state)
        self._make = make
        self._buffers = BufferSnapshot(train_state.model, copy_all=True)

    def padded(
        self, micro_batches: MicroBatches, missing: Callable[[], int]
    ) -> Iterator[tuple[Collated, int]]:
        """See `Whole.padded`. Those that are missing follow, of no samples."""
        yield from micro_batches
        if not (count := missing()):
            return
        self._buffers.take()
        with preserved_random_state():
            for _ in range(count):
                yield self._make(), 0
        self._buffers.restore()

    def combine(self, train_state: TrainState, outcome: StepTotals | OutOfMemory) -> StepTotals | OutOfMemory:
        """See `Whole.combine`. This rank has a part of each gradient, and sends the norms of its parts."""
        if isinstance(outcome, StepTotals):
            parts = train_state.gradients.by_optimizer()
            outcome.norms = [float(norm_of(own)) if own else 0.0 for own in parts]
        return super().combine(train_state, outcome)

    def sum_gradients(self, gradients: Gradients, of_ranks: Sequence[bytes]) -> None:
        """Check that FSDP2 has summed the gradients.

        Raises:
            InputError: each rank has gradients of other parameters.
        """
        if len(set(of_ranks)) > 1:
            raise InputError(
                "the loss gave gradients to other parameters on each rank, for example those of the experts "
                "that its samples chose, and FSDP2 sums those of a shared model only if all ranks have them: "
                "use --parallel replicate, or let every forward pass use every parameter"
            )
