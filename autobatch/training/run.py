"""Training run on disk: the loop with its files, checkpoints, validation and signals.

OUT/checkpoints/step-N/   OUT/metrics.jsonl   OUT/model.safetensors   OUT/model-ema.safetensors   OUT/oom.json
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

import msgspec

from autobatch.core.errors import AutobatchError, DoesNotFitError, Interrupted, RestartSmallerError
from autobatch.core.progress import Progress
from autobatch.core.records.training import StepRecord, Training
from autobatch.core.signals import StopRequest, stop_on_signals
from autobatch.device.oom import first_line, memory_named
from autobatch.step.optimizers import averaged_weights, switch
from autobatch.training.checkpoints.load import Loaded
from autobatch.training.checkpoints.run_checkpoints import RunCheckpoints
from autobatch.training.evaluation import Sums, evaluate_part
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
from autobatch.training.oom_file import apply_smaller_micro_batch, restart_hint
from autobatch.training.run_folder import METRICS, RunFiles
from autobatch.training.shared_evaluation import evaluate_shared
from autobatch.training.sinks import UserSinks
from autobatch.training.split_check.check import FirstBatch
from autobatch.training.totals import RunTotals
from autobatch.training.validation_size import ValidationBatchSize
from autobatch.workload.rng import preserved_random_state


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
