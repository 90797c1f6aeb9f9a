"""A training run on disk: the loop that a plan asks for, its files, checkpoints, validations and signals.

    setup, plan, options ─► loop, restored ─► steps, validations, checkpoints ─► weights, Training

OUT/checkpoints/step-N/   OUT/metrics.jsonl   OUT/model.safetensors   OUT/model-ema.safetensors   OUT/oom.json
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from autobatch.core import versions
from autobatch.core.errors import (
    AutobatchError,
    DoesNotFitError,
    InputError,
    Interrupted,
    RestartSmallerError,
)
from autobatch.core.files import METRICS, UNREADABLE, write_atomic
from autobatch.core.options import Options
from autobatch.core.progress import Progress
from autobatch.core.records import LOADER_WORKERS, Plan, Positive, StepRecord, Training
from autobatch.core.signals import counts_as, stop_on_signals
from autobatch.device.base import Meter
from autobatch.device.oom import memory_named
from autobatch.distributed.engine import Shared, Whole
from autobatch.distributed.group import Group
from autobatch.distributed.ranks import Ranks
from autobatch.rehearsal.setup import Setup, device_key
from autobatch.step.gradients import Optimizers
from autobatch.step.train_state import TrainState, build_train_state
from autobatch.training.checkpoint import (
    Loaded,
    begin_after,
    check_savable,
    list_checkpoints,
    save_checkpoint,
    step_of,
)
from autobatch.training.loop import Loop
from autobatch.training.metrics import Metrics, Sink, Until, open_trackers, rewind_metrics, totals_of
from autobatch.training.resume import capture_loop, restore_loop, run_facts
from autobatch.training.run_folder import CHECKPOINTS, OOM_FILE, export_weights
from autobatch.training.split_check import check_batch_norms
from autobatch.training.validation import Validator, check_validation
from autobatch.workload.contract import Collated, Workload, kind_of, schedule_arguments
from autobatch.workload.data import load_micro_batch
from autobatch.workload.feed import Feed
from autobatch.workload.nested import to_device
from autobatch.workload.order import GlobalBatchSampler, split_of
from autobatch.workload.rng import mix_seed, preserved_random_state, seed_everything
from autobatch.workload.user_code import user_code


@dataclass(kw_only=True)
class TrainingRun:
    """A training run with its folder. All ranks make the same calls, and rank 0 writes. Use it once."""

    out: Path
    options: Options
    """Decide when something is written."""
    progress: Progress = field(default_factory=Progress)
    """Receives notes and steps."""
    resume_hint: str = ""
    """The command that resumes this run."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Stored beside every checkpoint, for a resume."""
    notes: list[str] = field(default_factory=list)
    """Remarks so far; those of the training are added, and a checkpoint holds them too."""
    sinks: Sequence[Sink] = ()
    """Receive the records too."""
    until: Until | None = None
    """Ends the run early; None to train all batches."""
    resumed: Loaded | None = None
    """The checkpoint to continue from; None for a new run."""
    is_exact: bool = True
    """True if hardware, plan and versions are those of the checkpoint."""

    _loop: Loop = field(init=False)
    _metrics: Metrics = field(init=False)
    _validator: Validator = field(init=False)
    _newest: Path | None = field(init=False)
    """The newest checkpoint."""
    _saved_at: float = field(init=False)
    _raised: Exception | None = field(default=None, init=False)
    """Error of the user's rule, which ended the run."""

    def train(self, loop: Loop) -> Training:
        """Train the rest of a run, then validate and export the weights.

        Args:
            loop: at the first batch to train, as it was restored from a checkpoint or as it is new.

        Raises:
            Interrupted: a signal stopped the run; a checkpoint was written.
            CheckpointError: a checkpoint or another file could not be written.
            InputError: the workload keeps state that a checkpoint cannot hold.
            AutobatchError: see `Loop.run`.
            Exception: whatever ``until`` raises on rank 0, after a checkpoint.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        self._loop, ranks = loop, loop.engine.ranks
        self._newest = None if self.resumed is None else self.resumed.path
        self._saved_at = loop.clock()
        loop.micro_batch = ranks.once(self._limit_left)
        ranks.once(lambda: begin_after(self.out / CHECKPOINTS, loop.batches_seen))
        check_savable(capture_loop(loop))
        if self.resumed is not None and loop.batches_seen == loop.sampler.total:
            self.progress.note(
                f"nothing is left to train: all {loop.batches_seen:,} steps of the run are done"
            )
        self._metrics = Metrics(None) if ranks.rank else self._open_metrics()
        self._validator = Validator(loop, note=self.note)
        with closing(self._metrics):
            with stop_on_signals(tells=not ranks.rank, is_shared=ranks.world > 1) as loop.engine.request:
                try:
                    self._train_batches()
                    self.progress.doing("validating")
                    validation = self._validate()
                except Interrupted:
                    raise
                except AutobatchError as error:
                    self._end_with(error)
                    raise
            self.progress.doing("writing the weights")
            ranks.send(loop.train_state.model.buffers())
            with memory_named("the weights were exported, after the last checkpoint"):
                export_weights(loop.train_state, self.out, loop.engine)
            record = self._summary(validation)
            self._metrics.end(record)
        return record

    def note(self, line: str) -> None:
        """Add a remark, and tell it."""
        if line not in self.notes:
            self.notes.append(line)
        self.progress.note(line)

    def _limit_left(self) -> int:
        """Return the largest micro-batch, smaller if an earlier start of the run has ended out of memory."""
        limit = self._loop.micro_batch
        try:
            left = msgspec.json.decode((self.out / OOM_FILE).read_bytes(), type=dict[str, Positive])
        except (OSError, *UNREADABLE):
            return limit
        return min(limit, left.get("micro_batch", limit))

    def _open_metrics(self) -> Metrics:
        """Open the file of metrics, without the steps that a resumed run trains again, and the trackers."""
        begun_at = self._loop.batches_seen
        logged = rewind_metrics(self.out / METRICS, batches_seen=begun_at)
        settings = (self.options.by_name() | self.facts.get("plan", {})).items()
        trackers = open_trackers(
            self.options.log,
            self.out,
            project=self._loop.workload.name,
            settings={name: value for name, value in settings if isinstance(value, str | int | float)},
            begun_at=begun_at,
            logged=logged,
        )
        return Metrics(self.out / METRICS, [*trackers, *self.sinks], note=self.progress.note)

    def _train_batches(self) -> None:
        """Train the remaining batches, or until a rule of the user's ends the run, and write a checkpoint.

        After each step come its validation, its record, its checkpoint, the rule, and the check for a signal.
        In this order the metrics have a line for every batch that a checkpoint holds.
        """
        total, until = self._loop.sampler.total, self.until
        for step in self._loop.run():
            record = self._record(step)
            if self._checkpoint_is_due(record.step):
                self._save_if_needed()
                self.progress.saved(record.step)
            if until is not None and self._loop.engine.ranks.once(partial(self._is_enough, until, record)):
                self.note(f"until=… ended the run after step {record.step} of {total}")
                break
            self._stop_if_requested()
        self._stop_if_requested()
        self._save_if_needed()
        if self._raised is not None:
            raise self._raised

    def _record(self, step: StepRecord) -> StepRecord:
        """Write the record of a step, with a validation if one is due, and say what is worth a note."""
        every, total = self.options.validate_every, self._loop.sampler.total
        try:
            if every is not None and step.step % every == 0 and step.step != total:
                self.progress.doing("validating")
                step = msgspec.structs.replace(step, validation=self._validate())
        finally:
            self._metrics.step(step)
        self.progress.stepped(step, total)
        if step.recovered is not None:
            self.note(
                f"step {step.step}: out of memory, repeated at micro-batch {step.micro_batch}: "
                f"{step.recovered}"
            )
        return step

    def _is_enough(self, until: Until, record: StepRecord) -> bool:
        """Ask the user's rule whether the run ends here, as it also does if the rule raises."""
        try:
            with user_code("until"):
                return bool(until(record))
        except Exception as error:
            self._raised = error
            return True

    def _validate(self) -> dict[str, float | None]:
        """Return the validation metrics, of the averaged weights if there are any.

        The weights and the random states of the training are restored.
        """
        loop = self._loop
        loop.engine.ranks.send(loop.train_state.model.buffers())
        # One rank of a shared model can neither stop alone nor, out of memory, fail with the others.
        loop.can_be_saved = loop.engine.is_alone
        with preserved_random_state(), loop.train_state.averaged():
            metrics = self._validator.run()
        loop.can_be_saved = True
        loop.engine.request.agree(loop.engine.ranks.gather(loop.engine.request.own))
        # A checkpoint must hold the random states of the training, which are restored only here.
        self._stop_if_requested()
        return metrics

    def _end_with(self, error: AutobatchError) -> None:
        """Add to an error how to continue. If memory ran out, save what a continuation needs before.

        That is a checkpoint, if the state is that between two steps, and for a restart the smaller
        micro-batches.
        """
        loop, out = self._loop, self.out
        if isinstance(error, DoesNotFitError | RestartSmallerError) and loop.can_be_saved:
            with suppress(Exception):  # the error of the run counts, whatever this one is
                self._save_if_needed()
        if isinstance(error, RestartSmallerError):
            write_atomic(out / OOM_FILE, msgspec.json.encode({"micro_batch": loop.micro_batch}))
        if list_checkpoints(out / CHECKPOINTS):
            error.add_note(f"resume from the newest checkpoint with: {self.resume_hint}")
        elif isinstance(error, RestartSmallerError):
            smaller = loop.split.of_longest(loop.micro_batch)
            error.add_note(f"there is no checkpoint yet: start again with --max-micro-batch {smaller}")

    def _stop_if_requested(self) -> None:
        """Write a checkpoint and raise if a signal asked to stop."""
        loop, number = self._loop, self._loop.engine.request.signal_number
        if number is None:
            return
        if loop.can_be_saved:
            self._save_if_needed()
        kept = "without a checkpoint" if self._newest is None else f"with checkpoint {self._newest}"
        raise Interrupted(
            f"stopped after step {loop.batches_seen} of {loop.sampler.total} {kept}. Resume with: "
            f"{self.resume_hint}",
            signal_number=counts_as(number),
        )

    def _checkpoint_is_due(self, step: int) -> bool:
        """Return whether a checkpoint of a step is due; all ranks call it."""
        every, seconds = self.options.checkpoint_every, self.options.checkpoint_seconds
        if seconds is None:
            return isinstance(every, int) and step % every == 0
        return self._loop.engine.ranks.agree(self._loop.clock() - self._saved_at > seconds)

    def _save_if_needed(self) -> None:
        """Write a checkpoint unless the newest one is of this step. No rank trains on before it is published.

        Raises:
            CheckpointError: it could not be written.
            DoesNotFitError: memory ran out. The state of the run, and earlier checkpoints, are intact.
        """
        loop, ranks = self._loop, self._loop.engine.ranks
        if self._newest is not None and step_of(self._newest) == loop.batches_seen:
            return
        self.progress.doing("saving a checkpoint")
        # After a power cut, the disk has a line for every step of the checkpoint.
        ranks.once(self._metrics.sync)
        # A rank may fail alone.
        loop.can_be_saved = ranks.world == 1
        doing = f"the checkpoint of step {loop.batches_seen} was written; earlier checkpoints are intact"
        with memory_named(doing):
            loop.engine.ranks.send(loop.train_state.model.buffers())
            self._newest = save_checkpoint(
                self.out / CHECKPOINTS,
                step=loop.batches_seen,
                state=capture_loop(loop),
                facts={**self.facts, "notes": self.notes},
                keep_last=self.options.keep_last,
                ranks=ranks,
            )
        # The checkpoint has the smaller micro-batches now. No rank continues before the file is gone,
        # because it may run out of memory at once and write a new one.
        ranks.once(lambda: (self.out / OOM_FILE).unlink(missing_ok=True))
        self._saved_at = loop.clock()
        loop.can_be_saved = True

    def _summary(self, validation: dict[str, float | None]) -> Training:
        """Return the summary of a finished run."""
        loop, resumed = self._loop, self.resumed
        average = loop.train_state.average
        found = loop.engine.ranks.once(lambda: totals_of(self.out / METRICS))
        samples = loop.sampler.seen(loop.batches_seen)
        return Training(
            **found,
            samples=samples,
            samples_per_s=samples / found["seconds"] if found["seconds"] else None,
            optimizer_steps=loop.steps_applied,
            oom_recoveries=loop.oom_recoveries,
            resumed_from=None if resumed is None else str(resumed.path),
            checkpoint=None if self._newest is None else str(self._newest),
            validation=validation,
            micro_batch=loop.split.of_longest(loop.micro_batch),
            ema=None if average is None else average.decay,
            notes=[*self.notes],
        )


