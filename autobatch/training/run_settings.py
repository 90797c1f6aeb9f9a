"""Settings of a run on disk: plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from autobatch.training.sinks import Sink


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
