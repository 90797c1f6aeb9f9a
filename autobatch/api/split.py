"""The stage that chooses how batches are split, after a plan and its tuning."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from autobatch.api.run_order import in_run_order
from autobatch.core.errors import AutobatchError, InputError
from autobatch.core.options import Options
from autobatch.core.progress import Progress
from autobatch.core.records.plan import Plan
from autobatch.core.records.probe import Probe
from autobatch.distributed.joint_split import agree_on_cut
from autobatch.distributed.ranks import Alone, Ranks
from autobatch.report.facts import describe_run_order
from autobatch.report.result import Result
from autobatch.search.sizes.plan_split import SplitChoice, SplitSettings, choose_split, read_sizes
from autobatch.search.sizes.real_batches import Order
from autobatch.setup.child import ChildCrashed, SetupProcess


def add_split(
    process: SetupProcess,
    result: Result,
    options: Options,
    progress: Progress,
    *,
    ranks: Ranks | None = None,
    order: Order | None = None,
    is_last: bool = False,
) -> Result:
    """Put the split into the plan of a result, with a note on the choice; all ranks call it.

    If the order of the run is known, samples that are joined may share larger micro-batches, and that plan is
    taken unless a split by size is faster. A choice that fails is no reason to end a run that can split by
    count. If it is the last stage of a command, an interrupted choice keeps the result.

    Raises:
        InputError: a split by size was asked for, and would change results.
    """
    plan, probe = result.plan, result.probe
    if plan is None or probe is None or probe.stopped_by == "interrupt":
        return result
    if process.info.epoch_samples is None:
        if options.batch.split == "size":
            raise InputError(
                "--split size needs the sizes of all samples, and the data are a stream: use --split count, "
                "or give data with an index"
            )
        return result
    ranks = ranks or Alone()
    if plan.world_size > 1 and not _may_cut_jointly(plan, options, ranks):
        return result
    # A rank's share of a batch is about its share of a joint cut.
    share = max(1, plan.ranks[ranks.rank].samples) if plan.ranks else plan.target_batch
    settings = _settings_of(probe, options, share)
    by_count = of_rank = msgspec.structs.replace(plan, target_batch=share)
    progress.doing("choosing how batches are split")
    try:
        if order is not None and plan.world_size == 1 and probe.stopped_by is None:
            by_count = in_run_order(process, of_rank, order, settings.cap)
        choice = _choose(process, by_count, settings)
    except KeyboardInterrupt:
        if not is_last:
            raise
        choice = SplitChoice(None, "batches are split by count: the choice was interrupted")
    if choice.note is not None:
        progress.note(choice.note)
    cut = agree_on_cut(ranks, choice.cut)
    if cut is None and by_count.run_order is None:
        return result
    if cut is None:
        progress.note(describe_run_order(by_count))
        progress.planned(by_count)
        return msgspec.structs.replace(result, plan=by_count)
    plan = msgspec.structs.replace(plan, split="size", size_cut=cut)
    return msgspec.structs.replace(result, plan=plan)


def _settings_of(probe: Probe, options: Options, share: int) -> SplitSettings:
    """Return the settings of the choice for a rank that takes ``share`` samples of a batch."""
    cap = options.search.max_micro_batch or options.target_batch
    # Above the limit, the workload may not run for another reason than memory.
    cap = probe.micro_batch if probe.upper_bound_by == "error" else cap
    # A split by size is checked against the batches of the run on its own.
    limit = probe.micro_batch if probe.real_batches is None else probe.real_batches.micro_batch_alone
    return SplitSettings(options.batch.split, limit, min(cap, share), options.device.seed)


def _choose(process: SetupProcess, plan: Plan, settings: SplitSettings) -> SplitChoice:
    """Return the choice; a failure chooses the split by count."""
    try:
        return process.call("the choice of the split", choose_split, plan, settings)
    except InputError:
        raise
    except AutobatchError as error:
        if isinstance(error, ChildCrashed):
            process.restart()
        return SplitChoice(None, f"batches are split by count: {error}")


def _may_cut_jointly(plan: Plan, options: Options, ranks: Ranks) -> bool:
    """Return whether the ranks of a plan may cut batches by size together.

    Raises:
        InputError: a split by size was asked for, and another loop will run the plan.
    """
    if ranks.world == 1 and options.batch.split == "size":
        raise InputError(
            f"--split size over {plan.world_size} ranks is for autobatch fit: use --split count to plan for "
            "another loop"
        )
    # A joint cut has the least limit of all ranks for each size, which is too low for larger GPUs.
    is_alike = len({one.kind for one in plan.ranks}) == 1
    return ranks.world > 1 and (is_alike or options.batch.split == "size")


def sizes_of(process: SetupProcess, result: Result) -> NDArray[np.float64] | None:
    """Return the sizes that a process has read, so that another need not read them again.

    Returns:
        None if the plan does not need them.
    """
    if result.plan is None or result.plan.size_cut is None:
        return None
    return process.call("reading the sizes of the samples", read_sizes)
