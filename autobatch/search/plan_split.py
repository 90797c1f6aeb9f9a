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
from autobatch.core.options import Options
from autobatch.core.records import COMPILE, PRECISION, Plan, Probe, SizeCut
from autobatch.distributed.ranks import Ranks, agree_on_cut
from autobatch.rehearsal.process import SetupProcess
from autobatch.rehearsal.setup import Setup, with_knobs
from autobatch.search.find_limit import BATCHES, TRIES, batches_to_run, run_batches
from autobatch.workload.contract import WholeBatchLoss
from autobatch.workload.data import digest_of
from autobatch.workload.order import GlobalBatch, Sizes, SizeSplit, Split
from autobatch.workload.user_code import describe

LEAST_SAVED = 0.03
"""Share of the padded area, with the fixed cost of each micro-batch, from which ``auto`` splits by size."""
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
    asked, info = options.split, process.info
    has_sizes = info.epoch_samples is not None and ranks.world == plan.world_size
    if asked == "count" or (asked == "auto" and not (has_sizes and info.largest_sample)):
        return plan, ""
    if not has_sizes:
        raise InputError(
            "--split size needs the sizes of all samples, which those of a stream are not, and autobatch fit "
            "for several ranks: use --split count"
        )
    cut: SizeCut | None
    try:
        cut, saved = process.call("the choice of the split", _choose, plan, probe, options, check)
        note = f"by the sizes of their samples: about {saved:.0%} less to compute, if collate pads"
    except Exception as error:
        reason = str(error) if isinstance(error, AutobatchError) else describe(error)
        if asked == "size":
            raise InputError(f"--split size is not possible: {reason}. Use --split count") from error
        cut, note = None, f"by count: {reason}"
    cut = agree_on_cut(ranks, cut)
    plan = plan if cut is None else msgspec.structs.replace(plan, split="size", size_cut=cut)
    return plan, f"batches are split {note}"


def _choose(setup: Setup, plan: Plan, probe: Probe, options: Options, check: Check) -> tuple[SizeCut, float]:
    """Return the split by size, and the share of the computing that it saves.

    Args:
        setup: stays unchanged.
        plan: the split by count.
        probe: the largest micro-batch of the longest samples.
        options: the split that was asked for, the cap, and the seed of the order of the data.
        check: see `Check`.

    Raises:
        InputError: it is not possible, would change results, or is not worth it.
    """
    setup = with_knobs(setup, {**plan.knobs, PRECISION: plan.precision})
    sizes = setup.worst_case.sizes()
    if sizes is None:
        raise InputError(
            "the sizes of some samples are unknown, as reading all takes long: give Workload(size_of=…)"
        )
    if sizes.min() == sizes.max():
        raise InputError("all samples have one size")
    if isinstance(setup.workload.loss, WholeBatchLoss):
        raise InputError("a WholeBatchLoss sees its rows in the order of the batch")
    if plan.multiple > 1:
        raise InputError(f"micro-batches must be multiples of {plan.multiple}")
    # Above an error for another reason than memory, no micro-batch runs.
    cap = probe.micro_batch if probe.upper_bound_by == "error" else plan.target_batch
    cap = min(cap, options.max_micro_batch or cap)
    is_probed = probe.precision in (None, plan.precision) and not plan.knobs
    # The split by size is checked against batches of the run on its own.
    alone = probe.micro_batch_alone or probe.micro_batch
    limit = min(alone if is_probed else plan.micro_batch, cap)
    _check_results(setup, sizes, limit, check)
    if hasattr(setup.model, "_orig_mod") or setup.knobs.get(COMPILE, "off") != "off":
        raise InputError("a compiled model compiles anew for most micro-batches of other shapes")
    # A rank takes about as many samples of a batch that is split by size.
    batches = batches_to_run(setup, max(1, sum(plan.micro_batches)), options.seed)
    steps = math.ceil(len(batches[0].ids) / limit)
    for smaller in dict.fromkeys(max(1, limit * steps // (steps + more)) for more in range(1 + TRIES)):
        cut = SizeCut(
            longest=float(sizes.max()),
            micro_batch=smaller,
            max_micro_batch=cap,
            digest=digest_of(sizes),
        )
        split = SizeSplit(sizes=sizes, cut=cut)
        saved = max(0.0, _saved(split, batches[:BATCHES], plan.micro_batch))
        if options.split == "auto" and saved < LEAST_SAVED:
            raise InputError(f"by size would save {saved:.0%}")
        if run_batches(setup, batches, split, split.largest) is None:
            return cut, saved
    raise InputError("no split by size survives the batches of the run")


def _saved(by_size: SizeSplit, batches: Sequence[GlobalBatch], micro_batch: int) -> float:
    """Return the share of the cost of batches that are split by count which a split by size saves."""
    fixed = by_size.fixed_area(by_size.largest)

    def cost(split: Split, limit: int) -> float:
        parts = (by_size.sizes[part.ids] for batch in batches for part in split.parts(batch, limit))
        return sum(fixed + len(own) * float(own.max()) for own in parts)

    return 1 - cost(by_size, by_size.largest) / cost(Split(), micro_batch)


def read_sizes(setup: Setup) -> Sizes | None:
    """Return the size of each sample; None if some are unknown."""
    return setup.worst_case.sizes()


def _check_results(setup: Setup, sizes: Sizes, limit: int, check: Check) -> None:
    """Raise `InputError` if a split by size would change results."""
    if any(isinstance(module, _BatchNorm) for module in setup.model.modules()):
        raise InputError(
            "BatchNorm computes its statistics over a micro-batch, and those of samples of one size differ"
        )
    if setup.sharding is not None:
        return  # values of a shared model are not its own here
    order = np.argsort(sizes, kind="stable")
    # Several longer ones may not fit together.
    short = order[: np.count_nonzero(sizes <= max(sizes.max() / 2, np.median(sizes)))]
    ids = short[np.linspace(0, len(short) - 1, CHECKED, dtype=int)].tolist()
    # In float32, because rounding is no effect of the padding.
    fault = check(replace(setup, precision="fp32"), limit, ids)[0]
    if fault is not None:
        raise InputError(fault)
