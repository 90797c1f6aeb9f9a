"""What a run did, added up window by window."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autobatch.records import StepRecord, Training
from autobatch.training.checkpoint import Loaded
from autobatch.training.loop import Loop


class Summary:
    """Running totals of a run; constant in size."""

    def __init__(self) -> None:
        self.first_loss: float | None = None
        self.final_loss: float | None = None
        self.skipped = 0
        self.samples = 0
        self.seconds = 0.0
        self._before = 0
        self._count = 0.0
        """Items of the last window: the target batch in the unit of the noise scale."""

    def recall(self, row: Mapping[str, Any]) -> None:
        """Take in a window that was trained before the run was resumed."""
        loss = row.get("loss")
        self.first_loss = loss if self.first_loss is None else self.first_loss
        self.final_loss = loss if loss is not None else self.final_loss
        self.skipped += not row.get("applied", True)
        self._before = row.get("samples", self._before)

    def add(self, record: StepRecord) -> None:
        """Take in a window."""
        self.first_loss = record.loss if self.first_loss is None else self.first_loss
        self.final_loss = record.loss if record.loss is not None else self.final_loss
        self.skipped += not record.applied
        self.samples = record.samples - self._before
        self.seconds += record.seconds
        self._count = record.count

    def training(
        self,
        loop: Loop,
        validation: dict[str, float | None],
        saved: Path | None,
        resumed: Loaded | None,
        failed_saves: list[int],
    ) -> Training:
        """The summary of a run that came to its end."""
        average = loop.trainee.average
        noise = loop.noise.estimate()
        return Training(
            optimizer_steps=loop.steps_applied,
            samples=loop.course.seen(loop.windows_seen),
            samples_per_s=self.samples / self.seconds if self.seconds else None,
            first_loss=self.first_loss,
            final_loss=self.final_loss,
            oom_recoveries=loop.oom_recoveries,
            resumed_from=None if resumed is None else str(resumed.path),
            checkpoint=None if saved is None else str(saved),
            seconds=self.seconds,
            skipped_windows=self.skipped,
            validation=validation,
            noise_scale=noise.noise_scale,
            noise_band=(noise.low, noise.high),
            noise_advice=None if noise.low is None else noise.sentence(round(self._count)),
            micro_batch=loop.micro_batch,
            ema=None if average is None else average.decay,
            failed_checkpoints=failed_saves,
        )
