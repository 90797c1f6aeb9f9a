"""The stages of each command, in order.

    workload ──► footprint ──► probe ──► plan ──► tune ──► train ──► report
                   (traced)    (run)    (exact)  (Optuna)  (loop)   (to read)

A `RunContext` says who hears of a run and whether the workload is tried in a child process. There it is
opened once for probe, trials and learning rates, and once here for the training.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from autobatch.api import unpack
from autobatch.core.errors import InputError
from autobatch.core.files import write_atomic
from autobatch.core.options import EstimateOptions, FitOptions, PlanOptions, ProbeOptions, TuneOptions
from autobatch.core.progress import Progress
from autobatch.core.records import Plan, Tuning
from autobatch.core.version import versions
from autobatch.device.profiles import data_home
from autobatch.probing.attempt import TrainSetup
from autobatch.probing.cache import KeyValue
from autobatch.probing.child import SetupProcess, ThisProcess, open_process
from autobatch.probing.estimate import estimate_limits
from autobatch.probing.find_limit import check_size, find_limit, find_limits_by_size
from autobatch.probing.limits import predicted_memory
from autobatch.probing.setup import device_key, find_workload, open_setup
from autobatch.report.result import Estimates, Result, load_run
from autobatch.training.build import LoopSettings, build_sampler
from autobatch.training.checkpoint import list_checkpoints
from autobatch.training.resume import (
    changes_since_checkpoint,
    check_same_data_order,
    load_plan,
    load_run_state,
)
from autobatch.training.run_folder import (
    CHECKPOINTS,
    REPORT,
    RESULT,
    claim_folder,
    folder_of,
    move_earlier_run,
)
from autobatch.training.train_plan import Resume, train_plan
from autobatch.tuning.tune_plan import TuneSettings, tune_learning_rate, tune_plan
from autobatch.workload.contract import Workload
from autobatch.workload.order import GlobalBatchSampler

PLANNED_STEPS = 1000
"""Optimizer steps of the run that is tuned for, if nothing says how many."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Surroundings of a call: who hears of it, and where things are kept."""

    progress: Progress = field(default_factory=Progress)
    isolated: bool = False
    """Try the workload in a child process; one that is no reference is tried here."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    command: str = ""
    """The command line that repeats this call."""
    entered: Callable[[Path], None] = lambda _: None
    """Receives the folder of a run as soon as it is known."""
    clock: Callable[[], float] = time.monotonic

    @property
    def home(self) -> Path:
        """The data directory."""
        return data_home(self.environ)

    def expiry(self, seconds: float | None) -> Callable[[], bool]:
        """Start a timer, and return the question whether so many seconds have passed; None for never."""
        start = self.clock()
        return lambda: seconds is not None and self.clock() - start > seconds


def run_probe(workload: Workload | str | None, options: ProbeOptions, context: RunContext) -> Result:
    """Run ``autobatch probe``."""
    limits, progress = unpack.probe_limits(options), context.progress
    with open_process(workload, unpack.setup_settings(options), isolated=context.isolated) as process:
        device = process.info.device
        if options.micro_batch is not None:
            found = check_size(process, options.micro_batch, progress=progress)
            return Result(device=device, probe=found, command=context.command)
        limit = find_limit(process, limits, home=context.home, progress=progress, clock=context.clock)
        found = find_limits_by_size(process, limits, limit.probe, progress=progress)
        return Result(device=device, probe=found, profile=limit.file, command=context.command)


def run_plan(workload: Workload | str | None, options: PlanOptions, context: RunContext) -> Result:
    """Run ``autobatch plan``. An interrupted probe answers with the best size so far."""
    with _open(workload, options, context) as process:
        return _probe_and_plan(process, options, context)


def run_estimate(
    workload: Workload | str | None, options: EstimateOptions, environ: Mapping[str, str]
) -> Estimates:
    """Run ``autobatch estimate``."""
    settings = unpack.estimate_settings(options)
    return estimate_limits(find_workload(workload), settings, home=data_home(environ))


def run_tune(workload: Workload | str | None, options: TuneOptions, context: RunContext) -> Result:
    """Run ``autobatch tune``."""
    _check_storage(options)
    with _open(workload, options, context) as process:
        result = _uninterrupted(_probe_and_plan(process, options, context))
        settings = unpack.tune_settings(options, process.info, PLANNED_STEPS)
        expired = context.expiry(options.timeout)
        if options.trials or not options.tune_lr:
            result = _tune(process, result, settings, context, expired)
        if not options.tune_lr:
            return result
        try:
            return _tune_learning_rate(process, result, settings, context, expired)
        except KeyboardInterrupt:
            # What was found before is complete, and the study continues with the next call.
            context.progress.note("interrupted: kept the learning rate")
            return result


def run_fit(workload: Workload | str | None, options: FitOptions, context: RunContext) -> Result:
    """Run ``autobatch fit``: the whole pipeline.

    Raises:
        InputError: an option, the workload, or the content of the run's folder is invalid.
        AutobatchError: see `autobatch.training.run.train`.
    """
    _refuse_ranks(context.environ)
    settings = unpack.loop_settings(options, is_demo=workload is None)
    with ExitStack() as held:
        prepare = _prepare_resume if options.resume else _prepare
        ready = prepare(workload, options, settings, context, held)
        training, model = train_plan(
            ready.setup,
            ready.plan,
            ready.sampler,
            settings,
            unpack.run_settings(options, ready.out, _resume_hint(context.command, ready.out)),
            key=ready.key,
            split_check=options.split_check,
            progress=context.progress,
            resume=ready.resume,
        )
        result = msgspec.structs.replace(
            ready.result, training=training, model=model, command=context.command
        )
        return _write(result, ready.out, context.progress)


class _Ready(NamedTuple):
    """A run that can be trained."""

    result: Result
    """The records so far."""
    plan: Plan
    setup: TrainSetup
    sampler: GlobalBatchSampler
    out: Path
    key: Mapping[str, KeyValue]
    resume: Resume | None = None


def _prepare(
    workload: Workload | str | None,
    options: FitOptions,
    settings: LoopSettings,
    context: RunContext,
    held: ExitStack,
) -> _Ready:
    """Probe, plan and tune in one process, then open the setup that is trained."""
    _check_storage(options)
    with _open(workload, options, context) as process:
        sampler = build_sampler(process.info.samples, settings)
        out = _claim(folder_of(options.out, process.info.name, resume=False), context, held)
        result = _uninterrupted(_probe_and_plan(process, options, context))
        earlier = move_earlier_run(out)
        if earlier is not None:
            context.progress.note(f"moved the earlier run of {out} to {earlier}")
        tuning = unpack.fit_tune_settings(options, process.info, sampler.total)
        expired = context.expiry(options.timeout)
        if options.trials:
            result = _tune(process, result, tuning, context, expired)
        if options.tune_lr:
            result = _tune_learning_rate(process, result, tuning, context, expired)
    assert result.plan is not None
    # A child has ended by now: its memory is free for the training.
    setup = process.setup if isinstance(process, ThisProcess) else _open_setup(workload, options, context)
    return _Ready(result, result.plan, setup, sampler, out, process.info.key)


def _prepare_resume(
    workload: Workload | str | None,
    options: FitOptions,
    settings: LoopSettings,
    context: RunContext,
    held: ExitStack,
) -> _Ready:
    """Take the stored plan if nothing has changed, else plan the same batch again."""
    progress, setup = context.progress, _open_setup(workload, options, context)
    sampler = build_sampler(len(setup.workload.train_data), settings)  # type: ignore[arg-type]
    out = _claim(folder_of(options.out, setup.workload.name, resume=True), context, held)
    stored = load_run_state(out)
    for line in stored.passed_over:
        progress.note(f"skipped an invalid checkpoint: {line}")
    plan = load_plan(stored, settings)
    check_same_data_order(stored, sampler, scheduled=setup.workload.schedule is not None)
    changes = changes_since_checkpoint(stored, device_key(setup), plan, options.max_micro_batch)
    if not changes:
        progress.note(f"resuming from {stored.path} on the same hardware, bit for bit")
        device = setup.device.describe()
        progress.opened(device)
        progress.planned(plan)
        result = Result(device=device, plan=plan, title=setup.workload.name)
        resume = Resume(checkpoint=stored, is_exact=True)
        return _Ready(result, plan, setup, sampler, out, stored.facts.get("key", {}), resume)
    progress.note(
        f"resuming from {stored.path} with another {' and another '.join(changes)}: the batch, the learning "
        "rate and the order of the data stay, the micro-batch is planned again, and sums differ by rounding"
    )
    with _open(workload, options, context) as process:
        result = _uninterrupted(_probe_and_plan(process, options, context))
    assert result.plan is not None
    rate = {name: getattr(plan, name) for name in Plan.__struct_fields__ if name.startswith("learning_rate")}
    plan = msgspec.structs.replace(result.plan, **rate)
    result = msgspec.structs.replace(result, plan=plan)
    resume = Resume(checkpoint=stored, is_exact=False)
    return _Ready(result, plan, setup, sampler, out, process.info.key, resume)


def _open(
    workload: Workload | str | None, options: PlanOptions, context: RunContext
) -> AbstractContextManager[SetupProcess]:
    settings = unpack.setup_settings(options, options.target_batch)
    return open_process(workload, settings, isolated=context.isolated)


def _open_setup(workload: Workload | str | None, options: PlanOptions, context: RunContext) -> TrainSetup:
    settings = unpack.setup_settings(options, options.target_batch)
    return open_setup(find_workload(workload), settings, environ=context.environ, is_demo=workload is None)


def _probe_and_plan(process: SetupProcess, options: PlanOptions, context: RunContext) -> Result:
    info, progress = process.info, context.progress
    # What makes a plan invalid must be known before minutes are spent on a probe.
    unpack.plan_for(info, 1, options)
    limits = unpack.probe_limits(options, options.target_batch)
    limit = find_limit(process, limits, home=context.home, progress=progress, clock=context.clock)
    plan = unpack.plan_for(info, limit.probe.micro_batch, options)
    progress.planned(plan)
    predicted, curve = predicted_memory(limit.footprint, info, limit.probe.micro_batch)
    return Result(
        device=info.device,
        probe=limit.probe,
        plan=plan,
        profile=limit.file,
        title=info.name,
        command=context.command,
        predicted=predicted,
        memory_curve=curve,
    )


def _uninterrupted(result: Result) -> Result:
    """Return a result whose probe was not interrupted: an interrupt ends what was to follow, too."""
    if result.probe is not None and result.probe.stopped_by == "interrupt":
        raise KeyboardInterrupt
    return result


def _tune(
    process: SetupProcess,
    result: Result,
    settings: TuneSettings,
    context: RunContext,
    expired: Callable[[], bool],
) -> Result:
    assert result.plan is not None
    assert result.probe is not None
    plan, tuning = tune_plan(
        process,
        result.plan,
        result.probe.micro_batch,
        settings,
        home=context.home,
        progress=context.progress,
        expired=expired,
        clock=context.clock,
    )
    return msgspec.structs.replace(result, plan=plan, tuning=tuning)


def _tune_learning_rate(
    process: SetupProcess,
    result: Result,
    settings: TuneSettings,
    context: RunContext,
    expired: Callable[[], bool],
) -> Result:
    assert result.plan is not None
    plan, found = tune_learning_rate(
        process,
        result.plan,
        settings,
        home=context.home,
        progress=context.progress,
        expired=expired,
        clock=context.clock,
    )
    nothing = Tuning(trials=0, best={}, baseline_samples_per_s=0.0, best_samples_per_s=0.0, study="")
    tuning = msgspec.structs.replace(result.tuning or nothing, learning_rate=found)
    return msgspec.structs.replace(result, plan=plan, tuning=tuning)


def _check_storage(options: TuneOptions) -> None:
    """Check that the storage that was asked for is usable, before minutes are spent on a probe.

    Raises:
        InputError: it is not.
    """
    if options.storage is not None and (options.trials or options.tune_lr):
        from autobatch.tuning.study import check_storage

        check_storage(options.storage)


def _claim(out: Path, context: RunContext, held: ExitStack) -> Path:
    held.enter_context(claim_folder(out))
    context.entered(out)
    return out


def _refuse_ranks(environ: Mapping[str, str]) -> None:
    """Refuse to train in several processes: each would write over the others, with a batch of its own."""
    ranks = environ.get("WORLD_SIZE", "1")
    if ranks != "1":
        raise InputError(
            f"WORLD_SIZE is {ranks}, and fit trains in one process: start it without torchrun, or take "
            "autobatch.plan(…) to your own loop across ranks"
        )


def _resume_hint(command: str, out: Path) -> str:
    if not command:
        return f"autobatch.fit(…, out={str(out)!r}, resume=True)"
    words = command.replace(" --resume", "")
    return f"{words} --resume" if "--out" in words else f"{words} --out {out} --resume"


def _write(result: Result, out: Path, progress: Progress) -> Result:
    """Write ``result.json`` and the report. A report that fails is a note, for the training is done."""
    result = msgspec.structs.replace(
        result,
        out=out,
        report=out / REPORT,
        versions=versions(),
        created=datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        checkpoints=[int(path.name.removeprefix("step-")) for path in list_checkpoints(out / CHECKPOINTS)],
    )
    _write_json(result, out)
    # Imported here: matplotlib takes a second, and only a finished run needs it.
    from autobatch.report.page import write_report

    try:
        write_report(out / REPORT, load_run(out))
    except (OSError, InputError) as error:
        progress.note(f"the report could not be written: {error}")
        result = msgspec.structs.replace(result, report=None)
        _write_json(result, out)
    return result


def _write_json(result: Result, out: Path) -> None:
    content = msgspec.json.format(msgspec.json.encode(result.to_json()))
    write_atomic(out / RESULT, content + b"\n")
