"""Records of every stage; the JSON of the command line has the same names.

A figure that a device cannot give is None, never 0 or -1. Sizes are in bytes, times in seconds, counts in
samples. Nothing here imports torch, so a report can be read anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

SCHEMA = 3
"""Version of the JSON that the command line prints."""
Precision = Literal["fp32", "bf16", "fp16"]
GradientDtype = Literal["fp32", "weights"]
"""Type in which gradients are summed: float32 at least, or that of the weights."""
Parallel = Literal["replicate", "shard"]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Value = str | int | float | bool | None
Configuration = Mapping[str, Value]
"""Value of each knob of the tuner, by name; a knob that is missing has its default."""
SPLIT = "micro_batch_shift"
"""Times that the micro-batch is halved: the largest that fits is not always the fastest."""
PRECISION = "precision"
CHECKPOINTING = "checkpointing"
"""No choice of the tuner: `autobatch.estimates` says what would fit with it."""
COMPILE = "compile"
CHANNELS_LAST = "channels_last"
OPTIMIZER = "optimizer"
LOADER_WORKERS = "loader_workers"
KNOBS = (SPLIT, PRECISION, COMPILE, CHANNELS_LAST, OPTIMIZER, LOADER_WORKERS)
"""Knobs that can be tuned. `autobatch.tuning.fastest` has their choices. `autobatch.step.apply_knobs` applies
them to a model and its optimizer, in the same way for a probe, a trial and the training that follows."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all records: immutable, keyword-only, serialized under the field names."""


class OfRanks(Record, frozen=True, kw_only=True):
    """Figures of one rank: the least of all ranks, one per GPU."""

    world_size: Positive = 1
    """Number of ranks."""
    parallel: Parallel | None = None
    """``replicate`` if each rank has a whole model, ``shard`` if the ranks share it; None for one rank."""
    parallel_reason: str | None = None
    """The reason for it; None if it was asked for."""


class MemoryHolder(Record, frozen=True, kw_only=True):
    """Process that holds memory of the device."""

    pid: int | None
    """Process id as the driver sees it (the host's, in a container); None if unknown."""
    name: str | None
    used_bytes: int | None


class DeviceRecord(Record, frozen=True, kw_only=True):
    """The device and its memory budget."""

    kind: str
    """``cuda``, ``cpu`` or ``sim``."""
    name: str
    total_bytes: int
    budget_bytes: int
    """Bytes the allocator may hold."""
    budget_source: str
    """Origin of the budget, in words."""
    other_processes_bytes: int | None = None
    holders: list[MemoryHolder] = []
    notes: list[str] = []
    """Remarks on these figures, one per line."""


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
    reason: str | None = None
    """Reason why it does not fit: the first line of the error, or the rule that it broke."""
    phase: str | None = None
    """Phase of the step that failed: ``setup``, ``forward``, ``loss``, ``backward`` or ``optimizer``."""
    is_error: bool = False
    """True if it failed for another reason than memory, above a size that fits."""
    is_below_budget: bool = False
    """True if something else than the budget refused memory: what was held and asked for are below it."""


class Probe(OfRanks, frozen=True, kw_only=True):
    """The largest micro-batch that fits, and how it was found."""

    micro_batch: int
    limited_by: LimitedBy
    upper_bound_by: UpperBoundBy | None
    """Evidence that the next size does not fit, ``error`` if it fails otherwise; None if nothing fits."""
    predicted_micro_batch: int | None
    oom_count: int
    attempts: list[Attempt]
    source: str = "search"
    """``search``, ``saved DATE`` if one run confirmed a saved limit, or ``asked`` if only this size ran."""
    multiple: int = 1
    """Number whose multiples all micro-batches are."""
    precision: Precision | None = None
    """Precision of the attempts; None if unknown."""
    micro_batch_alone: int | None = None
    """Largest micro-batch of the longest samples alone, if batches of the run were tried too; else None."""


LearningRateRule = Literal["none", "linear", "sqrt"]


class SizeCut(Record, frozen=True, kw_only=True):
    """Split by size: no micro-batch is larger after padding than ``micro_batch`` × ``longest``."""

    longest: float
    """Size of the longest sample of the data."""
    micro_batch: Positive
    """Largest micro-batch of the longest samples."""
    max_micro_batch: Positive
    """Largest micro-batch of samples of any size."""
    digest: str = ""
    """Digest of the sizes of all samples."""


