"""Keywords of the library calls besides ``target_batch``, for editors and type checkers.

Each type lists the options of a command that a call accepts, with the plain values that a user may pass. The
options that only change what the command line prints (``json``, ``quiet``, ``verbose``) are left out. A test
compares these types with `autobatch.core.options`, which defines the options and checks their values.
"""

import os
from collections.abc import Sequence
from typing import Literal, TypedDict

from autobatch.core.options import (
    GradientDtypeChoice,
    OptimizerChoice,
    ParallelChoice,
    PrecisionChoice,
    SplitCheck,
    SplitChoice,
    TrackerChoice,
)
from autobatch.core.records import LastBatch, LearningRateRule, ShardSync

StrPath = str | os.PathLike[str]


class CommonKeywords(TypedDict, total=False):
    """Keywords of every call."""

    device: str
    memory_budget: str | int | None
    precision: PrecisionChoice
    gradient_dtype: GradientDtypeChoice
    scan: int | None
    seed: int
    max_micro_batch: int | None
    parallel: ParallelChoice
    shard_sync: ShardSync
    shard_modules: str | None


class EstimateKeywords(CommonKeywords, total=False):
    """Keywords of `autobatch.estimate`."""

    profile: str | Sequence[str]
    all: bool
    micro_batch: int | None
    ranks: int | str | None
    sequence: int | None
    lora: int | None
    optimizer: OptimizerChoice
    checkpointing: bool


class SearchKeywords(CommonKeywords, total=False):
    """Keywords of the calls that search for the largest micro-batch."""

    ranks: int | None
    micro_batch_multiple: Literal["auto"] | int
    time_limit: float | None
    max_grad_norm: float | None
    ema: float | None
    memory_viz: StrPath | None


class ProbeKeywords(SearchKeywords, total=False):
    """Keywords of `autobatch.probe`."""

    micro_batch: int | None


class BatchKeywords(SearchKeywords, total=False):
    """Keywords of the calls that plan a batch."""

    split: SplitChoice
    lr_rule: LearningRateRule
    base_batch: int | None


class PlanKeywords(BatchKeywords, total=False):
    """Keywords of `autobatch.plan`."""

    split_check: SplitCheck | None
    world_size: int | None
    own_loop: bool


class TuneKeywords(BatchKeywords, total=False):
    """Keywords of `autobatch.tune`."""

    trials: int | None
    timeout: float | None
    storage: StrPath | None
    study: str | None
    knobs: str | None
    tune_lr: bool
    lr_trials: int
    lr_steps: int


class FitKeywords(TuneKeywords, total=False):
    """Keywords of `autobatch.fit`."""

    steps: int | None
    epochs: int | None
    last_batch: LastBatch
    checkpoint_every: int | None
    checkpoint_minutes: float | None
    on_failed_save: Literal["stop", "continue"]
    validate_every: int | None
    validation_micro_batch: int | None
    warmup_samples: int | None
    on_nonfinite: Literal["raise", "skip"]
    split_check: SplitCheck | None
    bn_momentum: Literal["keep", "auto"]
    log: TrackerChoice | Sequence[TrackerChoice]
    keep_last: int
    workers: int | None
    prefetch: int | None
    sample_seeds: bool
    collective_timeout: float
    resume: bool
    out: StrPath | None
