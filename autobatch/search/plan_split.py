"""The choice between a split by count and a split by size, with the saving that is expected."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from autobatch.core.errors import InputError
from autobatch.core.knobs import memory_signature
from autobatch.core.records import Plan, SizeCut
from autobatch.search.curve import CurvePoint, configured, curve_of
from autobatch.search.hazards import find_obstacle
from autobatch.search.real_batches import RunBatches, first_batches, run_batches
from autobatch.setup.session import Session
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
MEASURED_EVERY = 4
"""Batches from one measurement of the noise scale to the next; see `autobatch.training.noise_scale`."""


class SplitSettings(NamedTuple):
    """Settings of the choice: plain values, which travel to a child process."""

    split: Literal["auto", "count", "size"]
    limit: int
    """The largest micro-batch that fits, on the longest samples."""
    cap: int
    """The largest micro-batch to run on samples of any size."""
    seed: int


class SplitChoice(NamedTuple):
    """A chosen split."""

    cut: SizeCut | None
    """None to split by count."""
    note: str | None
    """The choice in words; None if there was none to make."""


def choose_split(session: Session, plan: Plan, settings: SplitSettings) -> SplitChoice:
    """Choose the split of a plan; the setup stays unchanged.

    Args:
        session: the open setup.
        plan: the plan.
        settings: settings of the choice.

    Raises:
        InputError: a split by size was asked for, and would change results.
    """
    if settings.split == "count":
        return SplitChoice(None, None)
    if plan.multiple > 1:
        reason = f"micro-batches must be multiples of {plan.multiple}"
        if settings.split == "size":
            raise InputError(f"--split size is not possible: {reason}. Use --split count")
        return SplitChoice(None, None)
    setup = configured(session.setup, plan)
    obstacle = find_obstacle(setup)
    if obstacle is not None:
        if settings.split == "size" and obstacle.is_hazard:
            raise InputError(f"--split size is not possible: {obstacle.reason}. Use --split count")
        sizes = setup.worst_case.sizes()
        is_worth_saying = settings.split == "size" or (sizes is not None and sizes.min() < sizes.max())
        return SplitChoice(
            None, f"batches are split by count: {obstacle.reason}" if is_worth_saying else None
        )
    sampler = first_batches(session.setup, plan.target_batch, settings.seed, plan.last_batch)
    batches = run_batches(session, sampler, plan)
    # The limit of the probe is that of its own configuration.
    is_other = bool(memory_signature(plan.knobs)) or plan.precision != session.setup.precision
    return _compare(batches, plan, settings, plan.micro_batch if is_other else settings.limit)


def read_sizes(session: Session) -> Sizes | None:
    """Return the size of each sample; None if some are unknown."""
    return session.setup.worst_case.sizes()


def _compare(batches: RunBatches, plan: Plan, settings: SplitSettings, limit: int) -> SplitChoice:
    """Plan a split by size, and take it if it saves enough or was asked for."""
    setup, sizes, program, joins = batches.setup, batches.sizes, batches.program, batches.joins
    if joins and (program is None or not program.is_linear):
        return SplitChoice(
            None, f"{BY_COUNT}: the collate function does not pad, so there is nothing to save"
        )
    points = [CurvePoint(float(sizes.max()), min(limit, settings.cap))]
    if program is not None:
        # Samples that are joined are not all of the largest size, so no run has shown that limit.
        ran = None if joins else limit
        points = curve_of(program, sizes, setup.device.new_allocator, limit=ran, cap=settings.cap)
    cut = SizeCut(
        sizes=[point.size for point in points],
        micro_batches=[point.micro_batch for point in points],
        limits_by="longest" if program is None else "replay",
        digest=digest_of(sizes),
        by_size_of=setup.workload.size_of is not None,
        is_padded=not joins,
    )
    survived = _surviving(batches, cut)
    if survived is None:
        return SplitChoice(None, f"{BY_COUNT}: no split by size survives the batches of the run")
    cut, gain = with_expectations(survived, sizes, plan, settings.seed)
    if settings.split == "auto" and gain < LEAST_GAIN:
        return SplitChoice(None, f"{BY_COUNT}: by size would save {max(0.0, 1 - 1 / gain):.0%}")
    return SplitChoice(cut, describe_cut(cut))


def _surviving(batches: RunBatches, cut: SizeCut) -> SizeCut | None:
    """Lower the limits of a cut until the batches of the run fit, in a replay and in one run.

    Returns:
        None if no limits do.
    """
    for share in SHARES:
        limits = [max(1, int(limit * share)) for limit in cut.micro_batches]
        lower = msgspec.structs.replace(cut, micro_batches=limits)
        split = SizeSplit(sizes=batches.sizes, cut=lower, measured_every=MEASURED_EVERY)
        count = batches.survived(split, split.largest)
        if count is None:
            continue
        if batches.program is None:
            return lower
        if batches.run_first(split, split.largest, count=1) is None:
            return msgspec.structs.replace(lower, replayed_batches=count)
    return None


def describe_cut(cut: SizeCut) -> str:
    """Describe a split by size and its saving, in one line."""
    padding = f"padded ÷ real {cut.padding_by_count:.2f} → {cut.padding:.2f}, " if cut.is_padded else ""
    return (
        f"batches are split by the sizes of their samples: {padding}{cut.steps_by_count:.0f} → "
        f"{cut.steps:.1f} micro-batches"
    )


def with_expectations(cut: SizeCut, sizes: Sizes, plan: Plan, seed: int) -> tuple[SizeCut, float]:
    """Fill in padding and micro-batches, as means over the first batches of the run.

    Returns:
        The cut, and the cost of a split by count ÷ its cost; 1 if there is no batch.
    """
    split = SizeSplit(sizes=sizes, cut=cut, measured_every=MEASURED_EVERY)
    sampler = GlobalBatchSampler(
        samples=len(sizes),
        target_batch=plan.target_batch,
        seed=seed,
        steps=BATCHES,
        last_batch=plan.last_batch,
    )
    if plan.last_batch == "drop" and len(sizes) < plan.target_batch:
        return cut, 1.0
    by_count = _totals(Split(), sampler, sizes, plan.micro_batch, split)
    by_size = _totals(split, sampler, sizes, split.largest, split)
    known = msgspec.structs.replace(
        cut,
        padding_by_count=by_count.padding,
        padding=by_size.padding,
        steps_by_count=by_count.steps,
        steps=by_size.steps,
    )
    return known, by_count.area / by_size.area if by_size.area else 1.0


class _Totals(NamedTuple):
    padding: float
    """Padded ÷ real."""
    steps: float
    """Micro-batches of a batch."""
    area: float
    """Padded area, with the fixed cost of each micro-batch."""


def _totals(
    split: Split, sampler: GlobalBatchSampler, sizes: Sizes, micro_batch: int, by_size: SizeSplit
) -> _Totals:
    padded = real = 0.0
    count = batches = 0
    for batch in sampler.batches():
        batches += 1
        for part in split.parts(batch, micro_batch):
            own = sizes[part.ids]
            padded += len(own) * size_of_part(own, is_padded=by_size.cut.is_padded)
            real += float(own.sum())
            count += 1
    fixed = count * by_size.fixed_area(by_size.largest)
    return _Totals(padded / real if real else 1.0, count / max(1, batches), padded + fixed)