@memory_named("the training was prepared")
def train_plan(
    setup: Setup, plan: Plan, sampler: GlobalBatchSampler, run: TrainingRun, ranks: Ranks
) -> Training:
    """Train a plan to the end of its run, and the model of the setup in place, unless ranks share it.

    Raises:
        InputError: a part of the workload is invalid, or a BatchNorm would get a single sample.
        AutobatchError: see `TrainingRun.train`.
    """
    notes = check_batch_norms(setup.model, plan, sampler)
    if run.options.validate_every is not None and setup.workload.validation_data is None:
        notes.append("no effect without validation data: --validate-every")
    for line in notes:
        run.note(line)
    run.progress.doing("preparing the training")
    workload, device, resumed = setup.workload, setup.device, run.resumed
    workers = run.options.workers
    if workers is None:
        workers = int(plan.knobs.get(LOADER_WORKERS) or workload.workers or 0)
    split = split_of(plan, setup.worst_case.sizes, rank=ranks.rank, world=ranks.world)
    feed = Feed(
        workload,
        sampler,
        split,
        workers=workers,
        device=device.torch_device,
        seeds_samples=resumed is not None and resumed.facts["sample_seeds"],
    )
    with device.session(is_probe=False) as meter, closing(feed):
        seed_everything(run.options.seed)
        train_state, engine = _open_train_state(setup, plan, meter, ranks)
        if ranks.rank:
            seed_everything(mix_seed(run.options.seed, ranks.rank))
        loop = Loop(
            workload=workload,
            train_state=train_state,
            sampler=sampler,
            device=device,
            micro_batch=plan.largest_micro_batch,
            split=split,
            engine=engine,
            feed=feed,
            schedules=build_schedules(workload, train_state.optimizers, sampler),
            on_nonfinite=run.options.on_nonfinite,
        )
        for line in check_validation(loop):
            run.note(line)
        if resumed is not None:
            for line in restore_loop(loop, resumed, same_hardware=run.is_exact):
                run.progress.note(line)
            # The loop has it now, and the caller would hold it as long as the run lasts.
            resumed.state.clear()
        run.facts |= {
            "plan": msgspec.to_builtins(plan),
            "sample_seeds": feed.seeds_samples,
            "run": run_facts(setup, sampler),
            "versions": versions(),
            "ranks": ranks.gather(device_key(setup)),
        }
        # The first step starts with an empty cache, as a probe does.
        device.release()
        run.progress.doing("training: the first step")
        return run.train(loop)


