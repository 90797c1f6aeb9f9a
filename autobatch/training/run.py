"""A training run on the disk: the loop, with what it writes and the signals it obeys.

OUT/checkpoints/step-N/   OUT/metrics.jsonl   OUT/model.safetensors
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from autobatch.errors import AutobatchError, CheckpointError, Interrupted
from autobatch.files import write_atomic
from autobatch.progress import Progress
from autobatch.records import StepRecord, Training
from autobatch.training.checkpoint import Loaded, save_checkpoint
from autobatch.training.evaluation import evaluate
from autobatch.training.loop import Loop
from autobatch.training.signals import StopRequest, stop_on_signals

CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What a run writes, and when."""

    out: Path
    checkpoint_every: int | None
    keep_last: int
    facts: Mapping[str, Any]
    """Stored beside every checkpoint."""
    resume_hint: str
    """The command that goes on from here."""


def train(loop: Loop, settings: RunSettings, progress: Progress, resumed: Loaded | None) -> Training:
    """Train what is left of a run, then validate and export the weights.

    Raises:
        Interrupted: a signal came; a checkpoint was written.
        CheckpointError: a checkpoint could not be written.
        AutobatchError: see `Loop.run`.
    """
    settings.out.mkdir(parents=True, exist_ok=True)
    metrics = settings.out / METRICS
    rows = _rewind(metrics, loop.windows_seen)
    tally = _Summary(rows)
    saved: Path | None = None if resumed is None else resumed.path
    with stop_on_signals() as request, metrics.open("a", encoding="utf-8") as log:
        try:
            for record in loop.run():
                log.write(msgspec.json.encode(record).decode() + "\n")
                log.flush()
                tally.add(record)
                progress.stepped(record, loop.course.total)
                if request.signal_number is not None:
                    _stop(loop, settings, request, resumed)
                if settings.checkpoint_every and record.step % settings.checkpoint_every == 0:
                    saved = _save(loop, settings, resumed)
        except AutobatchError as error:
            error.add_note(f"go on from the newest checkpoint with: {settings.resume_hint}")
            raise
        if saved is None or loop.windows_seen != _step_of(saved):
            saved = _save(loop, settings, resumed)
        validation = evaluate(loop.workload, loop.trainee, micro_batch=loop.micro_batch)
    export_weights(loop.trainee.model, settings.out / WEIGHTS)
    return tally.training(loop, validation, saved, resumed)


def export_weights(model: torch.nn.Module, path: Path) -> None:
    """Write the weights as safetensors; parameters that are tied are stored once.

    Raises:
        CheckpointError: the file cannot be written.
    """
    from safetensors.torch import save_model

    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        save_model(model, str(temporary))
        temporary.replace(path)
    except Exception as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
            raise CheckpointError(
                f"the weights could not be written to {path}: {error}; the checkpoints hold them all the same"
            ) from error
        raise


class _Summary:
    """Running totals of a run; constant in size."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.first_loss: float | None = rows[0].get("loss") if rows else None
        self.final_loss: float | None = rows[-1].get("loss") if rows else None
        self.skipped = sum(not row.get("applied", True) for row in rows)
        self.samples = 0
        self.seconds = 0.0
        self._before = rows[-1].get("samples", 0) if rows else 0

    def add(self, record: StepRecord) -> None:
        """Take in a window."""
        self.first_loss = record.loss if self.first_loss is None else self.first_loss
        self.final_loss = record.loss if record.loss is not None else self.final_loss
        self.skipped += not record.applied
        self.samples = record.samples - self._before
        self.seconds += record.seconds

    def training(
        self, loop: Loop, validation: dict[str, float], saved: Path | None, resumed: Loaded | None
    ) -> Training:
        """The summary of a run that came to its end."""
        return Training(
            optimizer_steps=loop.steps_applied,
            samples=loop.course.seen(loop.windows_seen),
            samples_per_s=self.samples / self.seconds if self.seconds else 0.0,
            first_loss=self.first_loss,
            final_loss=self.final_loss,
            oom_recoveries=loop.oom_recoveries,
            resumed_from=None if resumed is None else str(resumed.path),
            checkpoint=None if saved is None else str(saved),
            seconds=self.seconds,
            skipped_windows=self.skipped,
            validation=validation,
            micro_batch=loop.micro_batch,
        )


def _save(loop: Loop, settings: RunSettings, resumed: Loaded | None) -> Path:
    return save_checkpoint(
        settings.out / CHECKPOINTS,
        step=loop.windows_seen,
        state=loop.state_dict(),
        facts=settings.facts,
        keep_last=settings.keep_last,
        spare=None if resumed is None else resumed.path,
    )


def _stop(loop: Loop, settings: RunSettings, request: StopRequest, resumed: Loaded | None) -> None:
    path = _save(loop, settings, resumed)
    raise Interrupted(
        f"stopped after step {loop.windows_seen} of {loop.course.total}, checkpoint {path}",
        signal_number=request.signal_number or 0,
    )


def _rewind(path: Path, windows_seen: int) -> list[dict[str, Any]]:
    """Drop the lines of windows that a resumed run will train again; return those that stay."""
    if not path.is_file():
        return []
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            # The last line of a run that was killed while it wrote.
            continue
        if isinstance(row, dict) and row.get("step", windows_seen + 1) <= windows_seen:
            rows.append(row)
    write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
    return rows


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))
