"""What every part reports: the JSON of the command line is these structures, name for name.

A figure that a device cannot give is ``None``, never 0 or -1. Sizes are bytes, times seconds, counts samples.
Nothing here imports torch, so a report can be read anywhere.
"""

from __future__ import annotations

from typing import Literal

import msgspec

LimitedBy = Literal["memory", "target_batch", "dataset", "max_micro_batch"]


UpperBoundBy = Literal["run", "replay", "cap"]


Precision = Literal["fp32", "bf16", "fp16"]


LearningRateRule = Literal["none", "linear", "sqrt"]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all records: immutable, keyword-only, serialised under the field names."""


class MemoryHolder(Record, frozen=True, kw_only=True):
    """A process that holds memory of the device."""

    pid: int | None
    """Process id as the driver sees it (the host's, inside a container); ``None`` where it cannot be told."""
    name: str | None
    used_bytes: int | None


class DeviceRecord(Record, frozen=True, kw_only=True):
    """The device and what there is to spend on it."""

    kind: str
    """``cuda``, ``cpu`` or ``sim``."""
    name: str
    total_bytes: int
    budget_bytes: int
    """What the allocator may hold."""
    budget_source: str
    """How the budget came about, in words."""
    other_processes_bytes: int | None = None
    holders: list[MemoryHolder] = []
    notes: list[str] = []
    """What a person should know of these figures, a line each."""


class Attempt(Record, frozen=True, kw_only=True):
    """One micro-batch that really ran."""

    micro_batch: int
    fits: bool
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    seconds: float
    """Of the whole attempt."""
    step_seconds: float | None = None
    """Of its last window, two micro-batches in the steady state."""
    reason: str | None = None
    """Why it does not fit: the first line of the error, or the rule that it broke."""
    phase: str | None = None
    """Where in the step it failed: ``setup``, ``forward``, ``loss``, ``backward`` or ``optimizer``."""


class LengthLimit(Record, frozen=True, kw_only=True):
    """What fits of samples that cost no more than a given size."""

    size: float
    """As `size_of` gives it, else the elements of a sample."""
    micro_batch: int
    upper_bound_by: UpperBoundBy | None


class Probe(Record, frozen=True, kw_only=True):
    """The largest micro-batch that fits, and how it was found."""

    micro_batch: int
    limited_by: LimitedBy
    upper_bound_by: UpperBoundBy | None
    """What shows that the next size does not fit; ``None`` where the search was stopped before that."""
    predicted_micro_batch: int | None
    oom_count: int
    attempts: list[Attempt]
    source: str = "search"
    """``search``; ``saved DATE`` where an earlier answer was confirmed by one run; ``asked`` where only this
    size was asked about."""
    lengths: list[LengthLimit] = []
    """Where the samples differ in size: the largest micro-batch for each quartile of the sizes."""
    stopped_by: str | None = None
    """``time limit`` or ``interrupt``, where the best certified size so far is the answer."""
    other_processes_bytes: int | None = None
    """Held by others on the card when it was over; the device's own figure is from before."""


class Plan(Record, frozen=True, kw_only=True):
    """Exactly ``target_batch`` samples an optimizer step, split over the ranks and over micro-batches.

    ``micro_batches`` are the sizes that one rank runs, in order; they differ by at most one and their sum
    over the ranks is the target batch.
    """

    target_batch: int
    effective_batch: int
    world_size: int
    micro_batch: int
    accumulation_steps: int
    micro_batches: list[int]
    base_batch: int | None
    learning_rate: float
    learning_rate_rule: Literal["none", "linear", "sqrt", "tuned"]
    """A rule, or ``tuned``: found by the tuner."""
    learning_rate_factor: float = 1.0
    learning_rate_source: str = ""
    precision: Precision = "fp32"
    last_batch: Literal["carry", "flush", "drop"] = "carry"
    knobs: dict[str, str | int | float | bool | None] = {}
    """What the tuner chose besides, by the knob's name."""


class Trial(Record, frozen=True, kw_only=True):
    """One configuration that the tuner measured."""

    number: int
    samples_per_s: float | None
    """At the effective batch; ``None`` where nothing was measured."""
    feasible: bool = True
    """Whether it ran inside the budget."""
    parameters: dict[str, str | int | float | bool | None] = {}
    micro_batch: int | None = None
    """That it ran at; ``None`` where it did not run."""
    note: str | None = None
    """Why it is not feasible, or where its figure comes from."""


class LrTrial(Record, frozen=True, kw_only=True):
    """One learning rate that was tried in a short run."""

    number: int
    learning_rate: float
    loss: float | None
    """Mean over the last quarter of the run, or of as much of it as there was; ``None``: not finite."""
    feasible: bool = True
    """Whether it trained to the end of the run."""
    note: str | None = None
    """Why it is not feasible."""


class LrComparison(Record, frozen=True, kw_only=True):
    """The default learning rate and the best of the trials on the same data."""

    seed: int
    """Of the data."""
    default_loss: float | None
    other_loss: float | None
    gain: float
    """What the other gained over the default, as a share of the fall of its loss: at most 1, which also
    stands against a default that does not train; at least -1, which also stands for one that does not."""


class LrTuning(Record, frozen=True, kw_only=True):
    """What was found of the learning rate in short runs."""

    trials: int
    steps: int
    """Optimizer steps of a run."""
    default: float
    """The learning rate that the plan had."""
    best: float
    """That of the plan now: the default, unless another was better beyond the noise."""
    default_loss: float | None
    """Mean over the last quarter of a run; ``None`` where it was not run, or is not finite."""
    best_loss: float | None
    study: str
    history: list[LrTrial] = []
    """Every learning rate that was tried, in order."""
    pairs: list[LrComparison] = []
    """What decided."""
    sampler: str = ""
    """Who chose what to try, in words."""
    seconds: float = 0.0
    notes: list[str] = []
    """What a person should know of the choice, a line each."""


class Tuning(Record, frozen=True, kw_only=True):
    """What the tuner measured and chose."""

    trials: int
    best: dict[str, str | int | float | bool | None]
    baseline_samples_per_s: float
    best_samples_per_s: float
    study: str
    history: list[Trial] = []
    """Every configuration that was measured, in order."""
    importance: dict[str, float] = {}
    """How much each knob mattered, by its name; shares that sum to one."""
    sampler: str = ""
    """Who chose what to try, in words."""
    seconds: float = 0.0
    """Of the whole search, the comparison of the best with the default included."""
    sampler_seconds: float = 0.0
    """What choosing and keeping the trials took of it."""
    notes: list[str] = []
    """What a person should know of the choice, a line each."""
    learning_rate: LrTuning | None = None
    """What was found of the learning rate, where that was asked for."""


class StepRecord(Record, frozen=True, kw_only=True):
    """One window of the run: a line of ``metrics.jsonl``."""

    step: int
    """Windows seen, this one included."""
    applied: bool
    """False where the window took no optimizer step (overflow of the loss scale, nothing counted, or a
    loss or gradient that is not finite and was skipped)."""
    samples: int
    """Samples seen by the whole run so far."""
    loss: float | None
    """Mean over the window; ``None`` where it counted nothing."""
    count: float
    """Items that the loss is a mean over."""
    learning_rate: float
    grad_norm: float | None
    micro_batch: int
    accumulation_steps: int
    seconds: float
    """Of this window alone."""
    samples_per_s: float | None = None
    """Of this window alone."""
    items_per_s: float | None = None
    """What the loss is a mean over: tokens that count, say; samples where it counts nothing else."""
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    oom_recoveries: int
    """So far."""
    validation: dict[str, float | None] = {}
    """Held-out figures, where this step was one to validate after; ``None``: not finite."""
    recovered: str | None = None
    """What an out-of-memory error said, where this window was run again in smaller micro-batches."""


class Training(Record, frozen=True, kw_only=True):
    """What the training loop did."""

    optimizer_steps: int
    samples: int
    samples_per_s: float | None
    """``None`` where a resume found nothing left to train."""
    first_loss: float | None
    final_loss: float | None
    oom_recoveries: int
    resumed_from: str | None
    checkpoint: str | None
    seconds: float = 0.0
    skipped_steps: int = 0
    validation: dict[str, float | None] = {}
    """Held-out figures at the end; ``None``: not finite."""
    noise_scale: float | None = None
    """Gradient noise scale, in what the loss is a mean over; ``None``: not known."""
    noise_band: tuple[float | None, float | None] = (None, None)
    """Its 95 % band; an upper end that is not known is ``None``."""
    noise_advice: str | None = None
    """What it says of the target batch, in a sentence."""
    micro_batch: int | None = None
    """The micro-batch at the end: smaller than the plan's after a recovery."""
    ema: float | None = None
    """Decay of the averaged weights, which the validation figures are of; ``None``: of the weights."""
    failed_checkpoints: list[int] = []
    """Steps after which no checkpoint could be written, where the run went on all the same."""


class PredictedPoint(Record, frozen=True):
    """What the footprint predicts for a micro-batch, before it ran."""

    micro_batch: int
    peak_reserved_bytes: int
    """Held against the budget; live bytes where no allocator reserves."""


class MemoryCurve(Record, frozen=True):
    """Memory over the events of one optimizer step, by category; all lists are equally long."""

    positions: list[float]
    """Where in the step, in the unit of ``axis``."""
    categories: dict[str, list[int]]
    """Live bytes by category at each position; drawn from the bottom in this order."""
    axis: str = "allocation event"
    phases: dict[str, float] = {}
    """Where each phase of the step begins, by its name."""


class Remedy(Record, frozen=True, kw_only=True):
    """A change that lets a larger micro-batch fit, and what it would give: traced, not run."""

    name: str
    """``checkpointing``, ``bf16``, ``fused`` or ``expandable_segments``."""
    advice: str
    """What to do, in words."""
    micro_batch: int
    """The largest that is predicted to fit with it; 0: none, but one takes less."""
    peak_bytes: int
    """What is held against the budget at that micro-batch (at 1, if that is 0)."""


class RunRecord(Record, frozen=True, kw_only=True):
    """All that is known of a run; a part that did not run is ``None`` or empty."""

    device: DeviceRecord
    probe: Probe | None = None
    plan: Plan | None = None
    tuning: Tuning | None = None
    training: Training | None = None
    title: str | None = None
    """The workload's name."""
    command: str | None = None
    """What repeats the run."""
    predicted: list[PredictedPoint] = []
    """Peaks around the answer as they were predicted; empty where an earlier answer was confirmed."""
    memory_curve: MemoryCurve | None = None
    """Where the memory goes over a step at the answer, likewise."""
    versions: dict[str, str] = {}
    created: str | None = None
    """When the run ended: ISO date and time, UTC."""
    checkpoints: list[int] = []
    """Windows after which a checkpoint was written, as far as they are kept."""
    metrics: list[StepRecord] = []
    """One for each window, in order; of windows that ran again the last one counts. Not part of the JSON."""
    notes: list[str] = []
    """What a person should know of the report itself, a line each. Not part of the JSON."""


class Estimate(Record, frozen=True, kw_only=True):
    """What is predicted to fit on one card."""

    profile: str
    budget_bytes: int
    budget_source: str
    precision: Precision
    micro_batch: int
    """The largest that is predicted to fit, 0 where none is; or the one that was asked about."""
    micro_batch_low: int
    micro_batch_high: int
    """The interval in which the truth is expected."""
    fits: bool
    peak_allocated_bytes: int
    """At ``micro_batch``; at 1 where none fits."""
    peak_reserved_bytes: int | None
    seconds: float
    """What the prediction took; cards that run the same operators share the time of one trace."""
    plan: Plan | None
    retries: int | None
    """Allocations that would succeed only after cached memory was given back: each is a stall."""
    memory: dict[str, int]
    """Live bytes at the peak, by what they are for."""
    modules: dict[str, int]
    """Bytes of activations at the peak, by module."""
    phase: str
    """The phase of the step that the peak lies in."""
    remedies: list[Remedy] | None = None
    """What would let more fit, the best first; ``None`` where several cards were asked about."""
