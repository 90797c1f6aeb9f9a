"""Records of a plan: the split of a batch over ranks and micro-batches."""

from __future__ import annotations

from typing import Literal

from autobatch.core.records.base import GradientDtype, Parallel, Precision, Record, ShardSync
from autobatch.core.records.probe import RankLimit

LearningRateRule = Literal["none", "linear", "sqrt"]


class SizeCut(Record, frozen=True, kw_only=True):
    """Split by size: each batch is sorted by the sizes of its samples and cut at its own sizes."""

    sizes: list[float]
    """Sizes of samples in ascending order, the last that of the largest."""
    micro_batches: list[int]
    """Largest micro-batch of samples up to each of ``sizes``."""
    limits_by: Literal["longest", "replay", "run"]
    """Source of ``micro_batches``: the limit of the longest samples for all, replays, or runs per size."""
    padding_by_count: float | None = None
    """Padded ÷ real size of a split by count, a mean over batches of the run."""
    padding: float | None = None
    """Padded ÷ real size of this split."""
    steps_by_count: float | None = None
    """Micro-batches of a batch that is split by count."""
    steps: float | None = None
    """Micro-batches of a batch in this split, a mean over batches of the run."""
    digest: str = ""
    """Digest of the sizes of all samples."""
    is_padded: bool = True
    """True if a micro-batch is padded to its largest sample. False if samples are joined end to end, as
    graphs are: then the mean size of a micro-batch decides on its memory."""
    by_size_of: bool = False
    """True if the sizes come from the workload's ``size_of``, False if they count the numbers in a sample."""
    replayed_batches: int | None = None
    """Batches of the run that fit in a replay of this split; None if the step cannot be traced."""


class RunOrder(Record, frozen=True, kw_only=True):
    """Evidence that a micro-batch fits in the order of one run, though not in every order.

    Samples that are joined end to end, as graphs are, take memory by the sum of their sizes, and the largest
    ones never share a micro-batch of this run.
    """

    batches: int
    """Batches of the run, all of which were looked at."""
    by: Literal["replay", "run"]
    """The heaviest of them were run. ``replay`` if hundreds were replayed in a model of the allocator too."""
    micro_batch_in_any_order: int
    """Micro-batch that the largest samples together allow."""
    digest: str = ""
    """Digest of the sizes of all samples."""


class RankPlan(RankLimit, frozen=True, kw_only=True):
    """The part of a plan that one rank runs."""

    samples: int
    """Samples of a full batch that this rank takes."""
    micro_batches: list[int]


class Plan(Record, frozen=True, kw_only=True):
    """A split of exactly ``target_batch`` samples per optimizer step over ranks and micro-batches.

    ``micro_batches`` are the sizes that one rank runs, in order. They differ by at most one, and their sum
    over the ranks is the target batch. If ``size_cut`` is set, each batch is cut at its own sizes instead.
    """

    target_batch: int
    effective_batch: int
    world_size: int
    micro_batch: int
    accumulation_steps: int
    micro_batches: list[int]
    multiple: int = 1
    """Number whose multiples all micro-batches are."""
    base_batch: int | None
    learning_rate: float
    learning_rate_rule: Literal["none", "linear", "sqrt", "tuned"]
    """The rule, or ``tuned`` if the tuner found the learning rate."""
    learning_rate_factor: float = 1.0
    learning_rate_source: str = ""
    precision: Precision = "fp32"
    gradient_dtype: GradientDtype = "fp32"
    last_batch: Literal["carry", "flush", "drop"] = "carry"
    knobs: dict[str, str | int | float | bool | None] = {}
    """Other choices of the tuner, by the name of the knob."""
    split: Literal["count", "size"] = "count"
    """``count`` splits a batch into equal counts, ``size`` by the sizes of its samples."""
    size_cut: SizeCut | None = None
    """Rule of the split by size; None if batches are split by count."""
    run_order: RunOrder | None = None
    """Evidence for a micro-batch that fits in the order of this run; None if it fits in any order."""
    ranks: list[RankPlan] = []
    """The part of each rank, if several train; ``micro_batches`` are those of rank 0."""
    parallel: Parallel | None = None
    """``replicate`` if each rank has a whole model, ``shard`` if the ranks share it; None for one rank."""
    parallel_reason: str | None = None
    """The reason for it; None if it was asked for."""
    shard_sync: ShardSync | None = None
    """Reduction of sharded gradients: after ``each`` micro-batch, or ``once`` per step; None if none are."""
    shard_sync_reason: str | None = None
    """The reason for it; None if it was asked for."""
    shard_modules: str | None = None
    """Regular expression for the modules that are gathered one at a time; None for the repeated blocks."""
