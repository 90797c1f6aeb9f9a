"""Settings of a run: of its loop, and of its files on disk. Plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from autobatch.training.sinks import Sink
from autobatch.workload.order import LastBatch

GradSync = Literal["auto", "overlap", "after"]


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Folder, files and intervals of a run."""

    out: Path
    checkpoint_every: int | None
    """Optimizer steps between two checkpoints; ``None`` for one at the end only."""
    keep_last: int
    resume_hint: str
    """The command that resumes this run."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Stored beside every checkpoint."""
    checkpoint_minutes: float | None = None
    """Minutes between two checkpoints; ``None`` for no such limit."""
    on_failed_save: Literal["stop", "continue"] = "stop"
    """Stop or continue if a periodic checkpoint cannot be written; the last one always stops."""
    validate_every: int | None = None
    """Optimizer steps between two validations; ``None`` for one at the end only."""
    validation_micro_batch: int | None = None
    """Micro-batch of the validation; ``None`` to find what fits."""
    sinks: Sequence[Sink] = ()
    """Receive the records besides the files of the run."""


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """Settings of a training loop: plain values."""

    target_batch: int
    seed: int = 0
    steps: int | None = None
    """Optimizer steps of the run; if both are given, the fewer count."""
    epochs: int | None = None
    last_batch: LastBatch = "carry"
    max_grad_norm: float | None = None
    """None for no clipping."""
    ema: float | None = None
    """Decay of the averaged weights; None for no average."""
    on_nonfinite: Literal["raise", "skip"] = "raise"
    warmup_samples: int | None = None
    """None for no warm-up."""
    bn_momentum: Literal["keep", "auto"] = "keep"
    workers: int | None = None
    """Loader workers; None for what the plan says."""
    prefetch: int | None = None
    """Micro-batches per worker; None for what the plan says."""
    sample_seeds: bool = False
    grad_sync: GradSync = "auto"
    """Engine of several ranks."""
