"""The pipeline of all commands.

    options ──► setup ──► footprint ──► search ──► plan ──► [tune] ──► loop ──► report
                          (traced)      (run)    (exact)   (Optuna)            (facts)

With an isolated `RunContext`, one child process opens the workload for the search, the trials and the short
runs, and this process opens it once more for the training. A resume is the pipeline with a stored plan: the
stages before the training run again only if something has changed that the plan depends on.
"""

from __future__ import annotations

import datetime
import platform
import shlex
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from autobatch.api.context import RunContext
from autobatch.api.ranks import check_data_of_ranks, checked_options, claim_of_ranks, continued
from autobatch.api.stages import (
    OPENING,
    finish_plan,
    open_choice,
    refuse_weights,
    search_and_plan,
    shard_layout,
    sizes_of,
    uninterrupted,
)
from autobatch.core.files import write_atomic
from autobatch.core.options import Options
from autobatch.core.progress import Progress
from autobatch.core.records import Plan, RunRecord, Tuning
from autobatch.core.text import error_text
from autobatch.core.version import commit, versions
from autobatch.device.host import usable_cores
from autobatch.device.nvml import driver_version
from autobatch.device.profiles import data_home
from autobatch.distributed.rank_plan import layout_of
from autobatch.distributed.ranks import Ranks
from autobatch.distributed.sharding.layout import ShardLayout
from autobatch.distributed.shared_stream import open_stream, split_note
from autobatch.estimates.estimator import estimate_limits
from autobatch.report.result import Estimates, Result, load_run
from autobatch.search.sizes.real_batches import Order
from autobatch.setup.child import SetupProcess, ThisProcess
from autobatch.setup.setup import KeyValue, Role, Setup, data_of_setup, device_key, open_setup
from autobatch.training.build import (
    build_sampler,
    count_stream,
    depends_on_end,
    order_changes,
    split_changes,
    stream_length,
)
from autobatch.training.checkpoints.checkpoint import list_checkpoints
from autobatch.training.checkpoints.load import Loaded
from autobatch.training.export import whole_model
from autobatch.training.resume import (
    changes_since_checkpoint,
    check_same_data_order,
    load_plan,
    load_run_state,
)
from autobatch.training.run import PreparedRun, train_plan
from autobatch.training.run_folder import (
    CHECKPOINTS,
    REPORT,
    RESULT,
    RunFiles,
    folder_of,
    move_earlier_run,
)
from autobatch.workload import demo
from autobatch.workload.contract import Workload
from autobatch.workload.data_digest import DataDigest, check_same_data
from autobatch.workload.order import GlobalBatchSampler, epoch_of
from autobatch.workload.reference import find_workload, shared_model_notes
from autobatch.workload.streams import ENDLESS, count_samples

PLANNED_STEPS = 1000
"""Optimizer steps of the run that is tuned for, if nothing says how many."""
BEFORE_TRAINING = ("device", "probe", "tuning", "title", "predicted", "memory_curve")
"""Records of the parts before the training, which every checkpoint keeps for a resume."""


class ReadyRun(NamedTuple):
    """A run that is ready to be trained, and its folder."""

    result: Result
    """Records of the parts before the training."""
    run: PreparedRun
    out: Path


class StoredRun(NamedTuple):
    """A run to resume, with the setup that it continues in."""

    checkpoint: Loaded
    plan: Plan
    setup: Setup
    sampler: GlobalBatchSampler
    data: DataDigest | None
    out: Path
    changes: list[str]
    """What rules out the stored plan, in the user's words; empty if the run continues with it."""


