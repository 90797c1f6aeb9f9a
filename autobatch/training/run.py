"""Training run on disk: the loop with its files, checkpoints, validation and signals.

OUT/checkpoints/step-N/   OUT/metrics.jsonl   OUT/model.safetensors   OUT/model-ema.safetensors   OUT/oom.json
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from autobatch.core.errors import (
    AutobatchError,
    CheckpointError,
    DoesNotFitError,
    InputError,
    Interrupted,
    RestartSmallerError,
)
from autobatch.core.files import read_json, write_atomic
from autobatch.core.progress import Progress
from autobatch.core.records import StepRecord, Training
from autobatch.core.signals import StopRequest, stop_on_signals
from autobatch.device.oom import first_line, is_oom, memory_named
from autobatch.step.optimizers import averaged_weights, switch
from autobatch.training.checkpoint import Loaded, list_checkpoints, save_checkpoint
from autobatch.training.evaluation import Sums, ValidationBatchSize, evaluate_part
from autobatch.training.export import check_exportable, export_weights
from autobatch.training.loop import Loop
from autobatch.training.loop_state import capture_loop, check_checkpoint_state
from autobatch.training.metrics import (
    TENSORBOARD,
    JsonLines,
    MetricsWriter,
    open_tensorboard,
    rewind_metrics,
)
from autobatch.training.oom_errors import available_host_memory
from autobatch.training.run_folder import CHECKPOINTS, METRICS
from autobatch.training.sinks import Sink, UserSinks
from autobatch.training.totals import RunTotals
from autobatch.training.watch_split import SplitWatch
from autobatch.workload.rng import preserved_random_state

OOM_FILE = "oom.json"
"""Left by a run that ended out of memory: ``batches_seen``, the ``micro_batch`` to resume with, the error."""


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


def train(
    loop: Loop,
    settings: RunSettings,
    progress: Progress,
    resumed: Loaded | None,
    watch: SplitWatch | None = None,
) -> Training:
    """Train the rest of a run, then validate and export the weights.

    Args:
        loop: the loop, at the first batch to train.
        settings: what the run writes, and when.
        progress: receives notes and steps.
        resumed: the checkpoint that the loop was restored from; None for a new run.
        watch: compares the first batches with their parts; None for no such check.

    Raises:
        Interrupted: a signal stopped the run; a checkpoint was written.
        CheckpointError: a checkpoint or another file could not be written.
        InputError: the workload keeps state that a checkpoint cannot hold.
        AutobatchError: see `Loop.run`.
    """
    settings.out.mkdir(parents=True, exist_ok=True)
    sinks = UserSinks([], progress)
    if loop.engine.ranks.rank == 0:
        tensorboard = open_tensorboard(settings.out / TENSORBOARD, batches_seen=loop.batches_seen)
        sinks = UserSinks([*([] if tensorboard is None else [tensorboard]), *settings.sinks], progress)
    with closing(sinks):
        record = _train(loop, settings, progress, resumed, watch, sinks)
        sinks.end(record)
    return record


def _train(  # noqa: PLR0917 - the arguments of `train`, and the sinks
    loop: Loop,
    settings: RunSettings,
    progress: Progress,
    resumed: Loaded | None,
    watch: SplitWatch | None,
    sinks: UserSinks,
) -> Training:
    ranks = loop.engine.ranks
    _apply_smaller_micro_batch(loop, settings.out, resumed)
    check_checkpoint_state(capture_loop(loop))
    check_exportable(loop.train_state.model)
    totals = RunTotals()
    if ranks.rank == 0:
        rewind_metrics(settings.out / METRICS, batches_seen=loop.batches_seen, on_kept=totals.add_earlier)
    run = _Run(loop, settings, resumed, sinks)
    records = loop.run() if watch is None else watch.run(loop)
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
        if (hint := _restart_hint(loop, settings, error)) is not None:
            error.add_note(hint)
        raise
    # The run is over: what is exported, and what the caller gets, are the averaged weights.
    switch(loop.train_state.optimizers, train=False)
    progress.doing("writing the weights")
    loop.engine.share(loop.train_state.model.buffers())
    with memory_named("the weights were exported, after the last checkpoint"):
        ranks.once(lambda: export_weights(loop.train_state, settings.out))
    return totals.summary(
        loop,
        validation=validation,
        checkpoint=run.checkpoint,
        resumed_from=None if resumed is None else resumed.path,
        failed_checkpoints=run.failed_checkpoints,
    )


class _StopRequested(Exception):  # noqa: N818 - an event, not a fault
    """Raised to leave a validation after a signal."""


class _Run:
    """A loop with the folder that it writes to."""

    def __init__(self, loop: Loop, settings: RunSettings, resumed: Loaded | None, sinks: UserSinks) -> None:
        self._loop = loop
        self._settings = settings
        self._resumed_from = None if resumed is None else resumed.path
        self.checkpoint = self._resumed_from
        """The last checkpoint."""
        self._writers: list[MetricsWriter] = [sinks]
        self._saved_at = loop.clock()
        self.failed_checkpoints: list[int] = []
        """Steps after which no checkpoint could be written."""
        fixed = settings.validation_micro_batch
        # If the meter sees no memory, only the end of the process would stop the growth.
        grows = fixed is None and loop.meter.stats().allocated_bytes is not None
        self._validation_batch_size = ValidationBatchSize(
            fixed or loop.split.of_longest(loop.micro_batch), grows=grows
        )

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
                if self._checkpoint_is_due(record.step):
                    progress.doing("saving a checkpoint")
                    self._flush()
                    self._save_periodic(progress)
                self._stop_if_requested(request)
        progress.doing("saving a checkpoint")
        self._save_if_needed()

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
                    self._save_if_needed()
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

        average = loop.train_state.average
        swapped = nullcontext() if average is None else average.swapped_in()
        switched = averaged_weights(loop.train_state.optimizers)
        try:
            with suppress(_StopRequested), preserved_random_state(), switched, swapped:
                sums = self._evaluate_part(poll)
        except DoesNotFitError as error:
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
        lines = JsonLines(self._settings.out / METRICS)
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
        every = self._settings.validate_every
        return every is not None and step % every == 0 and step != self._loop.sampler.total

    def _checkpoint_is_due(self, step: int) -> bool:
        every, minutes = self._settings.checkpoint_every, self._settings.checkpoint_minutes
        if every and step % every == 0:
            return True
        if minutes is None:
            return False
        return self._loop.engine.ranks.agree(self._loop.clock() - self._saved_at > 60 * minutes)

    def _stop_if_requested(self, request: StopRequest) -> None:
        """Write a checkpoint and raise if a signal asked to stop."""
        if request.signal_number is None:
            return
        self._flush()
        self._save_if_needed()
        raise Interrupted(
            f"stopped after step {self._loop.batches_seen} of {self._loop.sampler.total} with checkpoint "
            f"{self.checkpoint}. Resume with: {self._settings.resume_hint}",
            signal_number=request.counts_as,
        )

    def _save_periodic(self, progress: Progress) -> None:
        """Write a checkpoint that is due; if it fails and the run may continue, wait for the next one."""
        try:
            self._save()
            progress.saved(self._loop.batches_seen)
        except (CheckpointError, DoesNotFitError) as error:
            if self._settings.on_failed_save == "stop":
                raise
            self.failed_checkpoints.append(self._loop.batches_seen)
            self._saved_at = self._loop.clock()
            progress.note(f"{error}. The run continues without it (--on-failed-save continue)")

    def _save_if_needed(self) -> None:
        """Write a checkpoint unless the last one is of this step."""
        if self.checkpoint is None or self._loop.batches_seen != _step_of(self.checkpoint):
            self._save()

    def _save(self) -> None:
        """Write a checkpoint. Rank 0 writes it, and no rank trains on before it is published.

        Raises:
            CheckpointError: it could not be written.
            DoesNotFitError: memory ran out. The state of the run, and earlier checkpoints, are intact.
        """
        try:
            with self._loop.times.besides("checkpoint"):
                self._write_checkpoint()
        except Exception as error:
            if not is_oom(error):
                raise
            reason = first_line(error).rstrip(".")
        else:
            return
        # Outside of the except block, so that nothing holds the copies of the state.
        self._loop.device.release()
        raise DoesNotFitError(
            f"out of memory while the checkpoint of step {self._loop.batches_seen} was written, with "
            f"{available_host_memory()} of host memory available: {reason}. Earlier checkpoints are intact. "
            "Free host memory and resume, or let the run continue without it (--on-failed-save continue)"
        )

    def _write_checkpoint(self) -> None:
        self._loop.engine.share(self._loop.train_state.model.buffers())
        state = capture_loop(self._loop)
        check_checkpoint_state(state)
        self.checkpoint = Path(self._loop.engine.ranks.once(lambda: self._publish(state)))
        self._saved_at = self._loop.clock()

    def _publish(self, state: Mapping[str, Any]) -> str:
        path = save_checkpoint(
            self._settings.out / CHECKPOINTS,
            step=self._loop.batches_seen,
            state=state,
            facts=self._settings.facts,
            keep_last=self._settings.keep_last,
            protected=self._resumed_from,
        )
        # From now on the checkpoint has the smaller micro-batch.
        (self._settings.out / OOM_FILE).unlink(missing_ok=True)
        return str(path)


def _restart_hint(loop: Loop, settings: RunSettings, error: AutobatchError) -> str | None:
    """Return how to continue after an error; after an out-of-memory error, write the smaller micro-batch."""
    has_checkpoint = bool(list_checkpoints(settings.out / CHECKPOINTS))
    if not isinstance(error, RestartSmallerError):
        return f"resume from the newest checkpoint with: {settings.resume_hint}" if has_checkpoint else None
    loop.engine.lower(loop.micro_batch)
    content = {
        "batches_seen": loop.batches_seen,
        "micro_batch": loop.micro_batch,
        "limits": loop.engine.limits,
        "error": str(error),
    }
    write_atomic(settings.out / OOM_FILE, json.dumps(content, indent=1).encode())
    if has_checkpoint:
        return f"resume in smaller micro-batches with: {settings.resume_hint}"
    smaller = loop.split.of_longest(loop.micro_batch)
    return f"there is no checkpoint yet: start again with --max-micro-batch {smaller}"


def _apply_smaller_micro_batch(loop: Loop, out: Path, resumed: Loaded | None) -> None:
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


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))
