"""The library calls: probe, plan, tune and fit.

    workload ──► probe ──► plan ──► tune ──► train ──► report
                   ▲ what fitted before, confirmed by one run

Each takes the options of the command of the same name as keywords; the command line makes the same calls with
an `RunContext` that prints, and that probes in a child process.
"""

from __future__ import annotations

import datetime
import hashlib
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from autobatch.core.errors import InputError
from autobatch.core.files import write_atomic
from autobatch.core.knobs import COMPILE, PRECISION, SPLIT, SearchAxis, applicable, defaults, parse_knobs
from autobatch.core.options import (
    EstimateOptions,
    FitOptions,
    PlanOptions,
    ProbeOptions,
    TuneOptions,
    options_from,
)
from autobatch.core.progress import Progress
from autobatch.core.records import LrTuning, Plan, Tuning
from autobatch.core.version import __version__
from autobatch.device.profiles import data_home
from autobatch.planning import micro_batches
from autobatch.probing.attempt import TrainSetup
from autobatch.probing.child import open_prober
from autobatch.probing.estimate import run_estimate
from autobatch.probing.find_limit import caps_of, plan_from, run_lengths, run_probe
from autobatch.probing.limits import pictures
from autobatch.probing.setup import SetupInfo, describe_setup, find_workload, open_setup, with_knobs
from autobatch.report.page import write_report
from autobatch.report.result import Estimates, PlanResult, ProbeResult, Result, load_run
from autobatch.training.build import build_sampler, opened
from autobatch.training.checkpoint import Loaded, list_checkpoints
from autobatch.training.loop_state import restore_loop
from autobatch.training.preflight import check_loss_splits
from autobatch.training.resume import (
    changes_since_checkpoint,
    check_same_data_order,
    data_order_facts,
    load_plan,
    load_run_state,
)
from autobatch.training.run import RunSettings, train
from autobatch.training.run_folder import (
    CHECKPOINTS,
    REPORT,
    RESULT,
    claim_folder,
    folder_of,
    move_earlier_run,
)
from autobatch.tuning.find_fastest import Budget, StudyLocation, TuningResult, find_fastest
from autobatch.tuning.find_learning_rate import find_learning_rate
from autobatch.tuning.lr_trial import LrTrialSpec, open_runs
from autobatch.tuning.trial import TrialSpec, open_trials
from autobatch.workload import demo
from autobatch.workload.contract import Workload
from autobatch.workload.order import GlobalBatchSampler

TRIAL_SECONDS = 0.5
"""Time that a trial measures for, about."""


