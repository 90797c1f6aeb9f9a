"""The choice between a split by count and a split by size, by the padding that is saved.

Sorting the samples of a batch keeps Σ totals ÷ Σ counts. It changes results if a layer or a loss sees more
than one sample at a time, or sees the padding. Such a workload depends on the micro-batch in any split, but a
split by size makes the error systematic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from autobatch.core.errors import AutobatchError, InputError
from autobatch.core.knobs import COMPILE, PRECISION
from autobatch.core.options import Options
from autobatch.core.progress import Progress
from autobatch.core.records import Plan, Probe, SizeCut
from autobatch.core.units import significant
from autobatch.distributed.rank_plan import agree_on_cut
from autobatch.distributed.ranks import Ranks
from autobatch.rehearsal.process import SetupProcess
from autobatch.rehearsal.rehearsal import on_copies
from autobatch.rehearsal.setup import Setup, with_knobs
from autobatch.search.plan_limit import FIRST, TRIES, batches_to_run, run_batches
from autobatch.step.loss import terms_of
from autobatch.workload.contract import Loss, WholeBatchLoss
from autobatch.workload.data import collate_samples, fetch, shallow_copies
from autobatch.workload.nested import tensors_of, to_device
from autobatch.workload.order import GlobalBatch
from autobatch.workload.rng import preserved_random_state, seed_everything
from autobatch.workload.split import Sizes, SizeSplit, Split, sizes_digest
from autobatch.workload.user_code import describe

LEAST_GAIN = 1.03
"""Ratio of padded areas, with the fixed cost of each micro-batch, from which ``auto`` splits by size."""
PADDED_SHARE = 0.25
"""Share of the room beside a short sample that must be filled for samples to count as padded."""
TOLERANCE = 0.01
"""Share of a sample's loss that may depend on its neighbours: rounding stays far below."""
ROUNDING = 1e-3
"""Share of its neighbour's loss that rounding may add, in TF32."""


def choose_split(
    process: SetupProcess, plan: Plan, probe: Probe, options: Options, *, ranks: Ranks, progress: Progress
) -> Plan:
    """Return a plan with the choice of how its batches are split, by count if it fails; all ranks call it.

    Raises:
        InputError: a split by size was asked for, and is not possible or would change results.
    """
    asked = options.split
    has_sizes = process.info.epoch_samples is not None and ranks.world == plan.world_size
    if asked == "count" or (asked == "auto" and not has_sizes):
        return plan
    if not has_sizes:
        raise InputError(
            "--split size needs the sizes of all samples, which those of a stream are not, and autobatch fit "
            "for several ranks: use --split count"
        )
    progress.doing("choosing how batches are split")
    # Above an error for another reason than memory, no micro-batch runs.
    cap = probe.micro_batch if probe.upper_bound_by == "error" else plan.target_batch
    is_probed = probe.precision in (None, plan.precision) and not plan.knobs
    # The split by size is checked against batches of the run on its own.
    alone = probe.micro_batch if probe.real_batches is None else probe.real_batches.micro_batch_alone
    limits = alone if is_probed else plan.micro_batch, min(cap, options.max_micro_batch or cap)
    try:
        cut, reason = process.call("the choice of the split", _choose, plan, asked, limits, options.seed)
    except Exception as error:
        cut, reason = None, str(error) if isinstance(error, AutobatchError) else describe(error)
    if cut is None and asked == "size":
        raise InputError(f"--split size is not possible: {reason}. Use --split count")
    if reason:
        by = "count" if cut is None else "the sizes of their samples"
        progress.note(f"batches are split by {by}: {reason}")
    cut = agree_on_cut(ranks, cut)
    return plan if cut is None else msgspec.structs.replace(plan, split="size", size_cut=cut)