def run(workload: Workload | str | None, options: Options, context: RunContext) -> Result:
    """Run ``autobatch probe``, ``plan``, ``tune`` or ``fit``; all ranks call it.

    An interrupted probe of one process answers with the largest size so far, except for ``tune`` and ``fit``.

    Raises:
        InputError: an option, the workload, or the content of the run's folder is invalid.
        DoesNotFitError: not even a micro-batch of 1 fits.
        AutobatchError: see `autobatch.training.run.train`.
    """
    command = _repeat_command(context.command, options)
    options = checked_options(options, context.ranks)
    _check_storage(options)
    if options.command == "fit":
        return _fit(workload, continued(options, context.ranks), replace(context, command=command))
    with ExitStack() as opened:
        first = open_choice(workload, options, context, opened)
        planned = search_and_plan(workload, options, context, first, opened)
        return finish_plan(planned, options, context, PLANNED_STEPS)


def run_estimate(workload: Workload | str | None, options: Options, environ: Mapping[str, str]) -> Estimates:
    """Run ``autobatch estimate``.

    Raises:
        InputError: the options exclude each other, or the workload is invalid.
    """
    return estimate_limits(find_workload(workload, options.device.seed), options, home=data_home(environ))


def _check_storage(options: Options) -> None:
    """Check that a requested storage is usable, before minutes are spent on a probe."""
    if options.tune.storage is not None and (options.tune.trials != 0 or options.tune.tune_lr):
        # Only here: Optuna takes half a second to import.
        from autobatch.tuning.study import check_storage

        check_storage(options.tune.storage)


def _fit(workload: Workload | str | None, options: Options, context: RunContext) -> Result:
    """Plan a run or take its stored plan, train it, and write the result and the report."""
    ranks = context.ranks
    ranks.limit_wait(options.ranks.collective_timeout)
    if options.train.steps is None and options.train.epochs is None:
        options = options.with_values(**({"steps": demo.STEPS} if workload is None else {"epochs": 1}))
    with ExitStack() as held:
        ready = prepare(workload, options, context, held)
        setup = ready.run.setup
        for line in shared_model_notes(setup.workload, setup.model):
            context.progress.note(line)
        hint = _resume_hint(context.command, ready.out)
        training, model = train_plan(
            ready.run,
            RunFiles(out=ready.out, options=options, resume_hint=hint, sinks=context.sinks),
            progress=context.progress,
            ranks=ranks,
        )
        whole: nn.Module | None = model
        if ready.run.plan.parallel == "shard":
            # The command line has no use for it.
            is_wanted = ranks.rank == 0 and not context.isolated
            whole = whole_model(setup.model, model, ready.out) if is_wanted else None
        result = msgspec.structs.replace(
            ready.result,
            training=training,
            model=whole,
            command=context.command,
            options=options.by_name(),
            surroundings=_surroundings(),
        )
        return _write(result, ready.out, context.progress) if ranks.rank == 0 else result


def prepare(
    workload: Workload | str | None, options: Options, context: RunContext, held: ExitStack
) -> ReadyRun:
    """Take the stored plan of a run to resume, else search, plan and tune in one process.

    Args:
        workload: what to train.
        options: options of the command.
        context: surroundings of the call.
        held: keeps the folder of the run locked.
    """
    stored = _open_stored(workload, options, context, held) if options.train.resume else None
    if stored is not None and not stored.changes:
        return _continued(stored, context.progress)
    ranks = context.ranks
    if stored is not None:
        options = _options_again(options, stored, ranks)
    with ExitStack() as opened:
        first = open_choice(workload, options, context, opened)
        process = first.process
        if stored is None:
            samples = _epoch_samples(process, options, context)
            steps, name = build_sampler(samples, options).total, process.info.name
            out = claim_of_ranks(
                lambda: folder_of(options.train.out, name, resume=False), ranks, context.entered, held
            )
            if first.shard is None:
                refuse_weights(process)
        else:
            samples, steps, out = stored.sampler.samples, stored.sampler.total, stored.out
        planned = search_and_plan(workload, options, context, first, opened)
        uninterrupted(planned.result)
        # A run that the launcher has started again has no earlier one.
        is_first = stored is None and ranks.restart == 0
        earlier = ranks.once(lambda: move_earlier_run(out)) if is_first else None
        if earlier is not None:
            context.progress.note(f"moved the earlier run of {out} to {earlier}")
        result = finish_plan(planned, options, context, steps, _order(options))
        process, _, shard = planned
        sizes = sizes_of(process, result)
    # A child has ended by now, and its memory is free for the training.
    data, key = process.info.data, process.info.key
    if stored is not None:
        return _replanned(stored, result, key)
    assert result.plan is not None
    if isinstance(process, ThisProcess) and shard is None:
        setup = process.setup
    else:
        setup = _open_to_train(workload, options, context, shard)
        check_same_data([data, data_of_setup(setup)], ["the probe", "the process that trains"])
    if sizes is not None:
        setup.worst_case.take_sizes(sizes)
    prepared = PreparedRun(
        setup=_budgeted(setup, key),
        plan=result.plan,
        sampler=_sampler_of(setup, options, samples, context),
        key=key,
        facts=_facts(result, data),
    )
    return ReadyRun(result, prepared, out)


