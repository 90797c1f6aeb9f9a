"""Records of an estimate: predictions of what fits on GPUs that are not here."""

from __future__ import annotations

from typing import Literal

from autobatch.core.records.base import Parallel, Precision, Record, ShardSync
from autobatch.core.records.plan import Plan, SizeCut
from autobatch.core.records.probe import LengthLimit


class Remedy(Record, frozen=True, kw_only=True):
    """A change that lets a larger micro-batch fit, and its predicted effect; traced, not run."""

    name: str
    """``checkpointing``, ``bf16``, ``gradient_dtype``, ``fused`` or ``expandable_segments``; several are
    joined by ``+``."""
    advice: str
    """Instruction, in words."""
    micro_batch: int
    """Largest micro-batch that is predicted to fit with the change; 0 if none, though it lowers the peak."""
    peak_bytes: int
    """Peak compared with the budget, at ``micro_batch`` or at 1 if that is 0."""


class Estimate(Record, frozen=True, kw_only=True):
    """Prediction of what fits on one GPU."""

    profile: str
    budget_bytes: int
    budget_source: str
    precision: Precision
    micro_batch: int
    """Largest micro-batch that is predicted to fit, 0 if none; or the one that was asked about."""
    micro_batch_low: int
    micro_batch_high: int
    """Upper end of the interval in which the true limit is expected."""
    fits: bool
    peak_allocated_bytes: int
    """Peak at ``micro_batch``, or at 1 if none fits."""
    peak_reserved_bytes: int | None
    seconds: float
    """Duration of the prediction; GPUs that run the same operators share the time of one trace."""
    plan: Plan | None
    memory: dict[str, int]
    """Live bytes at the peak, by category."""
    modules: dict[str, int]
    """Bytes of activations at the peak, by module."""
    phase: str
    """Phase of the step that contains the peak."""
    remedies: list[Remedy] | None = None
    """Changes that let more fit, the best first; None if several GPUs were asked about."""
    lengths: list[LengthLimit] = []
    """As `Probe.lengths`; empty for several GPUs, or if the step is no program of the size."""
    size_unit: Literal["tokens"] | None = None
    """As `Probe.size_unit`."""
    size_cut: SizeCut | None = None
    """Split by size of the plan, whose cost is unknown; None without a plan, or if something forbids it."""
    world_size: int = 1
    """Ranks, one per GPU; all figures are those of one rank."""
    parallel: Parallel | None = None
    """``replicate`` if each rank has a whole model, ``shard`` if the ranks share it; None for one rank."""
    parallel_reason: str | None = None
    """Reason for the choice, in words; None if it was asked for."""
    shard_sync: ShardSync | None = None
    """Reduction of sharded gradients: after ``each`` micro-batch, or ``once`` per step."""


class RankEstimate(Record, frozen=True, kw_only=True):
    """Prediction of what fits on each of some ranks: a cell of the table of ranks and GPUs."""

    profile: str
    world_size: int
    parallel: Parallel
    budget_bytes: int
    micro_batch: int
    """Largest micro-batch of a rank that is predicted to fit, 0 if none."""
    peak_reserved_bytes: int
    """Peak of a rank at ``micro_batch``, or at 1 if none fits."""
