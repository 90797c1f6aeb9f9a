"""Reasons against a split by size: models and data whose results would change, or that would gain nothing.

Sorting the samples of a batch keeps Σ totals ÷ Σ counts. It changes results if a layer or a loss sees more
than one sample at a time, or sees the padding. Such a workload depends on the micro-batch in any split, but a
split by size makes the error systematic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from autobatch.core.knobs import COMPILE
from autobatch.core.units import format_share
from autobatch.device.oom import Verdict, classify
from autobatch.rehearsal.rehearsal import on_copies
from autobatch.rehearsal.setup import Setup
from autobatch.step.loss import terms_of
from autobatch.step.restore import temporary_weights
from autobatch.workload.contract import Collated, Loss, WholeBatchLoss, Workload
from autobatch.workload.data import collate_samples, fetch, load_micro_batch, shallow_copies
from autobatch.workload.nested import tensors_of, to_device
from autobatch.workload.rng import preserved_random_state, seed_everything

Sizes = NDArray[np.float64]
Run = Callable[[Callable[[nn.Module, Collated], Any], Sequence[Any], int], Any]
"""Runs a function of the model and of a micro-batch of samples, with a seed."""
CHECKED = 32
"""Samples whose sizes are compared with the numbers in their collated batches."""
LEAST_CORRELATION = 0.5
"""Rank correlation of sizes and numbers below which a size does not explain memory."""
PADDED_SHARE = 0.25
"""Share of the room beside a short sample that must be filled for samples to count as padded."""
TOLERANCE = 0.01
"""Share of a sample's loss that may depend on its neighbours: rounding stays far below."""
ROUNDING = 1e-3
"""Share of its neighbour's loss that rounding may add, in TF32."""


class Obstacle(NamedTuple):
    """Reason against a split by size."""

    reason: str
    """In words that follow "batches are split by count: "."""
    is_hazard: bool = False
    """True if results would be wrong; False if there is nothing to gain or to go by."""


def find_obstacle(setup: Setup) -> Obstacle | None:
    """Return the first obstacle to a split by size; None if there is none.

    The weights, the random states and the position in the data stay.
    """
    sizes = setup.worst_case.sizes()
    if setup.stream is not None:
        return Obstacle("the sizes of a stream's samples are unknown until they are read")
    if sizes is None:
        return Obstacle(
            "the sizes of some samples are unknown, because reading all takes too long: give "
            "Workload(size_of=…)"
        )
    if float(sizes.min()) == float(sizes.max()):
        return Obstacle("all samples have one size")
    hazard = hazard_in_model(setup.model)
    if hazard is not None:
        return Obstacle(hazard, is_hazard=True)
    if hasattr(setup.model, "_orig_mod") or setup.knobs.get(COMPILE, "off") != "off":
        return Obstacle("a compiled model compiles anew for most micro-batches of other shapes")
    with preserved_random_state():
        return _in_data(setup, sizes) or _in_collate(setup, sizes) or _in_padding(setup, sizes)


def hazard_in_model(model: nn.Module) -> str | None:
    """Return why a layer forbids a split by size; None if none does."""
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        return "BatchNorm computes its statistics over a micro-batch, and those of samples of one size differ"
    return None