class Plan(OfRanks, frozen=True, kw_only=True):
    """A split of exactly ``target_batch`` samples per optimizer step over ranks and micro-batches.

    ``micro_batches`` are the sizes that one rank runs, in order, unless ``size_cut`` cuts each batch anew.
    """

    target_batch: Positive
    effective_batch: Positive
    micro_batch: Positive
    accumulation_steps: Positive
    micro_batches: list[Count]
    multiple: Positive = 1
    """Number whose multiples all micro-batches are."""
    base_batch: Positive | None
    learning_rate: Annotated[float, Meta(ge=0.0, le=1e300)]
    """0 for a program that runs as it is, whose rate and precision are its own."""
    learning_rate_rule: Literal["none", "linear", "sqrt", "tuned"]
    """The rule, or ``tuned`` if the tuner found the learning rate."""
    learning_rate_factor: float = 1.0
    learning_rate_source: str = ""
    precision: Precision = "fp32"
    gradient_dtype: GradientDtype = "fp32"
    knobs: dict[str, str | int | float | bool | None] = {}
    """Other choices of the tuner, by the name of the knob."""
    split: Literal["count", "size"] = "count"
    """``count`` splits a batch into equal counts, ``size`` by the sizes of its samples."""
    size_cut: SizeCut | None = None
    """Rule of the split by size; None if batches are split by count."""

    @property
    def largest_micro_batch(self) -> int:
        """The most samples of any micro-batch; a cut by size has them in that of its smallest samples."""
        return self.micro_batch if self.size_cut is None else self.size_cut.max_micro_batch

    @property
    def micro_batch_of_longest(self) -> int:
        """The most samples of a micro-batch that has the longest samples."""
        return self.micro_batch if self.size_cut is None else self.size_cut.micro_batch


class Trial(Record, frozen=True, kw_only=True):
    """One configuration that the tuner measured."""

    number: int
    samples_per_s: float | None = None
    """Throughput at the effective batch; None if it did not run."""
    parameters: dict[str, str | int | float | bool | None] = {}
    micro_batch: int | None = None
    """Micro-batch of the run; None if it did not run."""
    relative: float | None = None
    """Throughput ÷ that of the default, as the median of rounds in turn; None if it did not run."""
    is_faster: bool = False
    """True if it was faster than the best before it beyond the noise."""
    note: str | None = None
    """Reason why it must not be chosen."""


class LrTrial(Record, frozen=True, kw_only=True):
    """One learning rate that was tried in a short run."""

    number: int
    learning_rate: float
    loss: float | None = None
    """Mean over the last quarter of the run; None if it did not train."""
    note: str | None = None
    """Reason why it did not train."""


class LrTuning(Record, frozen=True, kw_only=True):
    """Result of the learning-rate study in short runs."""

    trials: int
    steps: int
    """Optimizer steps per run."""
    default: float
    """Learning rate of the plan before tuning."""
    best: float
    """Learning rate of the plan now: the default, unless another was better beyond the noise."""
    default_loss: float | None
    """Mean over the last quarter of a run; None if it did not train."""
    best_loss: float | None
    history: list[LrTrial] = []
    """Every learning rate that was tried, in order."""
    notes: list[str] = []
    """Remarks on the choice, one per line."""


class Tuning(Record, frozen=True, kw_only=True):
    """Measurements and choice of the tuner."""

    trials: int = 0
    best: dict[str, str | int | float | bool | None] = {}
    changes: dict[str, str | int | float | bool | None] = {}
    """Values of ``best`` that differ from the default."""
    baseline_samples_per_s: float = 0.0
    """Throughput of the default, 0 if it did not run."""
    best_samples_per_s: float = 0.0
    """That times the median ratio of the choice to the default."""
    low: float | None = None
    """Lower bound of that ratio, with a confidence of 98 %; None if the default was kept."""
    study: str = ""
    history: list[Trial] = []
    """Every configuration that was measured, in order."""
    offers: list[str] = []
    """What would be faster but changes numbers, and how to ask for it; one per line."""
    notes: list[str] = []
    """Remarks on the choice, one per line."""
    learning_rate: LrTuning | None = None
    """Result of the learning-rate study; None if it was not asked for."""


class StepRecord(Record, frozen=True, kw_only=True):
    """One step of the run: a line of ``metrics.jsonl``."""

    step: int
    """Batches seen, including this one."""
    applied: bool
    """False if the weights did not change: an overflow, no counted item, or a step that was skipped."""
    samples: int
    """Samples seen so far by the whole run."""
    loss: float | None
    """Mean over the batch; None if no item was counted."""
    terms: dict[str, float | None] = {}
    """Mean of each term that counted items, of a loss that has several; a value is None if not finite."""
    count: float
    """Items that the loss is a mean over."""
    learning_rate: float
    grad_norm: float | None
    micro_batch: int
    accumulation_steps: int
    seconds: float
    """Duration of this step."""
    samples_per_s: float | None = None
    """Throughput of this step."""
    items_per_s: float | None = None
    """Throughput in items that the loss is a mean over, for example tokens."""
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    oom_recoveries: int
    """Recoveries so far."""
    validation: dict[str, float | None] = {}
    """Held-out metrics, if validation ran after this step; a value is None if not finite."""
    recovered: str | None = None
    """Message of the out-of-memory error after which this step ran again, and what is known of its cause."""


