"""Training run on disk: the loop with its files, checkpoints, validation and signals.

OUT/checkpoints/step-N/   OUT/metrics.jsonl   OUT/model.safetensors   OUT/model-ema.safetensors   OUT/oom.json
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from autobatch.core.errors import (
    AutobatchError,
    DoesNotFitError,
    InputError,
    Interrupted,
    RestartSmallerError,
)
from autobatch.core.files import read_json, write_atomic
from autobatch.core.progress import Progress
from autobatch.core.records import StepRecord, Training
from autobatch.core.signals import StopRequest, stop_on_signals
from autobatch.device.oom import first_line, memory_named
from autobatch.step.optimizers import averaged_weights, switch
from autobatch.training.checkpoints.checkpoint import list_checkpoints
from autobatch.training.checkpoints.load import Loaded
from autobatch.training.checkpoints.run_checkpoints import RunCheckpoints
from autobatch.training.evaluation import Sums, ValidationBatchSize, evaluate_part, evaluate_shared
from autobatch.training.export import check_exportable, export_weights
from autobatch.training.loop import Loop
from autobatch.training.loop_state import capture_loop, check_checkpoint_state
from autobatch.training.metrics import (
    TENSORBOARD,
    JsonLines,
    MetricsWriter,
    UserSinks,
    open_tensorboard,
    rewind_metrics,
)
from autobatch.training.run_folder import CHECKPOINTS, METRICS, OOM_FILE, RunFiles
from autobatch.training.split_check.check import FirstBatch
from autobatch.workload.rng import preserved_random_state

PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes")


def train(
    loop: Loop,
    files: RunFiles,
    progress: Progress,
    resumed: Loaded | None,
    first_batch: FirstBatch | None = None,
) -> Training:
    """Train the rest of a run, then validate and export the weights.

    Args:
        loop: the loop, at the first batch to train.
        files: what the run writes, and when.
        progress: receives notes and steps.
        resumed: the checkpoint that the loop was restored from; None for a new run.
        first_batch: compares the first batch with its micro-batches; None for no such check.

    Raises:
        Interrupted: a signal stopped the run; a checkpoint was written.
        CheckpointError: a checkpoint or another file could not be written.
        InputError: the workload keeps state that a checkpoint cannot hold.
        AutobatchError: see `Loop.run`.
    """
    files.out.mkdir(parents=True, exist_ok=True)
    sinks = UserSinks([], progress)
    if loop.engine.ranks.rank == 0:
        tensorboard = open_tensorboard(files.out / TENSORBOARD, batches_seen=loop.batches_seen)
        sinks = UserSinks([*([] if tensorboard is None else [tensorboard]), *files.sinks], progress)
    with closing(sinks):
        record = _train(loop, files, progress, resumed, first_batch, sinks)
        sinks.end(record)
    return record


def _train(  # noqa: PLR0917 - the arguments of `train`, and the sinks
    loop: Loop,
    files: RunFiles,
    progress: Progress,
    resumed: Loaded | None,
    first_batch: FirstBatch | None,
    sinks: UserSinks,
) -> Training:
    ranks = loop.engine.ranks
    apply_smaller_micro_batch(loop, files.out, resumed)
    check_checkpoint_state(capture_loop(loop))
    check_exportable(loop.train_state.model)
    totals = RunTotals()
    if resumed is not None:
        if loop.batches_seen == loop.sampler.total:
            progress.note(f"nothing is left to train: all {loop.batches_seen:,} steps of the run are done")
        loop.times.load_state_dict(resumed.facts.get("times", {"sampled": {}, "besides": {}}))
    if ranks.rank == 0:
        rewind_metrics(files.out / METRICS, batches_seen=loop.batches_seen, on_kept=totals.add_earlier)
    run = _Run(loop, files, resumed, sinks)
    records = loop.run() if first_batch is None else first_batch.run(loop)
    try:
        with stop_on_signals() as asked, run.saved_after_oom():
            request = loop.engine.shared_request(asked)
            run.train_batches(records, request, progress, totals)
            progress.doing("validating")
            with loop.times.besides("validation"):
                validation = run.validate(request)
    except Interrupted:
        raise
    except AutobatchError as error:
        if (hint := restart_hint(loop, files, error)) is not None:
            error.add_note(hint)
        raise
    # The run is over: what is exported, and what the caller gets, are the averaged weights.
    switch(loop.train_state.optimizers, train=False)
    progress.doing("writing the weights")
    loop.engine.share(loop.train_state.model.buffers())
    with memory_named("the weights were exported, after the last checkpoint"):
        export_weights(loop.train_state, files.out, loop.engine)
    return totals.summary(
        loop,
        validation=validation,
        checkpoint=run.checkpoints.newest,
        resumed_from=None if resumed is None else resumed.path,
        failed_checkpoints=run.checkpoints.failed_steps,
    )


class _StopRequested(Exception):  # noqa: N818 - an event, not a fault
    """Raised to leave a validation after a signal."""


class _Run:
    """A loop with the folder that it writes to."""

    def __init__(self, loop: Loop, files: RunFiles, resumed: Loaded | None, sinks: UserSinks) -> None:
        self._loop = loop
        self._files = files
        self.checkpoints = RunCheckpoints(loop, files, resumed)
        self._writers: list[MetricsWriter] = [sinks]
        fixed = files.options.train.validation_micro_batch
        # If the meter sees no memory, only the end of the process would stop the growth.
        is_shared = loop.train_state.shared is not None
        grows = fixed is None and not is_shared and loop.meter.stats().allocated_bytes is not None
        largest = min(loop.engine.limits) if is_shared else loop.split.of_longest(loop.micro_batch)
        self._validation_batch_size = ValidationBatchSize(fixed or largest, grows=grows)

    def train_batches(
        self, records: Iterator[StepRecord], request: StopRequest, progress: Progress, totals: RunTotals
    ) -> None:
        """Train the remaining batches, and write a checkpoint at the end.

        After each step come its validation, its record, its checkpoint and the check for a signal. In this
        order the metrics have a line for every batch that a checkpoint holds.
        """
        with self._open_writers():
            for step in records:
                record = step
                try:
                    if self._validation_is_due(step.step):
                        progress.doing("validating")
                        with self._loop.times.besides("validation"):
                            record = msgspec.structs.replace(step, validation=self.validate(request))
                finally:
                    for writer in self._writers:
                        writer.step(record)
                totals.add(record)
                progress.stepped(record, self._loop.sampler.total)
                if self.checkpoints.is_due(record.step):
                    progress.doing("saving a checkpoint")
                    self._flush()
                    self.checkpoints.save_periodic(progress)
                self._stop_if_requested(request)
        progress.doing("saving a checkpoint")
        self.checkpoints.save_if_needed()

    @contextmanager
    def saved_after_oom(self) -> Iterator[None]:
        """Write a checkpoint if memory runs out within the block and the state is that between two steps."""
        try:
            yield
        except (DoesNotFitError, RestartSmallerError) as error:
            # All ranks write a checkpoint together, so one that failed alone must not begin.
            is_alone = self._loop.engine.ranks.world > 1 and not self._loop.has_failed_on_all_ranks
            try:
                if self._loop.is_intact and not is_alone:
                    self.checkpoints.save_if_needed()
            except Exception as failure:  # the error of the run counts, whatever this one is
                step = self._loop.batches_seen
                error.add_note(f"no checkpoint of step {step} could be written: {first_line(failure)}")
            raise

    def validate(self, request: StopRequest) -> dict[str, float | None]:
        """Return the validation metrics, of the averaged weights if there are any.

        The weights and the random states of the training are restored.
        """
        loop, ranks = self._loop, self._loop.engine.ranks
        sums, failure = Sums(), ""

        def poll() -> None:
            if request.is_asked:
                raise _StopRequested

        loop.engine.share(loop.train_state.model.buffers())

        swapped = loop.train_state.averaged()
        switched = averaged_weights(loop.train_state.optimizers)
        try:
            with suppress(_StopRequested), preserved_random_state(), switched, swapped:
                sums = self._evaluate_part(poll)
        except DoesNotFitError as error:
            if loop.train_state.shared is not None:
                raise  # in the middle of a pass of all ranks
            # Other ranks wait for the sums of this one.
            failure = str(error)
        parts = ranks.gather([sums.to_plain(), failure])
        for _, reason in parts:
            if reason:
                raise DoesNotFitError(reason)
        loop.engine.agree_on_request()
        # A checkpoint must hold the random states of the training, which are restored only here.
        self._stop_if_requested(request)
        whole = Sums()
        for plain, _ in parts:
            whole.add_plain(plain)
        return whole.means()

    def _evaluate_part(self, poll: Callable[[], None]) -> Sums:
        """Return the sums over the part of the validation data that this rank takes."""
        loop, ranks = self._loop, self._loop.engine.ranks
        if loop.train_state.shared is not None:
            # One rank alone cannot stop early: the others would wait for it.
            return evaluate_shared(
                loop.workload,
                loop.train_state,
                meter=loop.meter,
                micro_batch=self._validation_batch_size.micro_batch,
                part=(ranks.rank, ranks.world),
            )
        return evaluate_part(
            loop.workload,
            loop.train_state,
            device=loop.device,
            meter=loop.meter,
            batch_size=self._validation_batch_size,
            target_batch=loop.sampler.target_batch,
            poll=poll,
            part=(ranks.rank, ranks.world),
        )

    @contextmanager
    def _open_writers(self) -> Iterator[None]:
        """Open the metrics file beside the sinks; rank 0 alone writes."""
        if self._loop.engine.ranks.rank:
            yield
            return
        lines = JsonLines(self._files.out / METRICS)
        self._writers.append(lines)
        try:
            yield
        finally:
            self._writers.remove(lines)
            lines.close()

    def _flush(self) -> None:
        """Write the metrics of every batch that the next checkpoint holds."""
        for writer in self._writers:
            writer.flush()

    def _validation_is_due(self, step: int) -> bool:
        every = self._files.options.train.validate_every
        return every is not None and step % every == 0 and step != self._loop.sampler.total

    def _stop_if_requested(self, request: StopRequest) -> None:
        """Write a checkpoint and raise if a signal asked to stop."""
        if request.signal_number is None:
            return
        self._flush()
        self.checkpoints.save_if_needed()
        raise Interrupted(
            f"stopped after step {self._loop.batches_seen} of {self._loop.sampler.total} with checkpoint "
            f"{self.checkpoints.newest}. Resume with: {self._files.resume_hint}",
            signal_number=request.counts_as,
        )


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


def restart_hint(loop: Loop, files: RunFiles, error: AutobatchError) -> str | None:
    """Return how to continue after an error; after an out-of-memory error, write the smaller micro-batch."""
    has_checkpoint = bool(list_checkpoints(files.out / CHECKPOINTS))
    if not isinstance(error, RestartSmallerError):
        return f"resume from the newest checkpoint with: {files.resume_hint}" if has_checkpoint else None
    loop.engine.lower(loop.micro_batch)
    content = {
        "batches_seen": loop.batches_seen,
        "micro_batch": loop.micro_batch,
        "limits": loop.engine.limits,
        "error": str(error),
    }
    write_atomic(files.out / OOM_FILE, json.dumps(content, indent=1).encode())
    if has_checkpoint:
        return f"resume in smaller micro-batches with: {files.resume_hint}"
    smaller = loop.split.of_longest(loop.micro_batch)
    return f"there is no checkpoint yet: start again with --max-micro-batch {smaller}"


def apply_smaller_micro_batch(loop: Loop, out: Path, resumed: Loaded | None) -> None:
    """Use the smaller micro-batch of a resumed or restarted run that ended out of memory."""
    ranks, path = loop.engine.ranks, out / OOM_FILE
    if resumed is None and not ranks.restart:
        ranks.once(lambda: path.unlink(missing_ok=True))
        return
    found = ranks.once(lambda: _read_limits(path))
    if ranks.world > 1 and len(found) == ranks.world + 1:
        loop.engine.limits[:] = map(min, loop.engine.limits, found[1:])
        loop.micro_batch = loop.engine.limits[ranks.rank]
    elif ranks.world == 1 and found:
        loop.micro_batch = min(loop.micro_batch, found[0])


def _read_limits(path: Path) -> list[int]:
    """Return the micro-batch that a run left when memory ran out, then those of all ranks; or nothing."""
    try:
        content = read_json(path)
        found = [content["micro_batch"], *content.get("limits", [])]
    except (InputError, KeyError, TypeError, AttributeError):
        return []
    return found if all(isinstance(one, int) and one >= 1 for one in found) else []
