"""The choice between a split by count and a split by size, by the padding that is saved.

Sorting the samples of a batch keeps Σ totals ÷ Σ counts. It changes results if a layer or a loss sees more
than one sample at a time, or sees the padding. Such a workload depends on the micro-batch in any split, but a
split by size makes the error systematic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import numpy as np
from torch.nn.modules.batchnorm import _BatchNorm

from autobatch.core.errors import AutobatchError, InputError
from autobatch.core.knobs import COMPILE, PRECISION
from autobatch.core.options import Options
from autobatch.core.records import Plan, Probe, SizeCut
from autobatch.distributed.ranks import Ranks, agree_on_cut
from autobatch.rehearsal.process import SetupProcess
from autobatch.rehearsal.setup import Setup, with_knobs
from autobatch.search.plan_limit import FIRST, TRIES, batches_to_run, run_batches
from autobatch.workload.order import GlobalBatch
from autobatch.workload.rng import preserved_random_state
from autobatch.workload.split import Sizes, SizeSplit, Split, sizes_digest
from autobatch.workload.user_code import describe

LEAST_GAIN = 1.03
"""Ratio of padded areas, with the fixed cost of each micro-batch, from which ``auto`` splits by size."""
CHECKED = 8
"""Samples of sizes from the smallest to half of the largest whose gradient must not depend on the split."""

Check = Callable[[Setup, int, Sequence[int]], tuple[str | None, str | None]]
"""Checks whether the gradient of some samples depends on their split: takes a setup, the largest micro-batch
and the samples, and returns the fault first, None if there is none; see `examine` of `autobatch.training`."""


def choose_split(
    process: SetupProcess, plan: Plan, probe: Probe, options: Options, *, check: Check, ranks: Ranks
) -> tuple[Plan, str]:
    """Choose how the batches of a plan are split; all ranks call it.

    Returns:
        The plan with the choice, which is by count if it fails, and a note on it; empty if there is none.

    Raises:
        InputError: a split by size was asked for, and is not possible or would change results.
    """
    asked = options.split
    has_sizes = process.info.epoch_samples is not None and ranks.world == plan.world_size
    if asked == "count" or (asked == "auto" and not has_sizes):
        return plan, ""
    if not has_sizes:
        raise InputError(
            "--split size needs the sizes of all samples, which those of a stream are not, and autobatch fit "
            "for several ranks: use --split count"
        )
    # Above an error for another reason than memory, no micro-batch runs.
    cap = probe.micro_batch if probe.upper_bound_by == "error" else plan.target_batch
    is_probed = probe.precision in (None, plan.precision) and not plan.knobs
    # The split by size is checked against batches of the run on its own.
    alone = probe.micro_batch_alone or probe.micro_batch
    limits = alone if is_probed else plan.micro_batch, min(cap, options.max_micro_batch or cap)
    try:
        cut, reason = process.call("the choice of the split", _choose, plan, options, limits, check)
    except Exception as error:
        cut, reason = None, str(error) if isinstance(error, AutobatchError) else describe(error)
    if cut is None and asked == "size":
        raise InputError(f"--split size is not possible: {reason}. Use --split count")
    by = "count" if cut is None else "the sizes of their samples"
    note = f"batches are split by {by}: {reason}" if reason else ""
    cut = agree_on_cut(ranks, cut)
    return plan if cut is None else msgspec.structs.replace(plan, split="size", size_cut=cut), note


def _choose(
    setup: Setup, plan: Plan, options: Options, limits: tuple[int, int], check: Check
) -> tuple[SizeCut | None, str]:
    """Return the split, None by count, and the reason, empty if there was no choice.

    Args:
        setup: stays unchanged.
        plan: the split by count.
        options: the split that was asked for, and the seed of the order of the data.
        limits: the largest micro-batches of the longest samples and of any.
        check: see `Check`.
    """
    setup = with_knobs(setup, {**plan.knobs, PRECISION: plan.precision})
    sizes = setup.worst_case.sizes()
    if sizes is None:
        return (
            None,
            "the sizes of some samples are unknown, as reading all takes long: give Workload(size_of=…)",
        )
    if sizes.min() == sizes.max():
        return None, "all samples have one size" * (options.split == "size")
    limit, cap = min(limits), limits[1]
    obstacle: str | None = f"micro-batches must be multiples of {plan.multiple}"
    if plan.multiple == 1:
        with preserved_random_state():
            obstacle = _obstacle(setup, sizes, limit, check)
    if obstacle is not None:
        return None, obstacle
    # A rank takes about as many samples of a batch that is split by size.
    batches = batches_to_run(setup, max(1, sum(plan.micro_batches)), options.seed)
    steps = math.ceil(len(batches[0].ids) / limit)
    for smaller in dict.fromkeys(max(1, limit * steps // (steps + more)) for more in range(1 + TRIES)):
        cut = SizeCut(
            longest=float(sizes.max()),
            micro_batch=smaller,
            max_micro_batch=cap,
            digest=sizes_digest(sizes),
        )
        split = SizeSplit(sizes=sizes, cut=cut)
        gain = _gain(split, batches[:FIRST], plan.micro_batch)
        saved = f"{max(0.0, 1 - 1 / gain):.0%}"
        if options.split == "auto" and gain < LEAST_GAIN:
            return None, f"by size would save {saved}"
        if run_batches(setup, batches, split, split.largest) is None:
            return cut, f"about {saved} less to compute, if collate pads"
    return None, "no split by size survives the batches of the run"


def _gain(by_size: SizeSplit, batches: Sequence[GlobalBatch], micro_batch: int) -> float:
    """Return the cost of batches that are split by count ÷ that of their split by size."""
    fixed = by_size.fixed_area(by_size.largest)

    def cost(split: Split, limit: int) -> float:
        parts = (by_size.sizes[part.ids] for batch in batches for part in split.parts(batch, limit))
        return sum(fixed + len(own) * float(own.max()) for own in parts)

    return cost(Split(), micro_batch) / cost(by_size, by_size.largest)


def read_sizes(setup: Setup) -> Sizes | None:
    """Return the size of each sample; None if some are unknown."""
    return setup.worst_case.sizes()


def _obstacle(setup: Setup, sizes: Sizes, limit: int, check: Check) -> str | None:
    """Return why a split by size would change results, or save no time; None if nothing shows either."""
    if any(isinstance(module, _BatchNorm) for module in setup.model.modules()):
        return "BatchNorm computes its statistics over a micro-batch, and those of samples of one size differ"
    order = np.argsort(sizes, kind="stable")
    # Several longer ones may not fit together; values of a shared model are not its own here.
    short = order[: np.count_nonzero(sizes <= max(sizes.max() / 2, np.median(sizes)))]
    ids = short[np.linspace(0, len(short) - 1, CHECKED, dtype=int)].tolist()
    # In float32, because rounding is no effect of the padding.
    fault = None if setup.sharding else check(replace(setup, precision="fp32"), limit, ids)[0]
    if fault is not None:
        return fault
    if hasattr(setup.model, "_orig_mod") or setup.knobs.get(COMPILE, "off") != "off":
        return "a compiled model compiles anew for most micro-batches of other shapes"
    return None