PLANNED_STEPS = 1000
"""Optimizer steps of the run that is tuned for, where nobody says how many it will be."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What surrounds a call: who is told, where things are kept, and whether attempts are isolated."""

    progress: Progress = field(default_factory=Progress)
    isolated: bool = False
    """Probe in a child process (only a workload that is named can be)."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    command: str = ""
    """What repeats this call."""
    entered: Callable[[Path], None] = lambda _: None
    """Told the folder of a run as soon as it is known."""
    clock: Callable[[], float] = time.monotonic

    @property
    def home(self) -> Path:
        """Where autobatch keeps what it learned."""
        return data_home(self.environ)

    def isolates(self, workload: Workload | str | None) -> bool:
        """Whether what is tried of a workload runs in a child: one that is no reference cannot."""
        return self.isolated and not isinstance(workload, Workload)

    def has_passed(self, seconds: float | None, since: float) -> Callable[[], bool]:
        """Whether so many seconds have passed, asked later; never, for ``None``."""
        return lambda: seconds is not None and self.clock() - since > seconds


def run_probe_command(
    workload: Workload | str | None, options: ProbeOptions, environment: RunContext
) -> Result:
    """``autobatch probe``."""
    with open_prober(workload, options, isolated=environment.isolated) as prober:
        found, profile = run_probe(prober, options, progress=environment.progress, home=environment.home)
        if options.micro_batch is None:
            found = run_lengths(prober, options, found, environment.progress)
        return Result(device=prober.facts.device, probe=found, profile=profile, command=environment.command)


def run_plan_command(
    workload: Workload | str | None, options: PlanOptions, environment: RunContext
) -> Result:
    """``autobatch plan``."""
    return plan_only(workload, options, environment, is_whole=True)[0]


def plan_only(
    workload: Workload | str | None,
    options: PlanOptions,
    environment: RunContext,
    *,
    is_whole: bool = False,
) -> tuple[Result, SetupInfo]:
    """Probe and plan; also what the plan rests on.

    An interrupted probe answers with the best size so far where the plan is the whole of what was asked;
    where more was to follow, the interrupt ends that too.
    """
    with open_prober(workload, options, isolated=environment.isolated) as prober:
        facts = prober.facts
        # What the plan cannot be must be known before minutes are spent on a probe.
        plan_from(facts, 1, options)
        found, profile = run_probe(prober, options, progress=environment.progress, home=environment.home)
        step = prober.step
    if found.stopped_by == "interrupt" and not is_whole:
        raise KeyboardInterrupt
    planned = plan_from(facts, found.micro_batch, options)
    environment.progress.planned(planned)
    predicted, curve = pictures(step, facts, found.micro_batch)
    result = Result(
        device=facts.device,
        probe=found,
        plan=planned,
        profile=profile,
        title=facts.name,
        command=environment.command,
        predicted=predicted,
        memory_curve=curve,
    )
    return result, facts


def tuned(
    result: Result,
    facts: SetupInfo,
    workload: Workload | str | None,
    options: TuneOptions,
    environment: RunContext,
    *,
    setup: TrainSetup | None = None,
) -> Result:
    """Tune what the plan leaves open, and put the choice into the plan.

    Args:
        result: with a probe and a plan.
        facts: what they rest on.
        workload: the workload, or a reference to it.
        options: of the command.
        environment: what surrounds the call.
        setup: where trials run in this process; opened here if there is none.

    Raises:
        InputError: the storage cannot be used, or the study was made for something else.
        AutobatchError: the workload cannot be run with every knob at its default.
    """
    plan, probe = result.plan, result.probe
    assert plan is not None
    assert probe is not None
    progress = environment.progress
    start = environment.clock()
    task = TrialSpec(
        limit=probe.micro_batch,
        cap=min(caps_of(facts, options).values()),
        samples=sum(plan.micro_batches),
        planned_steps=_planned_steps(options, facts),
        seconds=TRIAL_SECONDS,
    )
    named = None if isinstance(workload, Workload) else workload
    isolated = environment.isolates(workload)
    open_it = bench_opener(workload, options, setup)
    with open_trials(named, options, task, setup=open_it, isolated=isolated) as trials:
        asked = None if options.knobs is None else parse_knobs(options.knobs)
        axes, notes = applicable(trials.context(), asked)
        trials.begin(defaults(axes))
        for line in notes:
            progress.note(line)
        found = find_fastest(
            trials.measure,
            axes,
            budget=Budget(options.trials, environment.has_passed(options.timeout, start)),
            seed=options.seed,
            place=_place(facts, options, task, axes, environment),
            confirm_fits=trials.confirm_fits,
            progress=lambda number, values, one: progress.measured(
                number, options.trials, values, one.samples_per_s, one.failure
            ),
        )
    for line in found.tuning.notes:
        progress.note(line)
    progress.tuned(found.tuning)
    planned = with_choice(plan, found, axes)
    if planned != plan:
        progress.planned(planned)
    return msgspec.structs.replace(result, tuning=found.tuning, plan=planned)


def bench_opener(
    workload: Workload | str | None, options: TuneOptions, setup: TrainSetup | None
) -> Callable[[], TrainSetup]:
    """Opens what trials in this process run on: the bench that is there, else one of the workload."""
    return lambda: setup or open_setup(find_workload(workload), options, demo=workload is None)


def with_choice(planned: Plan, found: TuningResult, axes: Sequence[SearchAxis]) -> Plan:
    """The plan with what the tuner chose; the effective batch stays what it is."""
    if found.winner is None or found.tuning.best == defaults(axes):
        return planned
    sizes = micro_batches(sum(planned.micro_batches), found.winner.micro_batch)
    base = defaults(axes)
    # What is at its default is no choice that a plan need repeat; the split is the plan itself.
    knobs = {
        name: value for name, value in found.tuning.best.items() if value != base[name] and name != SPLIT
    }
    return msgspec.structs.replace(
        planned,
        micro_batch=sizes[0],
        accumulation_steps=len(sizes),
        micro_batches=sizes,
        precision=knobs.pop(PRECISION, None) or planned.precision,
        knobs=knobs,
    )


def _place(
    facts: SetupInfo,
    options: TuneOptions,
    task: TrialSpec,
    axes: Sequence[SearchAxis],
    environment: RunContext,
) -> StudyLocation:
    """The study: named by what its figures depend on, unless a name was given."""
    made_for = purpose_of(facts, options)
    if any(axis.name == COMPILE for axis in axes):
        made_for["planned_steps"] = task.planned_steps
    workers = getattr(options, "workers", None)
    if workers is not None:
        made_for["workers"] = workers
    content = msgspec.json.encode([made_for, axes], order="deterministic")
    name = options.study or f"{facts.name}-{hashlib.sha256(content).hexdigest()[:12]}"
    return StudyLocation(name, storage_of(options, name, environment), made_for)


def purpose_of(facts: SetupInfo, options: TuneOptions) -> dict[str, Any]:
    """What the figures of any study depend on, by name."""
    key: dict[str, Any] = {name: value for name, value in facts.key.items() if name not in _NOT_A_PURPOSE}
    return key | {
        "target_batch": options.target_batch,
        "memory_budget": None if options.memory_budget is None else str(options.memory_budget),
        "max_micro_batch": options.max_micro_batch,
    }


def storage_of(options: TuneOptions, name: str, environment: RunContext) -> str | None:
    """Where a study is kept: where that was asked for, else in a file of its own, else in memory."""
    if options.storage is not None:
        return options.storage
    folder = environment.home / "studies"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return str(folder / f"{name}.log")
        reason = "it cannot be written"
    except OSError as error:
        reason = error.strerror or str(error)
    environment.progress.note(
        f"the study {name} is kept in memory, and cannot go on later: {folder}: {reason}; give --storage, or "
        "set AUTOBATCH_HOME to a directory that can be written"
    )
    return None


def check_storage(options: TuneOptions) -> None:
    """See that the storage that was asked for can be used, before minutes are spent on a probe.

    Raises:
        InputError: it cannot.
    """
    if options.storage is not None and (options.trials or options.tune_lr):
        from autobatch.tuning.study import check_storage

        check_storage(options.storage)


_NOT_A_PURPOSE = ("budget_bytes", "total_bytes")
"""What is free differs from one minute to the next, and says nothing about which configuration is fast."""


def _planned_steps(options: TuneOptions, facts: SetupInfo) -> int:
    if not isinstance(options, FitOptions):
        return PLANNED_STEPS
    if options.steps is not None:
        return options.steps
    return max(1, math.ceil((options.epochs or 1) * facts.samples / options.target_batch))


SUFFIX = "-learning-rate"


def run_tune_command(
    workload: Workload | str | None, options: TuneOptions, environment: RunContext
) -> Result:
    """``autobatch tune``."""
    check_storage(options)
    result, facts = plan_only(workload, options, environment)
    start = environment.clock()
    if options.trials or not options.tune_lr:
        result = tuned(result, facts, workload, options, environment)
    if not options.tune_lr:
        return result
    try:
        return rate_tuned(result, facts, workload, options, environment, since=start)
    except KeyboardInterrupt:
        # What was found before is whole; the study goes on with the next call.
        environment.progress.note("interrupted: the learning rate stays as it was")
        return result


def rate_tuned(
    result: Result,
    facts: SetupInfo,
    workload: Workload | str | None,
    options: TuneOptions,
    environment: RunContext,
    *,
    since: float,
    setup: TrainSetup | None = None,
) -> Result:
    """Try learning rates with the plan as it stands, and put one that is better into it.

    Args:
        result: with a plan, and with what the tuner found, where it ran.
        facts: what they rest on.
        workload: the workload, or a reference to it.
        options: of the command.
        environment: what surrounds the call.
        since: when tuning began, by the environment's clock.
        setup: where short runs train in this process; opened here if there is none.

    Raises:
        InputError: the storage cannot be used, or the study was made for something else.
        AutobatchError: the workload cannot be trained at its own learning rate.
    """
    plan, progress = result.plan, environment.progress
    assert plan is not None
    task = LrTrialSpec(
        default=plan.learning_rate,
        target_batch=plan.target_batch,
        micro_batch=plan.micro_batch,
        precision=plan.precision,
        knobs=plan.knobs,
        steps=options.lr_steps,
        skips=isinstance(options, FitOptions) and options.on_nonfinite == "skip",
    )
    named = None if isinstance(workload, Workload) else workload
    isolated = environment.isolates(workload)
    open_it = bench_opener(workload, options, setup)
    with open_runs(named, options, task, setup=open_it, isolated=isolated) as runs:
        found = find_learning_rate(
            runs,
            task,
            budget=Budget(options.lr_trials, environment.has_passed(options.timeout, since)),
            seed=options.seed,
            place=_rate_place(facts, options, task, environment),
            progress=lambda number, rate, loss, failure: progress.tried_rate(
                number, options.lr_trials, rate, loss, failure
            ),
            clock=environment.clock,
        )
    for line in found.notes:
        progress.note(line)
    planned = with_rate(plan, found, declared=facts.learning_rate)
    if planned != plan:
        progress.planned(planned)
    before = result.tuning or Tuning(
        trials=0, best={}, baseline_samples_per_s=0.0, best_samples_per_s=0.0, study=""
    )
    tuning = msgspec.structs.replace(before, learning_rate=found)
    return msgspec.structs.replace(result, tuning=tuning, plan=planned)


def with_rate(plan: Plan, found: LrTuning, *, declared: float) -> Plan:
    """The plan with the learning rate that was found; as it is, where the default stays."""
    if found.best == plan.learning_rate:
        return plan
    return msgspec.structs.replace(
        plan,
        learning_rate=found.best,
        learning_rate_rule="tuned",
        learning_rate_factor=found.best / declared,
        learning_rate_source=(
            f"found by the tuner: {found.trials} runs of {found.steps} optimizer steps at this batch"
        ),
    )


def _rate_place(
    facts: SetupInfo, options: TuneOptions, task: LrTrialSpec, environment: RunContext
) -> StudyLocation:
    """The study, beside the tuner's own; figures do not depend on what the tuner chose, but for rounding."""
    made_for = purpose_of(facts, options) | {
        "train_samples": facts.samples,
        "learning_rate": task.default,
        "lr_steps": task.steps,
        "seed": options.seed,
    }
    digest = hashlib.sha256(msgspec.json.encode(made_for, order="deterministic")).hexdigest()[:12]
    name = f"{options.study or f'{facts.name}-{digest}'}{SUFFIX}"
    return StudyLocation(name, storage_of(options, name, environment), made_for)


