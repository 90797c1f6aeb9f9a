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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

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
DENSE, SPARSE = 1, 2
"""Kinds of a gradient; 0 for none."""


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


class DroppedError(AutobatchError):
    """This rank leaves a batch that it could train, because of a request to stop or of another rank."""


class OutOfMemory(NamedTuple):
    """An out-of-memory error before the optimizer step."""

    message: str
    is_fatal: bool = False
    """True if this process cannot continue after it."""
    is_intact: bool = True
    """True if the state is that before the batch."""
    size: int = 0
    """Samples of the micro-batch that ran; 0 if memory ran out on other ranks only."""
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

        Every rank gets the totals of the batch, or an `OutOfMemory`.
        """
        if self.ranks.world == 1:
            return outcome
        own = None
        if not isinstance(outcome, OutOfMemory):
            read_totals(outcome)
            own = outcome, kinds_of(train_state.gradients), self._squares(train_state)
        gathered = self.ranks.gather((self.request.own, own))
        self.request.agree(signal for signal, _ in gathered)
        of_ranks = [sums for _, sums in gathered if sums is not None]
        if isinstance(outcome, OutOfMemory) or len(of_ranks) < len(gathered):
            return outcome if isinstance(outcome, OutOfMemory) else OutOfMemory("")
        totals, kinds, squares = map(list, zip(*of_ranks, strict=True))
        sum_totals(outcome, totals)
        self._sum(train_state, outcome, kinds, squares)
        return outcome

    def _squares(self, train_state: TrainState) -> list[float]:
        """Return the squared norm of the gradients of each optimizer, of which this rank has a part."""
        return []

    def _sum(
        self, train_state: TrainState, totals: StepTotals, kinds: list[bytes], squares: list[list[float]]
    ) -> None:
        """Sum the gradients, or their norms, over the ranks."""
        if not totals.sizes:
            # A loss scale begins with its first use, which a rank without samples does not have.
            train_state.scaler.scale(torch.zeros((), device=train_state.device))
        sum_gradients(self.ranks, train_state.gradients, kinds)

    def agree_on_oom(self, oom: OutOfMemory) -> OutOfMemory:
        """Return the out-of-memory error of all ranks, after each has undone the batch."""
        if self.ranks.world == 1:
            return oom
        of_ranks = self.ranks.gather(oom)
        failed = [rank for rank, error in enumerate(of_ranks) if error.size]
        worst = min(failed, key=lambda rank: (of_ranks[rank].size, rank))
        return of_ranks[worst]._replace(
            message=f"rank {worst}: {of_ranks[worst].message}",
            is_fatal=any(error.is_fatal for error in of_ranks),
            is_intact=all(error.is_intact for error in of_ranks),
            smaller=min(of_ranks[rank].smaller for rank in failed),
        )

    def whole_weights(self, model: nn.Module) -> dict[str, Any]:
        """Return the state dict of the model with whole tensors; empty on the ranks that write no file."""
        return model.state_dict()


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

    def _squares(self, train_state: TrainState) -> list[float]:
        norms = [float(norm_of(own)) if own else 0.0 for own in train_state.gradients.by_optimizer()]
        return [norm * norm for norm in norms]

    def _sum(
        self, train_state: TrainState, totals: StepTotals, kinds: list[bytes], squares: list[list[float]]
    ) -> None:
        """Sum the norms; FSDP2 has summed the gradients.

        Raises:
            InputError: FSDP2 has summed gradients of other parameters on each rank.
        """
        if len(set(kinds)) > 1:
            raise InputError(
                "the loss gave gradients to other parameters on each rank, for example those of the experts "
                "that its samples chose, and FSDP2 sums those of a shared model only if all ranks have them: "
                "use --parallel replicate, or let every forward pass use every parameter"
            )
        # They may be infinite or NaN.
        sums = map(sum, zip(*squares, strict=True))
        totals.norms = [math.sqrt(total) if total >= 0 else math.nan for total in sums]

    def whole_weights(self, model: nn.Module) -> dict[str, Any]:
        """See `Whole.whole_weights`."""
        # Only here: importing it takes a second.
        from autobatch.distributed.shard import gather_weights

        return gather_weights(model, keep=self.ranks.rank == 0)
