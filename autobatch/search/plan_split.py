"""The choice between a split by count and a split by size, by the saving that is expected."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from autobatch.core.errors import AutobatchError, InputError
from autobatch.core.knobs import PRECISION, memory_signature
from autobatch.core.options import Options
from autobatch.core.progress import Progress
from autobatch.core.records import Plan, Probe, SizeCut
from autobatch.distributed.rank_plan import agree_on_cut
from autobatch.distributed.ranks import Ranks
from autobatch.rehearsal.process import SetupProcess
from autobatch.rehearsal.setup import Setup, with_knobs
from autobatch.search.hazards import check_smallest, hazard, nothing_to_gain
from autobatch.search.plan_limit import FIRST, TRIES, batches_to_run, run_batches
from autobatch.workload.order import GlobalBatch
from autobatch.workload.split import Sizes, SizeSplit, Split, sizes_digest
from autobatch.workload.user_code import describe

LEAST_GAIN = 1.03
"""Ratio of padded areas, with the fixed cost of each micro-batch, from which ``auto`` splits by size."""


def choose_split(
    process: SetupProcess, plan: Plan, probe: Probe, options: Options, *, ranks: Ranks, progress: Progress
) -> Plan:
    """Return a plan with the choice of how its batches are split; all ranks call it.

    The split stays by count if the choice fails, or if ``autobatch plan`` is interrupted.

    Raises:
        InputError: a split by size was asked for, and is not possible or would change results.
    """
    asked, why_not_here = options.batch.split, None
    if process.info.epoch_samples is None:
        why_not_here = "needs the sizes of all samples, which those of a stream are not"
    elif ranks.world == 1 < plan.world_size:
        why_not_here = f"over {plan.world_size} ranks is for autobatch fit"
    if asked == "size" and why_not_here is not None:
        raise InputError(f"--split size {why_not_here}: use --split count")
    if asked == "count" or why_not_here is not None:
        return plan
    progress.doing("choosing how batches are split")
    # Above an error for another reason than memory, no micro-batch runs.
    cap = probe.micro_batch if probe.upper_bound_by == "error" else plan.target_batch
    is_probed = probe.precision in (None, plan.precision) and not memory_signature(plan.knobs)
    # The split by size is checked against batches of the run on its own.
    alone = probe.micro_batch if probe.real_batches is None else probe.real_batches.micro_batch_alone
    limits = alone if is_probed else plan.micro_batch, min(cap, options.search.max_micro_batch or cap)
    try:
        cut, note = process.call("the choice of the split", _choose, plan, asked, limits, options.device.seed)
    except KeyboardInterrupt:
        if options.command != "plan":
            raise
        cut, note = None, "the choice was interrupted"
    except Exception as error:
        if asked == "size" and type(error) is InputError:
            raise
        cut, note = None, str(error) if isinstance(error, AutobatchError) else describe(error)
    if note:
        progress.note(
            f"batches are split by {'count' if cut is None else 'the sizes of their samples'}: {note}"
        )
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
    wrong = hazard(setup, sizes)
    if plan.multiple > 1:
        wrong = f"micro-batches must be multiples of {plan.multiple}"
    if wrong is not None and asked == "size":
        raise InputError(f"--split size is not possible: {wrong}. Use --split count")
    obstacle = wrong or nothing_to_gain(setup, sizes)
    if obstacle is not None:
        return None, obstacle
    check_smallest(setup, sizes)
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