def _open_stored(
    workload: Workload | str | None, options: Options, context: RunContext, held: ExitStack
) -> StoredRun:
    """Open the run to resume, and compare it with what is asked for now.

    Raises:
        InputError: there is none, or it cannot continue with these options or data.
    """
    ranks = context.ranks
    context.progress.doing(OPENING)
    found = find_workload(workload, options.device.seed)
    out = claim_of_ranks(
        lambda: folder_of(options.train.out, found.name, resume=True), ranks, context.entered, held
    )
    checkpoint = load_run_state(out, ranks)
    for line in checkpoint.passed_over:
        context.progress.note(f"skipped an invalid checkpoint: {line}")
    plan = load_plan(checkpoint, options)
    setup = _open_to_train(found, options, context, _layout_of_resume(plan, options, ranks), workload is None)
    sampler = _sampler_of(setup, options, None, context)
    check_same_data_order(checkpoint, sampler, scheduled=setup.workload.schedule is not None)
    data = data_of_setup(setup)
    check_data_of_ranks(data, ranks, checkpoint)
    changes = changes_since_checkpoint(
        checkpoint,
        device_key(setup),
        plan,
        ranks,
        max_micro_batch=options.search.max_micro_batch,
        set_budget=None if options.device.memory_budget is None else setup.device.budget_bytes,
    )
    changes += split_changes(setup, plan, options.batch.split) + order_changes(setup, plan, sampler)
    changes += [] if setup.layout == layout_of(plan) else ["--parallel"]
    changes = sorted({change for of_rank in ranks.gather(changes) for change in of_rank})
    return StoredRun(checkpoint, plan, setup, sampler, data, out, changes)


def _continued(stored: StoredRun, progress: Progress) -> ReadyRun:
    """Continue a run with its own plan."""
    checkpoint, plan, setup, data = stored.checkpoint, stored.plan, stored.setup, stored.data
    # Nothing is claimed of a stream, and of values that are random by nature.
    exactly = ", bit for bit" if data is not None and data.is_fixed else ""
    progress.note(f"resuming from {checkpoint.path} on the same hardware{exactly}")
    device = setup.device.describe()
    progress.opened(device)
    progress.planned(plan)
    result = _stored_result(checkpoint.facts, Result(device=device, plan=plan, title=setup.workload.name))
    return _ready(stored, result, checkpoint.facts.get("key", {}), is_exact=True)


def _replanned(stored: StoredRun, result: Result, key: Mapping[str, KeyValue]) -> ReadyRun:
    """Continue a run with another plan, at its learning rate."""
    assert result.plan is not None
    names = [name for name in Plan.__struct_fields__ if name.startswith("learning_rate")]
    plan = msgspec.structs.replace(result.plan, **{name: getattr(stored.plan, name) for name in names})
    tuning = _tuned_elsewhere(_stored_result(stored.checkpoint.facts, result).tuning)
    result = msgspec.structs.replace(result, plan=plan, tuning=tuning)
    return _ready(stored, result, key, is_exact=False)


