"""``fit``: probe, plan, tune, train, report; and going on with a run that was stopped."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from autobatch import __version__, demo
from autobatch.attempt import Bench
from autobatch.bench import facts_of, find_workload, open_bench, with_knobs
from autobatch.config import FitOptions
from autobatch.errors import InputError
from autobatch.files import write_atomic
from autobatch.knobs import LOADER_WORKERS
from autobatch.progress import Progress
from autobatch.rating import rate_tuned
from autobatch.records import Plan
from autobatch.report.data import load_run
from autobatch.report.page import write_report
from autobatch.results import Result
from autobatch.stages import Environment, check_storage, plan_only, tuned
from autobatch.state import seed_everything
from autobatch.step import assemble
from autobatch.training.advice import batch_norms
from autobatch.training.checkpoint import Loaded, clean_leftovers, list_checkpoints, load_newest
from autobatch.training.evaluation import rehearse
from autobatch.training.feed import card_of, open_feed
from autobatch.training.loop import Loop
from autobatch.training.run import CHECKPOINTS, METRICS, RunSettings, train
from autobatch.training.selfcheck import check_decomposes
from autobatch.training.weights import AVERAGED_WEIGHTS, WEIGHTS
from autobatch.training.windows import Course
from autobatch.workload import Workload, kind_of, user_code

RUNS = Path("runs")
RESULT = "result.json"
REPORT = "report.html"


def run_fit_command(workload: Workload | str | None, options: FitOptions, environment: Environment) -> Result:
    """``autobatch fit``.

    Raises:
        InputError: an option, the workload, or what stands in the run's folder cannot be.
        AutobatchError: see `autobatch.training.run.train`.
    """
    _refuse_ranks(environment.environ)
    found = find_workload(workload)
    options = _with_length(options, is_demo=workload is None)
    out = _folder(options, found.name)
    _refuse_unwritable(out)
    environment.entered(out)
    resumed = _load(out, options) if options.resume else None
    if resumed is None:
        result, bench = _start(workload, options, environment, out)
    else:
        result, bench = _go_on(workload, options, environment, resumed)
    assert result.plan is not None
    key = facts_of(bench).key
    bench = with_knobs(bench, result.plan.knobs)
    course = _course(bench.workload, options)
    micro_batch = result.plan.micro_batch
    for line in check_decomposes(bench, micro_batch=micro_batch, course=course, check=options.split_check):
        environment.progress.note(line)
    feeding = _feeding(result.plan, options, resumed, environment.progress)
    with (
        bench.device.training() as meter,
        open_feed(bench.workload, course.windows, card=card_of(bench.device), **feeding) as feed,
    ):
        loop = _open_loop(bench, result.plan, options, meter)
        loop.feed = feed
        rehearse(bench.workload, loop.trainee, device=bench.device, meter=meter)
        facts = {
            "plan": msgspec.to_builtins(result.plan),
            "key": key,
            "seed": options.seed,
            "windows": loop.course.total,
            "sample_seeds": feed is not None,
            "versions": versions(),
        }
        settings = _settings(options, out, facts, environment.command)
        if resumed is not None:
            _same_horizon(resumed, loop)
            loop.load_state_dict(resumed.state, same_hardware=_same_hardware(resumed, key))
        record = train(loop, settings, environment.progress, resumed)
    result = msgspec.structs.replace(
        result, training=record, command=environment.command, model=loop.trainee.model
    )
    return _write(result, out, environment.progress)


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


def _feeding(
    planned: Plan, options: FitOptions, resumed: Loaded | None, progress: Progress
) -> dict[str, Any]:
    """How the loop is fed; a run whose samples are seeded goes on so, whatever joins them."""
    workers = options.workers
    if workers is None:
        workers = int(planned.knobs.get(LOADER_WORKERS) or 0)
    seeded = options.sample_seeds or workers > 0
    if resumed is not None:
        before = bool(resumed.facts.get("sample_seeds"))
        if seeded and not before:
            progress.note(
                "the samples were not seeded one by one so far, and are from here on: where data is drawn at "
                "random, the rest is not what the run would have been; --workers 0 goes on as before"
            )
        seeded = seeded or before
    return {"seed": options.seed, "workers": workers, "prefetch": options.prefetch, "sample_seeds": seeded}


def versions() -> dict[str, str]:
    """What a run depends on, by name."""
    return {"autobatch": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def _start(
    named: Workload | str | None, options: FitOptions, environment: Environment, out: Path
) -> tuple[Result, Bench]:
    """Probe, plan and tune; the bench to train on."""
    check_storage(options)
    result, facts = plan_only(named, options, environment)
    _set_aside(out)
    in_child = environment.isolated and not isinstance(named, Workload)
    # A child that runs trials needs the memory that a bench here would hold.
    bench = None if in_child else _bench(named, options, environment)
    since = environment.clock()
    if options.trials:
        result = tuned(result, facts, named, options, environment, bench=bench)
    if options.tune_lr:
        result = rate_tuned(result, facts, named, options, environment, since=since, bench=bench)
    return result, bench or _bench(named, options, environment)


def _go_on(
    named: Workload | str | None, options: FitOptions, environment: Environment, resumed: Loaded
) -> tuple[Result, Bench]:
    """The stored plan on the hardware that it was made for, else a new one of the same batch."""
    progress = environment.progress
    for line in resumed.passed_over:
        progress.note(f"passed over: {line}")
    planned = _stored_plan(resumed, options)
    bench = _bench(named, options, environment)
    facts = facts_of(bench)
    if _same_hardware(resumed, facts.key):
        progress.note(f"going on from {resumed.path}: same hardware, bit for bit")
        progress.opened(facts.device)
        progress.planned(planned)
        return Result(device=facts.device, plan=planned, title=facts.name), bench
    progress.note(
        f"going on from {resumed.path} on other hardware: the batch, the learning rate and the order of the "
        "data stay, the micro-batch is planned anew, and sums differ by rounding"
    )
    result, _ = plan_only(named, options, environment)
    assert result.plan is not None
    rate = {
        name: getattr(planned, name) for name in Plan.__struct_fields__ if name.startswith("learning_rate")
    }
    return msgspec.structs.replace(result, plan=msgspec.structs.replace(result.plan, **rate)), bench


def _bench(named: Workload | str | None, options: FitOptions, environment: Environment) -> Bench:
    return open_bench(find_workload(named), options, environ=environment.environ, demo=named is None)


def _open_loop(bench: Bench, planned: Plan, options: FitOptions, meter: Any) -> Loop:
    workload = bench.workload
    seed_everything(options.seed)
    meter.mark("setup")
    model = bench.model.to(bench.device.torch_device)
    meter.adopt(tensor.data for tensor in [*model.parameters(), *model.buffers()])
    trainee = assemble(
        workload,
        model,
        bench.device.torch_device,
        precision=planned.precision,
        learning_rate=planned.learning_rate,
        max_grad_norm=options.max_grad_norm,
        ema=options.ema,
        knobs=planned.knobs,
    )
    course = _course(workload, options)
    schedules = []
    if workload.schedule is not None:
        with user_code("schedule"):
            schedules = [workload.schedule(optimizer, course.total) for optimizer in trainee.optimizers]
        for one in schedules:
            if not (hasattr(one, "step") and hasattr(one, "state_dict")):
                raise InputError(
                    f"Workload(schedule=…) returned {kind_of(one)}, not a schedule of torch.optim"
                )
    return Loop(
        workload=workload,
        trainee=trainee,
        course=course,
        device=bench.device,
        meter=meter,
        micro_batch=planned.micro_batch,
        schedules=schedules,
        on_nonfinite=options.on_nonfinite,
        rescaled_norms=batch_norms(trainee.model) if options.bn_momentum == "auto" else [],
    )


def _course(workload: Workload, options: FitOptions) -> Course:
    course = Course(
        samples=len(workload.train_data),  # type: ignore[arg-type]
        target_batch=options.target_batch,
        seed=options.seed,
        steps=options.steps,
        epochs=options.epochs,
        last_window=options.last_window,
    )
    if course.total == 0:
        raise InputError(
            f"--last-window drop leaves no window: {course.samples} samples for a target batch of "
            f"{course.target_batch}; carry or flush keeps them"
        )
    return course


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


def _folder(options: FitOptions, name: str) -> Path:
    if options.out is not None:
        return Path(options.out)
    runs = RUNS / name
    if options.resume:
        known = (
            sorted(path for path in runs.iterdir() if (path / CHECKPOINTS).is_dir()) if runs.is_dir() else []
        )
        if not known:
            raise InputError(f"--resume found no run in {runs}: give --out DIR, or start without --resume")
        return known[-1]
    stamp = datetime.datetime.now(tz=datetime.UTC).strftime("%Y%m%d-%H%M%S")
    out = runs / stamp
    number = 1
    while out.exists():
        number += 1
        out = runs / f"{stamp}-{number}"
    return out


def _refuse_unwritable(out: Path) -> None:
    """Say that a run's folder cannot be written before minutes are spent, and make nothing yet."""
    place = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        why = "is no folder" if not place.is_dir() else "cannot be written"
        raise InputError(f"the run's folder {out} cannot be made: {place} {why}; give another --out")


