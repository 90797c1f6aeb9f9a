"""A training run on the disk: the loop, with what it writes and the signals it obeys.

OUT/checkpoints/step-N/   OUT/metrics.jsonl   OUT/model.safetensors   OUT/model-ema.safetensors   OUT/oom.json
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from autobatch.core.errors import AutobatchError, CheckpointError, Interrupted, RestartSmallerError
from autobatch.core.files import write_atomic
from autobatch.core.progress import Progress
from autobatch.core.records import StepRecord, Training
from autobatch.core.signals import StopRequest, stop_on_signals
from autobatch.training.checkpoint import Loaded, list_checkpoints, save_checkpoint
from autobatch.training.evaluation import ValidationBatchSize, evaluate
from autobatch.training.loop import Loop
from autobatch.training.loop_state import capture_loop, check_storable
from autobatch.training.metrics import TENSORBOARD, JsonLines, MetricsWriter, open_tensorboard
from autobatch.training.run_folder import CHECKPOINTS, METRICS, export_weights
from autobatch.workload.rng import preserved_random_state


class RunTotals:
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

    def lookup(self, row: Mapping[str, Any]) -> None:
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
        average = loop.train_state.average
        noise = loop.noise.estimate()
        return Training(
            optimizer_steps=loop.steps_applied,
            samples=loop.sampler.seen(loop.batches_seen),
            samples_per_s=self.samples / self.seconds if self.seconds else None,
            first_loss=self.first_loss,
            final_loss=self.final_loss,
            oom_recoveries=loop.oom_recoveries,
            resumed_from=None if resumed is None else str(resumed.path),
            checkpoint=None if saved is None else str(saved),
            seconds=self.seconds,
            skipped_steps=self.skipped,
            validation=validation,
            noise_scale=noise.noise_scale,
            noise_band=(noise.low, noise.high),
            noise_advice=None if noise.low is None else noise.sentence(round(self._count)),
            micro_batch=loop.micro_batch,
            ema=None if average is None else average.decay,
            failed_checkpoints=failed_saves,
        )


SHRINKING = "oom.json"
"""Left by a run that ended out of memory: the micro-batch to go on with."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What a run writes, and when."""

    out: Path
    checkpoint_every: int | None
    """Optimizer steps between two checkpoints."""
    keep_last: int
    resume_hint: str
    """The command that continues from here."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Stored beside every checkpoint."""
    checkpoint_minutes: float | None = None
    """Minutes between two checkpoints."""
    on_failed_save: Literal["stop", "continue"] = "stop"
    """What a checkpoint between two steps is that cannot be written; one at the end or on a signal stops."""
    validate_every: int | None = None
    """Optimizer steps between two validations."""
    validation_micro_batch: int | None = None
    """Samples at a time in validation; ``None``: found while it runs."""


def train(loop: Loop, settings: RunSettings, progress: Progress, resumed: Loaded | None) -> Training:
    """Train what is left of a run, then validate and export the weights.

    Raises:
        Interrupted: a signal came; a checkpoint was written.
        CheckpointError: a checkpoint could not be written.
        InputError: the workload keeps state that no checkpoint can hold.
        AutobatchError: see `Loop.run`.
    """
    settings.out.mkdir(parents=True, exist_ok=True)
    _take_over_shrinking(loop, settings.out, resumed)
    check_storable(capture_loop(loop))
    accumulator = RunTotals()
    _rewind(settings.out / METRICS, loop.batches_seen, accumulator)
    run = _Run(loop, settings, resumed)
    try:
        with stop_on_signals() as request:
            run.train_batches(request, progress, accumulator)
            validation = run.validate(request)
    except Interrupted:
        raise
    except RestartSmallerError as error:
        content = {"batches_seen": loop.batches_seen, "micro_batch": loop.micro_batch, "error": str(error)}
        write_atomic(settings.out / SHRINKING, json.dumps(content, indent=1).encode())
        if list_checkpoints(settings.out / CHECKPOINTS):
            error.add_note(f"go on in smaller micro-batches with: {settings.resume_hint}")
        else:
            error.add_note(
                f"there is no checkpoint yet: start again with --max-micro-batch {loop.micro_batch}"
            )
        raise
    except AutobatchError as error:
        if list_checkpoints(settings.out / CHECKPOINTS):
            error.add_note(f"go on from the newest checkpoint with: {settings.resume_hint}")
        raise
    export_weights(loop.train_state, settings.out)
    return accumulator.training(loop, validation, run.saved, resumed, run.failed_saves)


class _Asked(Exception):  # noqa: N818 - an event, not a fault
    """A signal came while validating."""


