"""The sizes of samples in an estimate: what fits of each size, and what a split by size would save."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from autobatch.core.errors import AutobatchError
from autobatch.core.records import Estimate, LengthLimit, Plan, SizeCut
from autobatch.device.allocator.ledger import Allocator
from autobatch.footprint.tracing.trace_step import Setting
from autobatch.search.sizes.curve import CurvePoint, curve_of, trace_sizes
from autobatch.search.sizes.hazards import hazard_in_model, is_padded
from autobatch.search.sizes.plan_split import with_expectations
from autobatch.workload.contract import is_stream
from autobatch.workload.data import WorstCaseSampler
from autobatch.workload.split import digest_of

Sizes = NDArray[np.float64]


def with_sizes(
    one: Estimate,
    setting: Setting,
    worst_case: WorstCaseSampler,
    new_allocator: Callable[[], Allocator],
    *,
    cap: int,
    seed: int,
) -> Estimate:
    """Add the largest micro-batch of smaller samples, and the split by size of the plan.

    Nothing runs here, so what only a run shows stays open: the cost of a micro-batch, and whether padding
    changes a result.

    Args:
        one: what was predicted for the largest samples.
        setting: what is traced.
        worst_case: knows the sizes.
        new_allocator: returns an empty model of the GPU's allocator.
        cap: the largest micro-batch to try.
        seed: of the order of the data.

    Returns:
        The same estimate if samples have one size, or if the step is no program of it. Where some allocations
        are only bounded from above, less may be predicted for smaller samples than fits.
    """
    sizes = None if is_stream(setting.workload.train_data) else worst_case.sizes()
    if not one.fits or sizes is None or sizes.min() == sizes.max():
        return one
    try:
        program = trace_sizes(setting, sizes)
    except AutobatchError:
        return one
    points = curve_of(program, sizes, new_allocator, limit=one.micro_batch, cap=cap)
    one = msgspec.structs.replace(one, lengths=_lengths(points, cap), size_unit=worst_case.size_unit())
    is_cut = hazard_in_model(setting.model) is None and is_padded(setting.workload, sizes)
    if one.plan is None or not is_cut:
        return one
    return msgspec.structs.replace(one, size_cut=_cut(points, sizes, one.plan, seed))


def _lengths(points: list[CurvePoint], cap: int) -> list[LengthLimit]:
    return [
        LengthLimit(
            size=size,
            micro_batch=own,
            upper_bound_by="cap" if own == cap else "replay",
            padded_size=size * own,
        )
        for size, own in points
    ]


def _cut(points: list[CurvePoint], sizes: Sizes, plan: Plan, seed: int) -> SizeCut:
    cut = SizeCut(
        sizes=[point.size for point in points],
        micro_batches=[min(point.micro_batch, plan.target_batch) for point in points],
        limits_by="replay",
        digest=digest_of(sizes),
    )
    return with_expectations(cut, sizes, plan, seed)[0]