def _ready(stored: StoredRun, result: Result, key: Mapping[str, KeyValue], *, is_exact: bool) -> ReadyRun:
    assert result.plan is not None
    prepared = PreparedRun(
        setup=_budgeted(stored.setup, key),
        plan=result.plan,
        sampler=stored.sampler,
        key=key,
        facts=_facts(result, stored.data),
        resumed=stored.checkpoint,
        is_exact=is_exact,
    )
    return ReadyRun(result, prepared, stored.out)


def _options_again(options: Options, stored: StoredRun, ranks: Ranks) -> Options:
    """Return the options to plan a changed run with: in the layout that it was opened in, and not tuned."""
    options = options.with_values(trials=0, tune_lr=False)
    layout = stored.setup.layout
    if ranks.world == 1:
        return options
    if layout is None:
        return options.with_values(parallel="replicate")
    return options.with_values(parallel="shard", shard_sync=layout.sync, shard_modules=layout.modules)


def _layout_of_resume(plan: Plan, options: Options, ranks: Ranks) -> ShardLayout | None:
    """Return the layout of the shared model of a resumed run: as asked, else as before."""
    if ranks.world == 1 or options.ranks.parallel == "replicate":
        return None
    if options.ranks.parallel == "shard":
        return shard_layout(options, ranks.world)
    before = layout_of(plan)
    return None if before is None else msgspec.structs.replace(before, world=ranks.world)


def _facts(result: Result, data: DataDigest | None) -> dict[str, Any]:
    """Return what a resume takes over: the records of the parts before the training, and the data."""
    return {"records": result.to_json(*BEFORE_TRAINING, "profile"), "data": msgspec.to_builtins(data)}


def _stored_result(facts: Mapping[str, Any], result: Result) -> Result:
    """Return a result with the records that an earlier process of the run has stored, if there are any."""
    stored = facts.get("records", {})
    given = {name: stored[name] for name in BEFORE_TRAINING if stored.get(name) is not None}
    try:
        found = msgspec.convert(given, RunRecord)
    except msgspec.ValidationError:  # of a checkpoint without records
        return result
    profile = stored.get("profile")
    return msgspec.structs.replace(
        result,
        profile=None if profile is None else Path(profile),
        **{name: getattr(found, name) for name in BEFORE_TRAINING},
    )


def _tuned_elsewhere(tuning: Tuning | None) -> Tuning | None:
    """Return what was tuned before a resume on other hardware, with a note that its choices are not used."""
    if tuning is None or not tuning.trials:
        return tuning
    note = "the run went on with another plan, without the choices that were made before"
    return msgspec.structs.replace(tuning, notes=[*tuning.notes, note])


def _order(options: Options) -> Order:
    """Return the batches of the run, for the stages that look at them."""
    train = options.train
    return Order(
        options.target_batch,
        options.device.seed,
        last_batch=train.last_batch,
        steps=train.steps,
        epochs=train.epochs,
    )


def _open_to_train(
    workload: Workload | str | None,
    options: Options,
    context: RunContext,
    shard: ShardLayout | None,
    is_demo: bool | None = None,
) -> Setup:
    """Open the setup for the training; rank 0 holds a model that ranks share."""
    ranks = context.ranks
    context.progress.doing(OPENING)
    found = find_workload(workload, options.device.seed)
    role = Role(world=ranks.world, shard=shard, holds_model=ranks.rank == 0, trains=True)
    is_demo = workload is None if is_demo is None else is_demo
    return open_setup(found, options, role, environ=context.environ, is_demo=is_demo)


def _budgeted(setup: Setup, key: Mapping[str, KeyValue]) -> Setup:
    """Return a setup with the budget of a probe, as its key has it, so that training has the same."""
    budget_bytes = key.get("budget_bytes")
    return setup if budget_bytes is None else replace(setup, device=setup.device.budgeted(int(budget_bytes)))