class _Run:
    """A loop with the folder that it writes to."""

    def __init__(self, loop: Loop, settings: RunSettings, resumed: Loaded | None) -> None:
        self._loop = loop
        self._settings = settings
        self._spare = None if resumed is None else resumed.path
        self.saved = self._spare
        """The last checkpoint."""
        self._saved_at = loop.clock()
        self.failed_saves: list[int] = []
        """Steps after which no checkpoint could be written."""
        fixed = settings.validation_micro_batch
        # Where no meter sees the memory, nothing but the end of the process would stop the growth.
        grows = fixed is None and loop.meter.stats().allocated_bytes is not None
        self._reach = ValidationBatchSize(fixed or loop.micro_batch, grows=grows)

    def train_batches(self, request: StopRequest, progress: Progress, accumulator: RunTotals) -> None:
        """Train the windows that are left, with a checkpoint at the end.

        After each: validation, its record, a checkpoint, and only then the vote on a signal. The record comes
        first, so that a resume finds a line for every window that the checkpoint holds.
        """
        with self._sinks() as sinks:
            for step in self._loop.run():
                record = step
                try:
                    if self._validation_is_due(step.step):
                        record = msgspec.structs.replace(step, validation=self.validate(request))
                finally:
                    for sink in sinks:
                        sink.step(record)
                accumulator.add(record)
                progress.stepped(record, self._loop.sampler.total)
                if self._checkpoint_is_due(record.step):
                    self._save_periodically(progress)
                self.stop_if_asked(request)
        if self.saved is None or self._loop.batches_seen != _step_of(self.saved):
            self._save()

    def validate(self, request: StopRequest) -> dict[str, float | None]:
        """Held-out figures, of the averaged weights where an average is kept (`Training.ema` says so).

        The random states of the training are left alone, and its very weights come back.
        """
        loop = self._loop
        figures: dict[str, float | None] = {}

        def poll() -> None:
            if request.signal_number is not None:
                raise _Asked

        average = loop.train_state.average
        swapped = nullcontext() if average is None else average.swapped_in()
        with suppress(_Asked), preserved_random_state(), swapped:
            figures = evaluate(
                loop.workload,
                loop.train_state,
                device=loop.device,
                meter=loop.meter,
                reach=self._reach,
                window=loop.sampler.target_batch,
                poll=poll,
            )
        # Only now are the random states those that a checkpoint must hold.
        self.stop_if_asked(request)
        return figures

    @contextmanager
    def _sinks(self) -> Iterator[list[MetricsWriter]]:
        """Where the records go: the file of lines, and TensorBoard where it is installed."""
        out, seen = self._settings.out, self._loop.batches_seen
        sinks: list[MetricsWriter] = [JsonLines(out / METRICS)]
        board = open_tensorboard(out / TENSORBOARD, batches_seen=seen)
        if board is not None:
            sinks.append(board)
        try:
            yield sinks
        finally:
            for sink in sinks:
                sink.close()

    def _validation_is_due(self, step: int) -> bool:
        every = self._settings.validate_every
        return every is not None and step % every == 0 and step != self._loop.sampler.total

    def _checkpoint_is_due(self, step: int) -> bool:
        every, minutes = self._settings.checkpoint_every, self._settings.checkpoint_minutes
        if every and step % every == 0:
            return True
        return minutes is not None and self._loop.clock() - self._saved_at > 60 * minutes

    def stop_if_asked(self, request: StopRequest) -> None:
        """Leave once a signal has come; what was trained is in a checkpoint."""
        if request.signal_number is None:
            return
        if self.saved is None or self._loop.batches_seen != _step_of(self.saved):
            self._save()
        raise Interrupted(
            f"stopped after step {self._loop.batches_seen} of {self._loop.sampler.total} with checkpoint "
            f"{self.saved}; go on with: {self._settings.resume_hint}",
            signal_number=request.counts_as,
        )

    def _save_periodically(self, progress: Progress) -> None:
        """Save; where the run may go on without, the next checkpoint that is due tries again."""
        try:
            self._save()
        except CheckpointError as error:
            if self._settings.on_failed_save == "stop":
                raise
            self.failed_saves.append(self._loop.batches_seen)
            self._saved_at = self._loop.clock()
            progress.note(f"{error}; the run goes on without it (--on-failed-save continue)")

    def _save(self) -> None:
        state = capture_loop(self._loop)
        check_storable(state)
        self.saved = save_checkpoint(
            self._settings.out / CHECKPOINTS,
            step=self._loop.batches_seen,
            state=state,
            facts=self._settings.facts,
            keep_last=self._settings.keep_last,
            spare=self._spare,
        )
        self._saved_at = self._loop.clock()
        # The smaller micro-batch stands in the checkpoint from now on.
        (self._settings.out / SHRINKING).unlink(missing_ok=True)


def _take_over_shrinking(loop: Loop, out: Path, resumed: Loaded | None) -> None:
    """Start with the smaller micro-batch that a run asked for which ended out of memory."""
    path = out / SHRINKING
    if resumed is None:
        path.unlink(missing_ok=True)
        return
    try:
        wanted = json.loads(path.read_bytes())["micro_batch"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if isinstance(wanted, int) and wanted >= 1:
        loop.micro_batch = min(loop.micro_batch, wanted)


def _rewind(path: Path, batches_seen: int, accumulator: RunTotals) -> None:
    """Drop the lines of windows that a resumed run will train again; add up those that stay."""
    if not path.is_file():
        return
    kept: list[bytes] = []
    with path.open("rb") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                # The last line of a run that was killed while it wrote.
                continue
            if isinstance(row, dict) and row.get("step", batches_seen + 1) <= batches_seen:
                accumulator.lookup(row)
                kept.append(line.rstrip(b"\n") + b"\n")
    write_atomic(path, b"".join(kept))


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))