def _in_data(setup: Setup, sizes: Sizes) -> Obstacle | None:
    """Check that a sample has the same size each time that it is read."""
    order = np.argsort(sizes, kind="stable")
    for index in (int(order[0]), int(order[len(order) // 2]), int(order[-1])):
        seed_everything(index + 1)
        found = setup.worst_case.read_size(index)
        if found != sizes[index]:
            return Obstacle(
                f"sample {index} had a size of {sizes[index]:g} and now has {found:g}, so sizes are drawn at "
                "random"
            )
    return None


def _in_collate(setup: Setup, sizes: Sizes) -> Obstacle | None:
    """Check that batches may have any number of samples, are padded, and grow with the size."""
    short, longest = _short_and_longest(sizes)
    counts = []
    for ids in ([short], [longest], [short, longest], [longest, longest, short]):
        try:
            counts.append(_numbers(setup.workload, ids))
        except Exception:
            if len(ids) == 1:
                return None  # another stage reports it
            return Obstacle("the collate function takes a fixed number of samples only")
    if not counts[1]:
        return None  # what it returns holds no tensors to go by
    if counts[3] == counts[1]:
        return Obstacle("the collate function fills each micro-batch up to a fixed number of samples")
    chosen = _of_many_sizes(sizes)
    numbers = np.array([_numbers(setup.workload, [index]) for index in chosen])
    if _rank_correlation(sizes[chosen], numbers) < LEAST_CORRELATION:
        return Obstacle("size does not explain memory: larger samples do not make larger micro-batches")
    return None


def is_padded(workload: Workload, sizes: Sizes) -> bool:
    """Return whether samples are padded, to the largest or to a fixed number; False if they are joined."""
    short, longest = _short_and_longest(sizes)
    with preserved_random_state():
        one, other, both = (
            _numbers(workload, ids) for ids in ([short], [longest], [short, longest, longest])
        )
    return not one < other or abs(both - one - 2 * other) >= PADDED_SHARE * (other - one)


def largest_deviation(workload: Workload, sizes: Sizes) -> float:
    """Return how far the tensors of a collated sample are off a straight line over its size.

    Returns:
        The largest share of a tensor's numbers, over samples of many sizes; infinite if their tensors differ
        in number.
    """
    chosen = _of_many_sizes(sizes)
    with preserved_random_state():
        found = [[t.numel() for t in tensors_of(load_micro_batch(workload, [i]))] for i in chosen]
    if len({len(one) for one in found}) > 1:
        return math.inf
    lines = np.stack([np.ones(CHECKED), sizes[chosen]], axis=1)
    numbers = np.array(found, float)
    off = np.abs(lines @ np.linalg.lstsq(lines, numbers, rcond=None)[0] - numbers)
    return float((off / np.maximum(1.0, numbers)).max(initial=0.0))


def _short_and_longest(sizes: Sizes) -> tuple[int, int]:
    """Return a sample of the shortest quarter, and the longest one."""
    order = np.argsort(sizes, kind="stable")
    return int(order[len(order) // 4]), int(order[-1])


def _of_many_sizes(sizes: Sizes) -> list[int]:
    """Return `CHECKED` samples, from the shortest to the longest."""
    order = np.argsort(sizes, kind="stable")
    return [int(order[number * (len(order) - 1) // (CHECKED - 1)]) for number in range(CHECKED)]


def _numbers(workload: Workload, ids: list[int]) -> int:
    """Count the numbers in the collated batch of some samples."""
    return sum(tensor.numel() for tensor in tensors_of(load_micro_batch(workload, ids)))


def _rank_correlation(one: NDArray[np.float64], other: NDArray[np.int64]) -> float:
    """Return Spearman's rank correlation; 0 if either is constant."""
    ranks = [np.searchsorted(np.sort(values), values) for values in (one, other)]
    if any(int(each.min()) == int(each.max()) for each in ranks):
        return 0.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _in_padding(setup: Setup, sizes: Sizes) -> Obstacle | None:
    """Compare the loss of a short sample alone with its loss beside the longest one."""
    short, longest = _short_and_longest(sizes)
    is_whole = isinstance(setup.workload.loss, WholeBatchLoss)
    difference = None
    try:
        # Read once: the data may mask or augment a sample anew each time.
        samples = fetch(setup.workload.train_data, [short, longest])
        difference = _change_of_row(setup, samples) if is_whole else _change_of_loss(setup, samples)
    except Exception as error:  # other stages report what the workload raises
        if classify(error) is Verdict.NONE:
            return None
    if difference is None or difference <= TOLERANCE:
        return None
    what = "row" if is_whole else "loss"
    change = f"the {what} of sample {short} changes by {format_share(difference)} beside sample {longest}"
    if not _is_padded_beside(setup.workload, short, longest):
        return Obstacle(
            f"{change}, though it is not padded: the loss depends on several samples at once, or is a mean "
            "over something else than samples",
            is_hazard=True,
        )
    counted = "" if is_whole else ", and return Loss(total, count) if the loss is a mean over tokens"
    return Obstacle(
        f"{change}, so it depends on its padding: let the model ignore padding with a mask{counted}",
        is_hazard=True,
    )


def _is_padded_beside(workload: Workload, short: int, longest: int) -> bool:
    """Return whether a tensor of a collated sample is larger for each sample beside another."""
    alone, both = (
        [tuple(tensor.shape[1:]) for tensor in tensors_of(load_micro_batch(workload, ids))]
        for ids in ([short], [short, longest])
    )
    return len(alone) == len(both) and alone != both


def _change_of_loss(setup: Setup, samples: Sequence[Any]) -> float | None:
    """Return the share by which a sample's loss changes beside another; None if the loss draws at random."""
    short, longest = ([one] for one in samples)
    with _evaluated(setup) as run:

        def totals(chosen: Sequence[Any], seed: int = 1) -> list[tuple[float, float]]:
            terms = terms_of(run(setup.workload.loss, chosen, seed)).values()
            return [
                (float(one.total), float(one.count))
                if isinstance(one, Loss)
                else (float(one) * len(chosen), float(len(chosen)))
                for one in terms
            ]

        alone, other = totals(short), totals(longest)
        if (alone, other) != (totals(short, 2), totals(longest, 2)):
            return None
        both = totals(samples)
    return max((_excess(*term) for term in zip(both, alone, other, strict=True) if term[1][0]), default=None)


def _excess(both: tuple[float, float], alone: tuple[float, float], other: tuple[float, float]) -> float:
    """Return the share by which total or count of a sample change beside another one."""
    excess = abs(both[0] - alone[0] - other[0]) - ROUNDING * abs(other[0])
    counted = abs(both[1] - alone[1] - other[1])
    return max(excess / abs(alone[0]), counted / alone[1] if alone[1] else 0.0)


def _change_of_row(setup: Setup, samples: Sequence[Any]) -> float | None:
    """Return the share by which a sample's row changes beside another; None if rows are drawn at random.

    Rows of another form beside it are a change by 100 %: a batch could not be put together from them.
    """
    assert isinstance(setup.workload.loss, WholeBatchLoss)
    represent = setup.workload.loss.represent
    with _evaluated(setup) as run:
        alone, again, beside = (
            [one[0].double() for one in tensors_of(run(represent, chosen, seed))]
            for chosen, seed in ((samples[:1], 1), (samples[:1], 2), (samples, 1))
        )
    if any(not torch.equal(one, other) for one, other in zip(alone, again, strict=True)):
        return None
    if [one.shape for one in alone] != [one.shape for one in beside]:
        return 1.0
    pairs = list(zip(alone, beside, strict=True))
    scale = math.fsum(float(one.norm() ** 2) for one, _ in pairs)
    change = math.fsum(float((one - other).norm() ** 2) for one, other in pairs)
    return math.sqrt(change / scale) if scale else 0.0


@contextmanager
def _evaluated(setup: Setup) -> Iterator[Run]:
    """Return a function that runs another one on the model, on temporary weights and without gradients."""
    device = setup.device.torch_device

    def seeded(call: Callable[..., Any]) -> Run:
        def run(function: Callable[[nn.Module, Collated], Any], samples: Sequence[Any], seed: int) -> Any:
            seed_everything(seed)
            collated = collate_samples(shallow_copies(samples), setup.workload.collate)
            return call(function, to_device(collated, device))

        return run

    with setup.device.training() as meter, torch.no_grad():
        if setup.sharding is not None:
            # In float32, because rounding is no effect of the padding.
            with on_copies(replace(setup, precision="fp32"), meter) as train_state:
                train_state.model.eval()
                yield seeded(train_state.call)
            return
        with temporary_weights(setup.model, device) as model:
            meter.count(tensor.data for tensor in [*model.parameters(), *model.buffers()])
            model.eval()
            yield seeded(lambda function, batch: function(model, batch))
