"""``fit``: probe, plan, tune, train, report; and going on with a run that was stopped."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from autobatch import __version__, demo
from autobatch.attempt import Bench
from autobatch.bench import facts_of, find_workload, open_bench, with_knobs
from autobatch.config import FitOptions
from autobatch.errors import InputError
from autobatch.files import write_atomic
from autobatch.progress import Progress
from autobatch.rating import rate_tuned
from autobatch.records import Plan
from autobatch.report.data import load_run
from autobatch.report.page import write_report
from autobatch.results import Result
from autobatch.stages import Environment, check_storage, plan_only, tuned
from autobatch.training.checkpoint import Loaded, list_checkpoints
from autobatch.training.continuing import (
    course_facts,
    differences,
    load_run_state,
    refuse_another_course,
    stored_plan,
)
from autobatch.training.folder import REPORT, RESULT, claimed, folder_of, set_aside
from autobatch.training.opening import course_of, opened
from autobatch.training.run import CHECKPOINTS, RunSettings, train
from autobatch.training.selfcheck import check_decomposes
from autobatch.training.windows import Course
from autobatch.workload import Workload


def run_fit_command(workload: Workload | str | None, options: FitOptions, environment: Environment) -> Result:
    """``autobatch fit``.

    Raises:
        InputError: an option, the workload, or what stands in the run's folder cannot be.
        AutobatchError: see `autobatch.training.run.train`.
    """
    _refuse_ranks(environment.environ)
    found = find_workload(workload)
    options = _with_length(options, is_demo=workload is None)
    course = course_of(found, options)
    out = folder_of(options.out, found.name, resume=options.resume)
    del found  # it is opened once more, and may hold much
    with claimed(out):
        environment.entered(out)
        if options.resume:
            ready = _go_on(workload, options, environment, load_run_state(out), course)
        else:
            ready = _start(workload, options, environment, out)
        result = _trained(ready, options, environment, course, out)
        return _write(result, out, environment.progress)


class _Ready(NamedTuple):
    """A run that can be trained."""

    result: Result
    """With its plan."""
    planned: Plan
    bench: Bench
    resumed: Loaded | None = None
    is_same: bool = False
    """Whether all is as it was where the run was stopped."""


def _trained(
    ready: _Ready, options: FitOptions, environment: Environment, course: Course, out: Path
) -> Result:
    planned, resumed, note = ready.planned, ready.resumed, environment.progress.note
    facts = _facts(ready.bench, planned, options, course)
    bench = with_knobs(ready.bench, planned.knobs)
    check, size = options.split_check, planned.micro_batch
    for line in check_decomposes(bench, micro_batch=size, course=course, check=check):
        note(line)
    seeded_before = None if resumed is None else bool(resumed.facts.get("sample_seeds"))
    with opened(bench, planned, options, course, seeded_before=seeded_before, note=note) as loop:
        if resumed is not None:
            loop.load_state_dict(resumed.state, same_hardware=ready.is_same)
        facts["sample_seeds"] = loop.feed is not None
        settings = _settings(options, out, facts, environment.command)
        record = train(loop, settings, environment.progress, resumed)
    return msgspec.structs.replace(
        ready.result, training=record, command=environment.command, model=loop.trainee.model
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


def _facts(bench: Bench, planned: Plan, options: FitOptions, course: Course) -> dict[str, Any]:
    """What stands beside every checkpoint."""
    return {
        "plan": msgspec.to_builtins(planned),
        "key": facts_of(bench).key,
        "seed": options.seed,
        "warmup_samples": options.warmup_samples,
        **course_facts(course),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """What a run depends on, by name."""
    return {"autobatch": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def _start(named: Workload | str | None, options: FitOptions, environment: Environment, out: Path) -> _Ready:
    """Probe, plan and tune."""
    check_storage(options)
    result, facts = plan_only(named, options, environment)
    earlier = set_aside(out)
    if earlier is not None:
        environment.progress.note(f"an earlier run of {out} was moved to {earlier}")
    # A child that runs trials needs the memory that a bench here would hold.
    bench = None if environment.isolates(named) else _bench(named, options, environment)
    since = environment.clock()
    if options.trials:
        result = tuned(result, facts, named, options, environment, bench=bench)
    if options.tune_lr:
        result = rate_tuned(result, facts, named, options, environment, since=since, bench=bench)
    assert result.plan is not None
    return _Ready(result, result.plan, bench or _bench(named, options, environment))


def _go_on(
    named: Workload | str | None,
    options: FitOptions,
    environment: Environment,
    resumed: Loaded,
    course: Course,
) -> _Ready:
    """The stored plan where all is as it was, else a new one of the same batch."""
    progress = environment.progress
    for line in resumed.passed_over:
        progress.note(f"passed over: {line}")
    planned = stored_plan(resumed, options)
    bench = _bench(named, options, environment)
    refuse_another_course(resumed, course, scheduled=bench.workload.schedule is not None)
    facts = facts_of(bench)
    others = differences(resumed, facts.key, planned, options)
    if not others:
        progress.note(f"going on from {resumed.path}: same hardware, bit for bit")
        progress.opened(facts.device)
        progress.planned(planned)
        result = Result(device=facts.device, plan=planned, title=facts.name)
        return _Ready(result, planned, bench, resumed, is_same=True)
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
    return _Ready(msgspec.structs.replace(result, plan=planned), planned, bench, resumed)


def _bench(named: Workload | str | None, options: FitOptions, environment: Environment) -> Bench:
    return open_bench(find_workload(named), options, environ=environment.environ, demo=named is None)


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