def run_fit_command(workload: Workload | str | None, options: FitOptions, environment: RunContext) -> Result:
    """``autobatch fit``.

    Raises:
        InputError: an option, the workload, or what stands in the run's folder cannot be.
        AutobatchError: see `autobatch.training.run.train`.
    """
    _refuse_ranks(environment.environ)
    found = find_workload(workload)
    options = _with_length(options, is_demo=workload is None)
    sampler = build_sampler(found, options)
    out = folder_of(options.out, found.name, resume=options.resume)
    del found  # it is opened once more, and may hold much
    with claim_folder(out):
        environment.entered(out)
        if options.resume:
            ready = _go_on(workload, options, environment, load_run_state(out), sampler)
        else:
            ready = _start(workload, options, environment, out)
        result = _trained(ready, options, environment, sampler, out)
        return _write(result, out, environment.progress)


class _Ready(NamedTuple):
    """A run that can be trained."""

    result: Result
    """With its plan."""
    planned: Plan
    setup: TrainSetup
    resumed: Loaded | None = None
    is_same: bool = False
    """Whether all is as it was where the run was stopped."""


def _trained(
    ready: _Ready, options: FitOptions, environment: RunContext, sampler: GlobalBatchSampler, out: Path
) -> Result:
    planned, resumed, note = ready.planned, ready.resumed, environment.progress.note
    facts = _facts(ready.setup, planned, options, sampler)
    setup = with_knobs(ready.setup, planned.knobs)
    check, size = options.split_check, planned.micro_batch
    for line in check_loss_splits(setup, micro_batch=size, sampler=sampler, check=check):
        note(line)
    seeded_before = None if resumed is None else bool(resumed.facts.get("sample_seeds"))
    with opened(setup, planned, options, sampler, seeded_before=seeded_before, note=note) as loop:
        if resumed is not None:
            restore_loop(loop, resumed.state, same_hardware=ready.is_same)
        facts["sample_seeds"] = loop.feed is not None
        settings = _settings(options, out, facts, environment.command)
        record = train(loop, settings, environment.progress, resumed)
    return msgspec.structs.replace(
        ready.result, training=record, command=environment.command, model=loop.train_state.model
    )


