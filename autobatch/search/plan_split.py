"""The choice between a split by count and a split by size, with the saving that is expected."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from autobatch.core.errors import AutobatchError, InputError
from autobatch.core.options import Options
from autobatch.core.progress import Progress
from autobatch.core.records import Plan, Probe, SizeCut
from autobatch.distributed.rank_plan import agree_on_cut
from autobatch.distributed.ranks import Ranks
from autobatch.planning import NOISE_EVERY
from autobatch.rehearsal.process import Session, SetupProcess
from autobatch.report.facts import describe_run_order
from autobatch.search.attempts import ask_or_none
from autobatch.search.curve import configured, curve_of, is_of_probe
from autobatch.search.hazards import Obstacle, find_obstacle
from autobatch.search.real_batches import RunBatches, first_batches, plan_in_order, run_batches
from autobatch.workload.order import GlobalBatchSampler
from autobatch.workload.split import SizeSplit, Split, digest_of, size_of_part

Sizes = NDArray[np.float64]
BY_COUNT = "batches are split by count"
BATCHES = 8
"""Batches of the run over which the savings are averaged."""
LEAST_GAIN = 1.03
"""Ratio of padded areas, with the fixed cost of each micro-batch, from which ``auto`` splits by size."""
SHARES = (1.0, 0.97, 0.94, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)
"""Shares of the limits that are tried until real batches fit."""
Choice = tuple[SizeCut | None, str | None]
"""The split, None by count, and the choice in words, None if there was none to make."""


def choose_split(
    process: SetupProcess,
    plan: Plan,
    probe: Probe,
    options: Options,
    *,
    ranks: Ranks,
    batches: GlobalBatchSampler | None,
    progress: Progress,
) -> Plan:
    """Return a plan with the choice of how its batches are split; all ranks call it.

    If the order of the run is known, concatenated samples may allow larger micro-batches. A split by size
    must beat these. The split stays by count if the choice fails, or if ``autobatch plan`` is interrupted.

    Raises:
        InputError: a split by size was asked for, and is not possible or would change results.
    """
    if not _may_cut_by_size(plan, options, ranks, is_stream=process.info.epoch_samples is None):
        return plan
    # A rank takes about as many samples of a batch that is split by size.
    samples = max(1, plan.ranks[ranks.rank].samples) if plan.ranks else plan.target_batch
    cap = options.search.max_micro_batch or plan.target_batch
    # Above the limit, the workload may not run for another reason than memory.
    cap = min(samples, probe.micro_batch if probe.upper_bound_by == "error" else cap)
    # A split by size is checked against the batches of the run on its own.
    limit = probe.micro_batch if probe.real_batches is None else probe.real_batches.micro_batch_alone
    by_count = msgspec.structs.replace(plan, target_batch=samples)
    progress.doing("choosing how batches are split")
    cut = None
    try:
        if batches is not None and plan.world_size == 1 and probe.stopped_by is None:
            act = "a look at the order of the run"
            larger = ask_or_none(process, act, plan_in_order, by_count, batches, cap)
            by_count = larger or by_count
        asked, seed = options.batch.split, options.device.seed
        act = "the choice of the split"
        cut, note = process.call(act, _choose, by_count, asked, limit=limit, cap=cap, seed=seed)
    except InputError:
        raise
    except AutobatchError as error:
        note = f"{BY_COUNT}: {error}"
    except KeyboardInterrupt:
        if options.command != "plan":
            raise
        note = f"{BY_COUNT}: the choice was interrupted"
    if note is not None:
        progress.note(note)
    cut = agree_on_cut(ranks, cut)
    if cut is not None:
        return msgspec.structs.replace(plan, split="size", size_cut=cut)
    if by_count.run_order is None:
        return plan
    progress.note(describe_run_order(by_count))
    progress.planned(by_count)
    return by_count


def _may_cut_by_size(plan: Plan, options: Options, ranks: Ranks, *, is_stream: bool) -> bool:
    """Return whether the batches of a plan may be split by size; raise if that was asked for in vain."""
    is_asked = options.batch.split == "size"
    if is_stream and is_asked:
        raise InputError(
            "--split size needs the sizes of all samples, and the data are a stream: use --split count, or "
            "give data with an index"
        )
    if plan.world_size == 1 or is_stream:
        return not is_stream
    if ranks.world == 1 and is_asked:
        raise InputError(
            f"--split size over {plan.world_size} ranks is for autobatch fit: use --split count to plan for "
            "another loop"
        )
    # All ranks share one cut. It has the least limit of all ranks for each size: too low for larger GPUs.
    is_alike = len({one.kind for one in plan.ranks}) == 1
    return ranks.world > 1 and (is_alike or is_asked)


def _choose(session: Session, plan: Plan, asked: str, *, limit: int, cap: int, seed: int) -> Choice:
    """Choose the split in the process of the setup, which stays unchanged.

    The ``limit`` is that of the longest samples, and the ``cap`` that of samples of any size.
    """
    if asked == "count":
        return None, None
    setup = configured(session.setup, plan)
    obstacle = find_obstacle(setup)
    if plan.multiple > 1:
        obstacle = Obstacle(f"micro-batches must be multiples of {plan.multiple}", is_hazard=True)
    if obstacle is not None:
        if asked == "size" and obstacle.is_hazard:
            raise InputError(f"--split size is not possible: {obstacle.reason}. Use --split count")
        sizes = setup.worst_case.sizes()
        is_worth_saying = asked == "size" or (sizes is not None and sizes.min() < sizes.max())
        return None, f"{BY_COUNT}: {obstacle.reason}" if is_worth_saying else None
    sampler = first_batches(session.setup, plan.target_batch, seed, plan.last_batch)
    batches = run_batches(session, sampler, plan)
    if batches.joins and (batches.program is None or not batches.program.is_linear):
        return None, f"{BY_COUNT}: the collate function does not pad, so there is nothing to save"
    cut = _largest_cut(batches, limit if is_of_probe(session.setup, plan) else plan.micro_batch, cap)
    if cut is None:
        return None, f"{BY_COUNT}: no split by size survives the batches of the run"
    cut, gain = with_expectations(cut, batches.sizes, plan, seed)
    if asked == "auto" and gain < LEAST_GAIN:
        return None, f"{BY_COUNT}: by size would save {max(0.0, 1 - 1 / gain):.0%}"
    padding = (
        f", and a padded batch has {cut.padding:.2f} times its real size in place of "
        f"{cut.padding_by_count:.2f} times"
        if cut.is_padded
        else ""
    )
    return cut, (
        f"batches are split by the sizes of their samples: {cut.steps:.1f} micro-batches on average in place "
        f"of {cut.steps_by_count:.0f}{padding}"
    )


def _largest_cut(batches: RunBatches, limit: int, cap: int) -> SizeCut | None:
    """Return a cut whose limits the batches of the run survive, in a replay and in one run."""
    sizes, program, joins = batches.sizes, batches.program, batches.joins
    knots, limits = [float(sizes.max())], [min(limit, cap)]
    if program is not None:
        # Concatenated samples are not all of the largest size, so no run has shown that limit.
        ran = None if joins else limit
        curve = curve_of(program, sizes, batches.setup.device.new_allocator, limit=ran, cap=cap)
        knots, limits = [size for size, _ in curve], [micro_batch for _, micro_batch in curve]
    cut = SizeCut(
        sizes=knots,
        micro_batches=limits,
        limits_by="longest" if program is None else "replay",
        digest=digest_of(sizes),
        by_size_of=batches.setup.workload.size_of is not None,
        is_padded=not joins,
    )
    for share in SHARES:
        limits = [max(1, int(limit * share)) for limit in cut.micro_batches]
        lower = msgspec.structs.replace(cut, micro_batches=limits)
        split = SizeSplit(sizes=sizes, cut=lower, measured_every=NOISE_EVERY)
        count = batches.survived(split, split.largest)
        if count is None:
            continue
        if program is None:
            return lower
        if batches.run_first(split, split.largest, count=1):
            return msgspec.structs.replace(lower, replayed_batches=count)
    return None


def read_sizes(session: Session) -> Sizes | None:
    """Return the size of each sample; None if some are unknown."""
    return session.setup.worst_case.sizes()


def with_expectations(cut: SizeCut, sizes: Sizes, plan: Plan, seed: int) -> tuple[SizeCut, float]:
    """Fill in padding and micro-batches, as means over the first batches of the run.

    Returns:
        The cut, and the cost of a split by count ÷ its cost; 1 if there is no batch.
    """
    if plan.last_batch == "drop" and len(sizes) < plan.target_batch:
        return cut, 1.0
    by_size = SizeSplit(sizes=sizes, cut=cut, measured_every=NOISE_EVERY)
    sampler = GlobalBatchSampler(
        samples=len(sizes),
        target_batch=plan.target_batch,
        seed=seed,
        steps=BATCHES,
        last_batch=plan.last_batch,
    )
    batches = list(sampler.batches())
    found = []
    for split, limit in ((Split(), plan.micro_batch), (by_size, by_size.largest)):
        parts = [sizes[part.ids] for batch in batches for part in split.parts(batch, limit)]
        padded = sum(len(own) * size_of_part(own, is_padded=cut.is_padded) for own in parts)
        real = sum(float(own.sum()) for own in parts)
        area = padded + len(parts) * by_size.fixed_area(by_size.largest)
        found.append((padded / real if real else 1.0, len(parts) / max(1, len(batches)), area))
    (padding_by_count, steps_by_count, area_by_count), (padding, steps, area) = found
    known = msgspec.structs.replace(
        cut, padding_by_count=padding_by_count, padding=padding, steps_by_count=steps_by_count, steps=steps
    )
    return known, area_by_count / area if area else 1.0
