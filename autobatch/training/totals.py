"""Running totals of a training run, and its summary."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autobatch.core.records.training import StepRecord, Training
from autobatch.training.loop import Loop

PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes")


class RunTotals:
    """Totals over the steps of a run, of constant size."""

    def __init__(self) -> None:
        self.first_loss: float | None = None
        self.final_loss: float | None = None
        self.skipped_steps = 0
        self.samples = 0
        self.seconds = 0.0
        self._peaks: dict[str, int | None] = dict.fromkeys(PEAKS)
        self._last_count = 0.0
        """Items of the last batch: the target batch in the unit of the noise scale."""

    def add_earlier(self, row: Mapping[str, Any]) -> None:
        """Add a step from before the resume, as ``metrics.jsonl`` holds it."""
        self._add(row.get("loss"), is_applied=row.get("applied", True))
        self._add_peaks(row)
        self.samples = row.get("samples", self.samples)
        self.seconds += row.get("seconds", 0.0)
        self._last_count = row.get("count", self._last_count)

    def add(self, record: StepRecord) -> None:
        """Add a step of this process."""
        self._add(record.loss, is_applied=record.applied)
        if record.peak_allocated_bytes is not None or record.peak_reserved_bytes is not None:
            self._add_peaks({name: getattr(record, name) for name in PEAKS})
        self.samples = record.samples
        self.seconds += record.seconds
        self._last_count = record.count

    def _add(self, loss: float | None, *, is_applied: bool) -> None:
        self.first_loss = loss if self.first_loss is None else self.first_loss
        self.final_loss = loss if loss is not None else self.final_loss
        self.skipped_steps += not is_applied

    def _add_peaks(self, row: Mapping[str, Any]) -> None:
        for name, before in self._peaks.items():
            known = [size for size in (before, row.get(name)) if size is not None]
            self._peaks[name] = max(known, default=None)

    def summary(
        self,
        loop: Loop,
        *,
        validation: dict[str, float | None],
        checkpoint: Path | None,
        resumed_from: Path | None,
        failed_checkpoints: list[int],
    ) -> Training:
        """Return the summary of a finished run.

        Args:
            loop: the loop at its end.
            validation: the final validation.
            checkpoint: the last checkpoint.
            resumed_from: the checkpoint that the run was resumed from.
            failed_checkpoints: the steps after which no checkpoint could be written.
        """
        average = loop.train_state.average
        noise = loop.noise.estimate()
        return Training(
            optimizer_steps=loop.steps_applied,
            samples=loop.sampler.seen(loop.batches_seen),
            samples_per_s=self.samples / self.seconds if self.seconds else None,
            first_loss=self.first_loss,
            final_loss=self.final_loss,
            oom_recoveries=loop.oom_recoveries,
            resumed_from=None if resumed_from is None else str(resumed_from),
            checkpoint=None if checkpoint is None else str(checkpoint),
            seconds=self.seconds,
            skipped_steps=self.skipped_steps,
            validation=validation,
            noise_scale=noise.noise_scale,
            noise_band=(noise.low, noise.high),
            noise_advice=None if noise.low is None else noise.sentence(round(self._last_count)),
            micro_batch=loop.split.of_longest(loop.micro_batch),
            ema=None if average is None else average.decay,
            failed_checkpoints=failed_checkpoints,
            notes=[],
            phase_seconds=loop.times.totals(self.seconds),
            **self._peaks,
        )