def _load(out: Path, options: FitOptions) -> Loaded:
    clean_leftovers(out / CHECKPOINTS)
    loaded = load_newest(out / CHECKPOINTS)
    if loaded is None:
        raise InputError(f"--resume found no checkpoint in {out / CHECKPOINTS}: start without --resume")
    return loaded


def _stored_plan(resumed: Loaded, options: FitOptions) -> Plan:
    try:
        planned = msgspec.convert(resumed.facts["plan"], Plan)
    except (KeyError, msgspec.ValidationError) as error:
        raise InputError(f"{resumed.path} holds no plan that can be read: {error}") from None
    if planned.target_batch != options.target_batch:
        raise InputError(
            f"--target-batch {options.target_batch} does not match the run in {resumed.path}, which has a "
            f"target batch of {planned.target_batch}: give that, or start without --resume"
        )
    if resumed.facts.get("seed") != options.seed:
        raise InputError(
            f"--seed {options.seed} does not match the run in {resumed.path}, which has seed "
            f"{resumed.facts.get('seed')}: the order of the data would change"
        )
    return planned


def _same_hardware(resumed: Loaded, key: dict[str, Any]) -> bool:
    """Whether what is bit-exact only on the same device and build may be taken over."""
    stored = resumed.facts.get("key", {})
    names = ("device", "device_kind", "torch", "precision", "total_bytes")
    return all(stored.get(name) == key.get(name) for name in names)


def _same_horizon(resumed: Loaded, loop: Loop) -> None:
    """A schedule that was made for so many steps cannot go on for others."""
    total = resumed.facts.get("windows")
    if loop.schedules and total != loop.course.total:
        raise InputError(
            f"the run in {resumed.path} and its schedule are for {total} optimizer steps, this is for "
            f"{loop.course.total}: give the same --steps or --epochs, or start without --resume"
        )


def _set_aside(out: Path) -> None:
    """Move an earlier run of the same folder out of the way: nothing is lost, nothing is mixed."""
    names = (CHECKPOINTS, METRICS, WEIGHTS, AVERAGED_WEIGHTS, RESULT, REPORT)
    old = [path for path in (out / name for name in names) if path.exists()]
    if not old:
        return
    number = 1
    while (out / f"previous-{number}").exists():
        number += 1
    folder = out / f"previous-{number}"
    folder.mkdir(parents=True)
    for path in old:
        path.rename(folder / path.name)


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