FILLER_SAMPLES = 2
"""Samples of a micro-batch that adds nothing to a batch: BatchNorm needs two."""


def _open_train_state(setup: Setup, plan: Plan, meter: Meter, ranks: Ranks) -> tuple[TrainState, Whole]:
    """Place the model on the device of this rank, and build what its steps need, with its engine."""
    meter.mark("setup")
    device = setup.device.torch_device
    if plan.parallel == "shard" and isinstance(ranks, Group):
        # Only here: importing FSDP takes a second.
        from autobatch.distributed.shard import shard_over

        shared = shard_over(ranks, setup.model, plan.precision, device)
        model = shared.model
    else:
        model, shared = setup.model.to(device), None
    settings = replace(setup, precision=plan.precision, knobs=plan.knobs)
    train_state = build_train_state(
        setup.workload, model, device, settings, meter, learning_rate=plan.learning_rate
    )
    if shared is None:
        ranks.send([*model.parameters(), *model.buffers()])
        return train_state, Whole(ranks, train_state)
    shared.attach(train_state)

    def filler() -> Collated:
        """Return the first samples, for a rank with fewer micro-batches than others."""
        ids = range(min(FILLER_SAMPLES, len(setup.workload.train_data)))
        return to_device(load_micro_batch(setup.workload, ids), device)

    return train_state, Shared(ranks, train_state, filler)


def build_schedules(
    workload: Workload, optimizers: Optimizers, sampler: GlobalBatchSampler
) -> list[LRScheduler]:
    """Build a schedule for each optimizer; empty if the workload has no schedule.

    Raises:
        InputError: the function returns no schedule, or takes something else.
    """
    make: Any = workload.schedule
    if make is None:
        return []
    takes = schedule_arguments(make)
    steps = [sampler.total] if "steps" in takes else []
    with user_code("schedule", make):
        schedules = [
            make(optimizer, *steps) if takes else LambdaLR(optimizer, make) for optimizer in optimizers
        ]
        for schedule in schedules:
            has_methods = hasattr(schedule, "step") and hasattr(schedule, "state_dict")
            if not has_methods or isinstance(schedule, ReduceLROnPlateau):
                raise InputError(
                    "Workload(schedule=…) must return a schedule of torch.optim that depends on the step "
                    "number alone, because it is stepped after every optimizer step, found "
                    f"{kind_of(schedule)}"
                )
    return schedules