class Training(Record, frozen=True, kw_only=True):
    """Summary of the training loop."""

    optimizer_steps: int
    samples: int
    samples_per_s: float | None
    """Over all steps of the run, also those before a resume; None if none of them was timed."""
    first_loss: float | None
    final_loss: float | None
    final_terms: dict[str, float | None] = {}
    """`StepRecord.terms` of the last step that counted any."""
    oom_recoveries: int
    resumed_from: str | None
    checkpoint: str | None
    seconds: float = 0.0
    skipped_steps: int = 0
    validation: dict[str, float | None] = {}
    """Held-out metrics at the end; a value is None if not finite."""
    micro_batch: int | None = None
    """Micro-batch at the end, smaller than the plan's after a recovery."""
    ema: float | None = None
    """Decay of the averaged weights that were validated; None if the weights themselves were."""
    peak_allocated_bytes: int | None = None
    """Largest peak of a step; None if the device does not count it."""
    peak_reserved_bytes: int | None = None
    notes: list[str] = []
    """Findings of the check of the loss, and smaller micro-batches after out of memory."""


class Remedy(Record, frozen=True, kw_only=True):
    """A change that lets a larger micro-batch fit, and its predicted effect; traced, not run."""

    name: str
    """Among ``checkpointing bf16 gradient_dtype fused expandable_segments``, joined by ``+``."""
    advice: str
    """Instruction, in words."""
    micro_batch: int
    """Largest micro-batch that is predicted to fit with the change; 0 if none, though it lowers the peak."""
    peak_bytes: int
    """Peak compared with the budget, at ``micro_batch`` or at 1 if that is 0."""


class Refusal(Record, frozen=True, kw_only=True):
    """A request for memory that a recorded program was refused."""

    asked_bytes: int
    device_free_bytes: int
    """Free on the GPU."""
    allocated_bytes: int
    reserved_bytes: int
    reason: Literal["fragmented", "limited", "full"]
    """``fragmented`` if as much was free, in pieces; ``limited`` if a limit of the process held it back."""


class Recorded(Record, frozen=True, kw_only=True):
    """A program whose memory was recorded once, in a snapshot of torch."""

    file: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    needed_bytes: int
    """The reserved peak, with the request that was refused."""
    expandable_bytes: int
    """The same with expandable segments, by replay."""
    memory: dict[str, int]
    """Live bytes at the peak, or when memory ran out, by the line of the program that took them."""
    fits: dict[str, bool]
    """For each GPU, True if what it needs is within the budget."""
    fits_expandable: dict[str, bool]
    """The same with expandable segments."""
    refused: Refusal | None
    """None if memory did not run out."""


class Estimate(OfRanks, frozen=True, kw_only=True):
    """Prediction of what fits on one GPU."""

    profile: str
    budget_bytes: int
    budget_source: str
    precision: Precision | None = None
    """None for a program that was recorded, in its own precision."""
    micro_batch: int
    """Largest micro-batch that is predicted to fit, 0 if none; or the one that was asked about."""
    micro_batch_low: int
    micro_batch_high: int
    """Upper end of the interval in which the true limit is expected."""
    fits: bool
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    """Peak at ``micro_batch``, or at 1 if none fits."""
    seconds: float = 0.0
    """Duration of the prediction; GPUs that run the same operators share the time of one trace."""
    plan: Plan | None = None
    memory: dict[str, int] = {}
    """Live bytes at the peak, by category; of a recorded program, by the line that took them."""
    modules: dict[str, int] = {}
    """Bytes of activations at the peak, by module."""
    phase: str = ""
    """Phase of the step that contains the peak; empty if unknown."""
    remedies: list[Remedy] | None = None
    """Changes that let more fit, the best first; None if several GPUs were asked about."""


class MemoryCurve(Record, frozen=True):
    """Memory over the events of one optimizer step, by category; all lists are equally long."""

    positions: list[float]
    """Positions in the step, in events of the allocator."""
    categories: dict[str, list[int]]
    """Live bytes by category at each position, drawn from the bottom in this order."""
    phases: dict[str, float] = {}
    """Start of each phase of the step, by name."""
    modules: dict[str, list[int]] = {}
    """Live activations at each position by the part of the model that made them, as in ``categories``."""
    micro_batch: int = 1
    """Samples of the micro-batches."""


class RunRecord(Record, frozen=True, kw_only=True):
    """All records of a run; a stage after the probe that did not run is None or empty."""

    device: DeviceRecord
    probe: Probe
    plan: Plan | None = None
    tuning: Tuning | None = None
    training: Training | None = None
    title: str | None = None
    """Name of the workload."""
    command: str | None = None
    """Command that repeats the run."""
    memory_curve: MemoryCurve | None = None
    """Memory over a step at the limit; None if the step cannot be traced."""
    versions: dict[str, str] = {}
    options: dict[str, str | int | float | bool | list[str] | None] = {}
    """Every option of the run, as it was used."""
    created: str | None = None
    """End of the run: ISO date and time, UTC."""
    checkpoints: list[int] = []
    """Steps of the checkpoints that still exist."""
    metrics: list[StepRecord] = []
    """One record per step, in order; the last one if a step ran again. Not part of the JSON."""
    notes: list[str] = []
    """Remarks on the report itself, one per line. Not part of the JSON."""