def _choose(
    setup: Setup, plan: Plan, asked: str, limits: tuple[int, int], seed: int
) -> tuple[SizeCut | None, str]:
    """Return the split, None by count, and the reason, empty if there was no choice.

    Args:
        setup: stays unchanged.
        plan: the split by count.
        asked: ``auto`` or ``size``.
        limits: the largest micro-batches of the longest samples and of any.
        seed: of the order of the data.
    """
    setup = with_knobs(setup, {**plan.knobs, PRECISION: plan.precision})
    sizes = setup.worst_case.sizes()
    if sizes is None:
        return (
            None,
            "the sizes of some samples are unknown, as reading all takes long: give Workload(size_of=…)",
        )
    if sizes.min() == sizes.max():
        return None, "all samples have one size" * (asked == "size")
    obstacle: str | None = f"micro-batches must be multiples of {plan.multiple}"
    if plan.multiple == 1:
        with preserved_random_state():
            obstacle = _obstacle(setup, sizes)
    if obstacle is not None:
        return None, obstacle
    # A rank takes about as many samples of a batch that is split by size.
    batches = batches_to_run(setup, max(1, sum(plan.micro_batches)), seed)
    limit, cap = min(limits), limits[1]
    steps = math.ceil(len(batches[0].ids) / limit)
    for smaller in dict.fromkeys(max(1, limit * steps // (steps + more)) for more in range(1 + TRIES)):
        cut = SizeCut(
            longest=float(sizes.max()),
            micro_batch=smaller,
            max_micro_batch=cap,
            digest=sizes_digest(sizes),
        )
        cut, gain = _with_expectations(cut, batches[:FIRST], sizes, plan.micro_batch)
        if asked == "auto" and gain < LEAST_GAIN:
            return None, f"by size would save {max(0.0, 1 - 1 / gain):.0%}"
        split = SizeSplit(sizes=sizes, cut=cut)
        if run_batches(setup, batches, split, split.largest) is None:
            padded = f"{cut.padding:.2f} times its real size in place of {cut.padding_by_count:.2f} times"
            steps_saved = f"{cut.steps:.1f} micro-batches on average in place of {cut.steps_by_count:.0f}"
            return cut, f"{steps_saved}, and a padded batch has {padded}"
    return None, "no split by size survives the batches of the run"


def _with_expectations(
    cut: SizeCut, batches: Sequence[GlobalBatch], sizes: Sizes, micro_batch: int
) -> tuple[SizeCut, float]:
    """Fill in the padding and the steps of a cut, and return it with the cost by count ÷ its own."""
    by_size = SizeSplit(sizes=sizes, cut=cut)
    real = float(np.mean([sizes[batch.ids].sum() for batch in batches]))
    padding, steps, areas = [], [], []
    for split, limit in ((Split(), micro_batch), (by_size, by_size.largest)):
        parts = [sizes[part.ids] for batch in batches for part in split.parts(batch, limit)]
        padded = sum(len(own) * float(own.max()) for own in parts) / len(batches)
        steps.append(len(parts) / len(batches))
        padding.append(padded / real)
        areas.append(padded + steps[-1] * by_size.fixed_area(by_size.largest))
    known = msgspec.structs.replace(
        cut, padding_by_count=padding[0], padding=padding[1], steps_by_count=steps[0], steps=steps[1]
    )
    return known, areas[0] / areas[1]


def read_sizes(setup: Setup) -> Sizes | None:
    """Return the size of each sample; None if some are unknown."""
    return setup.worst_case.sizes()


def _obstacle(setup: Setup, sizes: Sizes) -> str | None:
    """Return why a split by size would change results, or save no time; None if nothing shows either.

    Raises:
        Exception: whatever the workload raises on one or two samples.
    """
    if any(isinstance(module, _BatchNorm) for module in setup.model.modules()):
        return "BatchNorm computes its statistics over a micro-batch, and those of samples of one size differ"
    order = np.argsort(sizes, kind="stable")
    # One of the shortest quarter, and the longest one.
    samples = fetch(setup.workload.train_data, [int(order[len(order) // 4]), int(order[-1])])
    change = _change_beside_another(setup, samples)
    if change > TOLERANCE:
        return (
            f"the loss of a short sample changes by {significant(100 * change)} % beside the longest, so it "
            "depends on padding or on other samples: let the model ignore padding with a mask, and return "
            "Loss(total, count) if the loss is a mean over something else than samples"
        )
    if hasattr(setup.model, "_orig_mod") or setup.knobs.get(COMPILE, "off") != "off":
        return "a compiled model compiles anew for most micro-batches of other shapes"
    short, longest, both = (
        sum(tensor.numel() for tensor in tensors_of(_collated(setup, chosen)))
        for chosen in (samples[:1], samples[1:], samples)
    )
    is_padded = short < longest and both - short - longest >= PADDED_SHARE * (longest - short)
    if both and not is_padded:  # what holds no tensors tells nothing
        return "the collate function does not pad, so there is nothing to save"
    # A split by size may leave the smallest one alone.
    _collated(setup, fetch(setup.workload.train_data, [int(order[0])]))
    return None


def _collated(setup: Setup, samples: Sequence[Any]) -> Any:
    return collate_samples(shallow_copies(samples), setup.workload.collate)


def _change_beside_another(setup: Setup, samples: Sequence[Any]) -> float:
    """Return the share by which what a sample adds to a loss changes beside another; 0 if it is random."""
    loss: Any = setup.workload.loss
    # In float32, because rounding is no effect of the padding.
    setup = replace(setup, precision="fp32")
    with setup.device.training() as meter, torch.no_grad(), on_copies(setup, meter) as train_state:
        train_state.model.eval()

        def values(chosen: Sequence[Any], seed: int = 1) -> list[Tensor]:
            """Return totals and counts of the samples, or the row of the first of them."""
            seed_everything(seed)
            batch = to_device(_collated(setup, chosen), setup.device.torch_device)
            if isinstance(loss, WholeBatchLoss):
                rows = tensors_of(train_state.call(loss.represent, batch))
                return [torch.cat([row[0].double().flatten().cpu() for row in rows])]
            terms = terms_of(train_state.call(loss, batch)).values()
            pairs = [
                (term.total, term.count) if isinstance(term, Loss) else (term * len(chosen), len(chosen))
                for term in terms
            ]
            return list(torch.tensor(pairs, dtype=torch.float64, device="cpu").flatten())

        alone, other, both = values(samples[:1]), values(samples[1:]), values(samples)
        again = values(samples, 2)
    if isinstance(loss, WholeBatchLoss):
        other = [torch.zeros_like(row) for row in both]
    if [value.shape for value in alone] != [value.shape for value in both]:
        return 1.0  # rows of two forms make no batch
    if any(not torch.equal(value, repeated) for value, repeated in zip(both, again, strict=True)):
        return 0.0
    shares = [
        float(((together - rest - own).norm() - ROUNDING * rest.norm()) / own.norm())
        for together, rest, own in zip(both, other, alone, strict=True)
        if own.norm()
    ]
    return max(shares, default=0.0)
