"""Estimates from predictions, and the sentences that explain them."""

from __future__ import annotations

from collections.abc import Sequence

from autobatch.core.records.base import Precision
from autobatch.core.records.estimate import Estimate, RankEstimate
from autobatch.core.units import format_bytes
from autobatch.device.hardware_profile import HardwareProfile
from autobatch.footprint.explain import explain
from autobatch.footprint.predict import Footprint, Prediction
from autobatch.footprint.remedies import in_words
from autobatch.probing.estimates.settings import EstimateSettings


def estimate_from(
    step: Footprint,
    found: Prediction,
    gpu: HardwareProfile,
    budget: tuple[int, str],
    precision: Precision,
) -> Estimate:
    """Build the estimate for a GPU from a prediction, without a plan and its duration.

    Args:
        step: the footprint that was predicted from.
        found: the prediction.
        gpu: the GPU.
        budget: bytes of the budget, and its origin in words.
        precision: precision of the step.
    """
    where = explain(step, max(1, found.micro_batch))
    return Estimate(
        profile=gpu.name,
        budget_bytes=budget[0],
        budget_source=budget[1],
        precision=precision,
        micro_batch=found.micro_batch,
        micro_batch_low=found.micro_batch_low,
        micro_batch_high=found.micro_batch_high,
        fits=found.fits,
        peak_allocated_bytes=found.peak_allocated_bytes,
        peak_reserved_bytes=found.peak_reserved_bytes,
        seconds=0.0,
        plan=None,
        retries=found.outcome.retries,
        memory=where.by_kind,
        modules=where.by_module,
        phase=where.phase,
    )


def nothing_fits(estimates: list[Estimate], settings: EstimateSettings) -> str:
    """Write that a micro-batch fits on no GPU, where its memory goes, and what helps."""
    asked = 1 if settings.micro_batch is None else settings.micro_batch
    most = max(estimates, key=lambda one: one.budget_bytes)
    where = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in list(most.memory.items())[:3])
    names = ", ".join(one.profile for one in estimates)
    where_not = f"not to fit on {names}" if len(estimates) == 1 else f"to fit on none of {names}"
    return (
        f"a micro-batch of {asked} is predicted {where_not}: it takes "
        f"{format_bytes(most.peak_reserved_bytes)} ({where}), and {most.profile} has a budget of "
        f"{format_bytes(most.budget_bytes)}. What helps: a larger GPU{in_words(most.remedies)}"
    )


def fewest_ranks(table: Sequence[RankEstimate]) -> str:
    """Write the fewest ranks on which a sample fits as the end of a sentence; nothing if there are none."""
    fitting = [row for row in table if row.micro_batch]
    if not fitting:
        return ""
    best = min(fitting, key=lambda row: (row.world_size, row.budget_bytes))
    return f", {best.world_size} ranks on {best.profile} (a micro-batch of {best.micro_batch:,} fits there)"


def compared_with_runs(name: str, shares: list[float]) -> str:
    """Compare runs on a GPU with traces for it, in one sentence."""
    low, high = min(shares), max(shares)
    return (
        f"{name}: runs on this machine took {low:+.1%} to {high:+.1%} more than predicted "
        f"({len(shares)} compared)"
    )
