"""Records of a probe: its attempts, and the largest micro-batch that fits."""

from __future__ import annotations

from typing import Literal

from autobatch.core.records.base import Parallel, Precision, Record, ShardSync

LimitedBy = Literal["memory", "target_batch", "dataset", "max_micro_batch"]
UpperBoundBy = Literal["run", "replay", "cap", "error"]


class Attempt(Record, frozen=True, kw_only=True):
    """One micro-batch that really ran."""

    micro_batch: int
    fits: bool
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    seconds: float
    """Duration of the whole attempt."""
    step_seconds: float | None = None
    """Duration of its last step: two micro-batches in the steady state."""
    reason: str | None = None
    """Reason why it does not fit: the first line of the error, or the rule that it broke."""
    phase: str | None = None
    """Phase of the step that failed: ``setup``, ``forward``, ``loss``, ``backward`` or ``optimizer``."""
    is_error: bool = False
    """True if it failed for another reason than memory, above a size that fits."""
    is_below_budget: bool = False
    """True if memory ran out although all that was held and the request are below the budget: something else
    than the budget refused it."""


class LengthLimit(Record, frozen=True, kw_only=True):
    """Largest micro-batch of samples up to a given size."""

    size: float
    """Size by `size_of`, else the number of elements of a sample."""
    micro_batch: int
    upper_bound_by: UpperBoundBy | None
    """Proof that the next size does not fit; None if the search ended near the limit, without one."""
    padded_size: float = 0.0
    """``size`` × ``micro_batch``: tokens per micro-batch if a size is a number of tokens."""


class RealBatches(Record, frozen=True, kw_only=True):
    """Check of a limit against batches of the run, whose samples differ in size."""

    batches: int
    """Batches, in the order and the split of the run."""
    by: Literal["replay", "run"]
    """Replayed in a model of the allocator, or run."""
    micro_batch_alone: int
    """Largest micro-batch of the most expensive samples alone."""
    is_exact: bool = True
    """False if the replay bounds some allocations from above."""


class RankLimit(Record, frozen=True, kw_only=True):
    """The largest micro-batch of one rank."""

    rank: int
    host: str
    device: str
    kind: int
    """The first rank of the same device and budget; ranks of one kind have one limit."""
    limit: int
    """The largest micro-batch that fits on ranks of this kind."""


class Probe(Record, frozen=True, kw_only=True):
    """The largest micro-batch that fits, and how it was found."""

    micro_batch: int
    limited_by: LimitedBy
    upper_bound_by: UpperBoundBy | None
    """Evidence that the next size does not fit, or ``error`` if it fails for another reason than memory; None
    if the search was stopped before."""
    predicted_micro_batch: int | None
    oom_count: int
    attempts: list[Attempt]
    source: str = "search"
    """``search``, ``saved DATE`` if one run confirmed a cached limit, or ``asked`` if only this size was
    checked."""
    lengths: list[LengthLimit] = []
    """Largest micro-batch of samples up to several sizes, ascending; empty if all samples have one size."""
    size_unit: Literal["tokens"] | None = None
    """``tokens`` if samples are sequences whose sizes count their tokens; None for any other size."""
    multiple: int = 1
    """Micro-batches are multiples of it, because others fail for another reason than memory."""
    memory_variation: float | None = None
    """Share by which the allocations of equal micro-batches differ from draw to draw; None if they do not, or
    if they are not recorded."""
    stopped_by: str | None = None
    """``time limit``, ``interrupt`` or ``lost GPU context`` if the answer is the largest size found before;
    None if complete."""
    other_processes_bytes: int | None = None
    """Bytes of other processes on the GPU at the end; `DeviceRecord` has the figure of the start."""
    precision: Precision | None = None
    """Precision of the attempts; None if unknown."""
    real_batches: RealBatches | None = None
    """Check against real batches; None if samples do not differ in size or the allocator caches nothing."""
    ranks: list[RankLimit] = []
    """The limit of each rank, if several run."""
    parallel: Parallel | None = None
    """``replicate`` if each rank has a whole model, ``shard`` if the ranks share it; None for one rank."""
    parallel_reason: str | None = None
    """The reason for it; None if it was asked for."""
    shard_sync: ShardSync | None = None
    """Reduction of sharded gradients: after ``each`` micro-batch, or ``once`` per step; None if none are."""
    shard_sync_reason: str | None = None
    """The reason for it; None if it was asked for."""