def _epoch_samples(process: SetupProcess, options: Options, context: RunContext) -> int:
    """Return the samples of an epoch. A stream is counted only if the run depends on its end."""
    if process.info.epoch_samples is not None:
        return process.info.epoch_samples
    if not depends_on_end(options):
        return ENDLESS
    told = context.ranks.once(lambda: process.call("the length of the stream", stream_length))
    if told is not None:
        return told
    context.progress.note(
        "--epochs or --last-batch needs the number of samples, so the stream is read once to its end: give "
        "--steps if it has no end"
    )
    return context.ranks.once(lambda: process.call("counting the samples", count_stream))


def _sampler_of(
    setup: Setup, options: Options, samples: int | None, context: RunContext
) -> GlobalBatchSampler:
    """Return the batches of the run; ``samples`` of an epoch of a stream are None if not counted yet."""
    if setup.stream is not None:
        stream, ranks = setup.stream, context.ranks
        if samples is None:
            samples = ranks.once(lambda: count_samples(stream)) if depends_on_end(options) else ENDLESS
        note = split_note(setup.workload.train_data[0], ranks)  # type: ignore[index]
        if note is not None:
            context.progress.note(note)
        return build_sampler(samples, options, view=open_stream(stream, ranks, options.device.seed))
    samples, order = epoch_of(setup.workload, options.device.seed)
    return build_sampler(samples, options, order)


def _repeat_command(command: str, options: Options) -> str:
    """Return the command that runs the whole run again, without the resume that only ends it."""
    if not options.train.resume or not command:
        return command
    words = shlex.split(command)
    # An option of a config file or of the environment is overridden.
    return shlex.join([word for word in words if word != "--resume"] or words) + (
        "" if "--resume" in words else " --no-resume"
    )


def _resume_hint(command: str, out: Path) -> str:
    """Return the command, quoted for a shell, or the call that resumes the run."""
    if not command:
        return f"autobatch.fit(…, out={str(out)!r}, resume=True)"
    words = [word for word in shlex.split(command) if word != "--resume"]
    has_folder = any(word == "--out" or word.startswith("--out=") for word in words)
    return shlex.join([*words, *(() if has_folder else ("--out", str(out))), "--resume"])


def _write(result: Result, out: Path, progress: Progress) -> Result:
    """Write ``result.json`` and the report. A failed report is only noted, because the training is done."""
    result = msgspec.structs.replace(
        result,
        out=out,
        report=out / REPORT,
        versions=versions(),
        created=datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        checkpoints=[int(path.name.removeprefix("step-")) for path in list_checkpoints(out / CHECKPOINTS)],
    )
    _write_json(result, out)
    progress.doing("writing the report")
    # Only here: matplotlib takes half a second to import.
    from autobatch.report.page import write_report

    try:
        write_report(out / REPORT, load_run(out))
    except Exception as error:  # whatever drawing raises, the training is done
        why = f"{type(error).__name__}: {error_text(error)}"
        if isinstance(error, OSError):
            why = f"{error.filename or out / REPORT}: {error.strerror or error}"
        progress.note(f"the report could not be written: {why}")
        result = msgspec.structs.replace(result, report=None)
        _write_json(result, out)
    return result


def _surroundings() -> dict[str, str]:
    """Return what else a repetition would have to match: the source, cores and threads."""
    found = {
        "commit of the working directory": commit(Path.cwd()),
        "platform": platform.platform(),
        "cores": str(usable_cores()),
        "threads of torch": str(torch.get_num_threads()),
        "CUDA of torch": torch.version.cuda,
        "NVIDIA driver": driver_version(),
    }
    return {name: value for name, value in found.items() if value is not None}


def _write_json(result: Result, out: Path) -> None:
    content = msgspec.json.format(msgspec.json.encode(result.to_json()))
    write_atomic(out / RESULT, content + b"\n")