def _refuse_ranks(environ: Mapping[str, str]) -> None:
    """One process trains: several would write over each other, each with a batch of its own."""
    ranks = environ.get("WORLD_SIZE", "1")
    if ranks != "1":
        raise InputError(
            f"WORLD_SIZE is {ranks}, and fit trains in one process: start it without torchrun, or take "
            "autobatch.plan(…) to your own loop across ranks"
        )


def _settings(options: FitOptions, out: Path, facts: dict[str, Any], command: str) -> RunSettings:
    return RunSettings(
        out=out,
        checkpoint_every=options.checkpoint_every,
        checkpoint_minutes=options.checkpoint_minutes,
        on_failed_save=options.on_failed_save,
        validate_every=options.validate_every,
        validation_micro_batch=options.validation_micro_batch,
        keep_last=options.keep_last,
        facts=facts,
        resume_hint=_resume_hint(command, out),
    )


def _facts(
    setup: TrainSetup, planned: Plan, options: FitOptions, sampler: GlobalBatchSampler
) -> dict[str, Any]:
    """What stands beside every checkpoint."""
    return {
        "plan": msgspec.to_builtins(planned),
        "key": describe_setup(setup).key,
        "seed": options.seed,
        "warmup_samples": options.warmup_samples,
        **data_order_facts(sampler),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """What a run depends on, by name."""
    return {"autobatch": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def _start(named: Workload | str | None, options: FitOptions, environment: RunContext, out: Path) -> _Ready:
    """Probe, plan and tune."""
    check_storage(options)
    result, facts = plan_only(named, options, environment)
    earlier = move_earlier_run(out)
    if earlier is not None:
        environment.progress.note(f"an earlier run of {out} was moved to {earlier}")
    # A child that runs trials needs the memory that a bench here would hold.
    setup = None if environment.isolates(named) else _bench(named, options, environment)
    since = environment.clock()
    if options.trials:
        result = tuned(result, facts, named, options, environment, setup=setup)
    if options.tune_lr:
        result = rate_tuned(result, facts, named, options, environment, since=since, setup=setup)
    assert result.plan is not None
    return _Ready(result, result.plan, setup or _bench(named, options, environment))


def _go_on(
    named: Workload | str | None,
    options: FitOptions,
    environment: RunContext,
    resumed: Loaded,
    sampler: GlobalBatchSampler,
) -> _Ready:
    """The stored plan where all is as it was, else a new one of the same batch."""
    progress = environment.progress
    for line in resumed.passed_over:
        progress.note(f"passed over: {line}")
    planned = load_plan(resumed, options)
    setup = _bench(named, options, environment)
    check_same_data_order(resumed, sampler, scheduled=setup.workload.schedule is not None)
    facts = describe_setup(setup)
    others = changes_since_checkpoint(resumed, facts.key, planned, options)
    if not others:
        progress.note(f"going on from {resumed.path}: same hardware, bit for bit")
        progress.opened(facts.device)
        progress.planned(planned)
        result = Result(device=facts.device, plan=planned, title=facts.name)
        return _Ready(result, planned, setup, resumed, is_same=True)
    progress.note(
        f"going on from {resumed.path} with another {' and another '.join(others)}: the batch, the learning "
        "rate and the order of the data stay, the micro-batch is planned anew, and sums differ by rounding"
    )
    result, _ = plan_only(named, options, environment)
    assert result.plan is not None
    rate = {
        name: getattr(planned, name) for name in Plan.__struct_fields__ if name.startswith("learning_rate")
    }
    planned = msgspec.structs.replace(result.plan, **rate)
    return _Ready(msgspec.structs.replace(result, plan=planned), planned, setup, resumed)


def _bench(named: Workload | str | None, options: FitOptions, environment: RunContext) -> TrainSetup:
    return open_setup(find_workload(named), options, environ=environment.environ, demo=named is None)


def _with_length(options: FitOptions, *, is_demo: bool) -> FitOptions:
    """The options with a length of the run, where none was asked for."""
    if options.steps is not None and options.epochs is not None:
        raise InputError(
            f"--steps {options.steps} and --epochs {options.epochs} exclude each other: give one"
        )
    if options.steps is None and options.epochs is None:
        length = {"steps": demo.STEPS} if is_demo else {"epochs": 1}
        return msgspec.structs.replace(options, **length)
    return options


def _resume_hint(command: str, out: Path) -> str:
    if not command:
        return f"autobatch.fit(…, out={str(out)!r}, resume=True)"
    words = command.replace(" --resume", "")
    return f"{words} --resume" if "--out" in words else f"{words} --out {out} --resume"


def _write(result: Result, out: Path, progress: Progress) -> Result:
    """Write ``result.json`` and the report; a report that fails is a note, for the training is done."""
    result = msgspec.structs.replace(
        result,
        out=out,
        report=out / REPORT,
        versions=versions(),
        created=datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        checkpoints=[int(path.name.removeprefix("step-")) for path in list_checkpoints(out / CHECKPOINTS)],
    )
    _write_json(result, out)
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


def probe(workload: Workload | str | None = None, **options: Any) -> ProbeResult:
    """Find the largest micro-batch that fits.

    Args:
        workload: what to train, or a reference to it; without it, the embedded demo.
        options: as of ``autobatch probe``, under the same names, as text or plain values.

    Raises:
        InputError: an option, the device or the workload cannot be.
        DoesNotFitError: not even a micro-batch of 1 fits.
    """
    result = run_probe_command(workload, options_from(ProbeOptions, options), RunContext())
    assert result.probe is not None
    return ProbeResult(**_fields(result.probe), device=result.device)


def plan(workload: Workload | str | None = None, **options: Any) -> PlanResult:
    """Probe, then plan the batch; train in your own loop.

    Args:
        workload: what to train, or a reference to it; without it, the embedded demo.
        options: as of ``autobatch plan``; ``target_batch`` is needed.

    Raises:
        InputError: an option, the device or the workload cannot be.
        DoesNotFitError: not even a micro-batch of 1 fits.
    """
    result = run_plan_command(workload, options_from(PlanOptions, options), RunContext())
    assert result.plan is not None
    assert result.probe is not None
    return PlanResult(**_fields(result.plan), device=result.device, probe=result.probe)


def estimate(workload: Workload | str | None = None, **options: Any) -> Estimates:
    """Predict what fits on hardware that need not be here; touches no card.

    Args:
        workload: what to train, or a reference to it; without it, the embedded demo.
        options: as of ``autobatch estimate``; ``profile`` takes a list of names or files.

    Raises:
        InputError: an option, a profile or the workload cannot be.
        Unpredictable: the step cannot be traced; says why.
        DoesNotFitError: not even a micro-batch of 1 fits on any of the cards.
    """
    return run_estimate(workload, options_from(EstimateOptions, options), os.environ)


def tune(workload: Workload | str | None = None, **options: Any) -> Result:
    """Probe, plan, and measure what is left to choose.

    Args:
        workload: what to train, or a reference to it; without it, the embedded demo.
        options: as of ``autobatch tune``; ``target_batch`` is needed.

    Raises:
        InputError: an option, the device, the storage or the workload cannot be.
        DoesNotFitError: not even a micro-batch of 1 fits.
    """
    return run_tune_command(workload, options_from(TuneOptions, options), RunContext())


def fit(workload: Workload | str | None = None, **options: Any) -> Result:
    """All of it: probe, plan, tune, train, validate and report.

    Args:
        workload: what to train, or a reference to it; without it, the embedded demo.
        options: as of ``autobatch fit``; ``target_batch`` is needed.

    Returns:
        The records of every part, and the trained ``model``.

    Raises:
        InputError: an option, the device, the storage or the workload cannot be.
        DoesNotFitError: not even a micro-batch of 1 fits.
        AutobatchError: see `autobatch.training.run.train`.
    """
    return run_fit_command(workload, options_from(FitOptions, options), RunContext())


def _fields(record: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}
