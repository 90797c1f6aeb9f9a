"""The pipeline of all commands, as functions of one `Call`.

    options ──► setup ──► footprint ──► search ──► plan ──► [tune] ──► loop ──► report
                          (traced)      (run)    (exact)   (Optuna)            (facts)

`autobatch.api.stages` has the stages before the training. With an isolated call, a child process opens the
workload for them, and this process opens it once more for the training. A resume is the pipeline with a
stored plan: the stages before the training run again only if something has changed that the plan depends on.
"""

from __future__ import annotations

import datetime
import platform
import shlex
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from autobatch.api.call import Call
from autobatch.api.ranks import agree_on_options, check_data_of_ranks, claim_of_ranks, continue_after_restart
from autobatch.api.stages import OPENING, OpenSetup, finish_plan, layout_of_call, search_and_plan
from autobatch.core.files import write_atomic
from autobatch.core.records import Plan
from autobatch.core.text import error_text
from autobatch.core.version import versions
from autobatch.device.host import usable_cores
from autobatch.distributed.rank_plan import layout_of
from autobatch.distributed.sharding.layout import ShardLayout
from autobatch.distributed.shared_stream import open_stream, split_note
from autobatch.estimates.estimator import estimate_limits
from autobatch.estimates.hugging_face import estimate_named, refuse_model_options
from autobatch.estimates.snapshots import estimate_snapshots
from autobatch.rehearsal.process import ThisProcess
from autobatch.rehearsal.setup import KeyValue, Role, Setup, data_of_setup, open_setup
from autobatch.report.result import Estimates, Result, load_run
from autobatch.search.plan_split import read_sizes
from autobatch.training.build import build_sampler, count_stream
from autobatch.training.checkpoint import Loaded, list_checkpoints
from autobatch.training.export import examine_weights, whole_model
from autobatch.training.resume import (
    BEFORE_TRAINING,
    changes_since_checkpoint,
    check_same_data_order,
    load_plan,
    load_run_state,
    stored_records,
)
from autobatch.training.run import RunInputs, train_plan
from autobatch.training.run_folder import CHECKPOINTS, REPORT, RESULT, RunFiles, folder_of, move_earlier_run
from autobatch.training.trackers import check_trackers
from autobatch.workload import demo
from autobatch.workload.contract import Workload, schedule_arguments
from autobatch.workload.data_digest import DataDigest, check_same_data
from autobatch.workload.order import GlobalBatchSampler, epoch_of
from autobatch.workload.reference import find_workload, is_named_model, shared_model_notes
from autobatch.workload.rng import preserved_generators
from autobatch.workload.streams import COUNTED, ENDLESS, count_samples

GIT_SECONDS = 5.0
"""Time after which Git counts as absent, for example on a slow network file system."""


def run(call: Call) -> Result:
    """Run ``autobatch probe``, ``plan``, ``tune`` or ``fit``; all ranks call it.

    An interrupted probe of one process answers with the largest size so far, except for ``tune`` and ``fit``.

    Raises:
        InputError: an option, the workload, or the content of the run's folder is invalid.
        DoesNotFitError: not even a micro-batch of 1 fits.
        AutobatchError: see `autobatch.training.run.train`.
    """
    call.ranks.limit_wait(call.options.ranks.collective_timeout)
    call = agree_on_options(call)
    tune = call.options.tune
    if tune.storage is not None and (tune.trials != 0 or tune.tune_lr):
        # Only here: Optuna takes half a second to import.
        from autobatch.tuning.study import check_storage

        check_storage(tune.storage)
    if call.ranks.rank == 0:
        check_trackers(call.options.train.log)
    if call.options.command == "fit":
        return fit(continue_after_restart(call))
    with preserved_generators(call.workload), ExitStack() as opened:
        asked = call.options.train.out
        out = None if asked is None else claim_of_ranks(call, lambda: Path(asked), opened)
        setup = OpenSetup(call, opened)
        result = finish_plan(call, setup, _search_for(call, setup, out))
        return result if out is None else _write_result(call, result, out)


def _search_for(call: Call, setup: OpenSetup, out: Path | None) -> Result:
    """Search and plan, then move an earlier run out of the folder; None if no folder was asked for."""
    result, ranks = search_and_plan(call, setup), call.ranks
    # A run that the launcher has started again has no earlier one.
    if out is not None and ranks.earlier_out is None:
        earlier = ranks.once(lambda: move_earlier_run(out))
        if earlier is not None:
            call.progress.note(f"moved the earlier run of {out} to {earlier}")
    return result


def run_estimate(call: Call) -> Estimates:
    """Run ``autobatch estimate``.

    Raises:
        InputError: the options exclude each other, or the workload or a snapshot is invalid.
    """
    if call.options.search.snapshot:
        found = estimate_snapshots(call.options, home=call.home)
        if call.workload is None:
            return found
        note = "the workload was left out: --snapshot says what a program takes"
        return msgspec.structs.replace(found, notes=[note, *found.notes])
    if is_named_model(call.workload):
        return estimate_named(call.workload, call.options, home=call.home)
    refuse_model_options(call.workload, call.options.model)
    workload = find_workload(call.workload, call.options.device.seed)
    return estimate_limits(workload, call.options, home=call.home)


def fit(call: Call) -> Result:
    """Plan a run or take its stored plan, train it, and write the result and the report."""
    ranks, train = call.ranks, call.options.train
    call = replace(call, command=_repeat_command(call.command, resumes=train.resume))
    if train.steps is None and train.epochs is None:
        call = call.with_options(**({"steps": demo.STEPS} if call.workload is None else {"epochs": 1}))
    with ExitStack() as lock:
        with preserved_generators(call.workload):
            result, inputs, out = prepare(call, lock)
        for line in shared_model_notes(inputs.setup.workload, inputs.setup.model):
            call.progress.note(line)
        hint = resume_hint(call.command, out)
        files = RunFiles(out=out, options=call.options, resume_hint=hint, sinks=call.sinks)
        inputs = replace(inputs, until=call.until)
        training, model = train_plan(inputs, files, progress=call.progress, ranks=ranks)
        whole: nn.Module | None = model
        if inputs.plan.parallel == "shard":
            # The command line does not return the model.
            is_wanted = ranks.rank == 0 and not call.isolated
            whole = whole_model(inputs.setup.model, model, out) if is_wanted else None
        return _write_result(call, msgspec.structs.replace(result, training=training, model=whole), out)


class PlannedRun(NamedTuple):
    """The plan of a run with all records before the training, what trains it, and its folder."""

    result: Result
    inputs: RunInputs
    out: Path


def prepare(call: Call, lock: ExitStack) -> PlannedRun:
    """Take the stored plan of a run to resume, else search, plan and tune.

    Args:
        call: of this rank.
        lock: keeps the folder of the run locked.
    """
    if not call.options.train.resume:
        return _prepare_new(call, lock)
    earlier = _open_earlier(call, lock)
    return _plan_again(call, earlier) if earlier.changes else _continue(call, earlier)


def _prepare_new(call: Call, lock: ExitStack) -> PlannedRun:
    """Search, plan and tune for a new run in one process, and open the setup that trains."""
    options = call.options
    with ExitStack() as opened:
        setup = OpenSetup(call, opened)
        samples = _epoch_samples(call, setup)
        is_stream = setup.info.epoch_samples is None
        batches = build_sampler(samples, options, (lambda _: range(samples)) if is_stream else None)
        name = setup.info.name
        out = claim_of_ranks(call, lambda: folder_of(options.train.out, name, resume=False), lock)
        if setup.info.layout is None:
            # Weights that cannot be exported must fail before minutes are spent on a probe.
            setup.process.call("the check of the weights", examine_weights)
        result = finish_plan(call, setup, _search_for(call, setup, out), batches)
        assert result.plan is not None
        process, info, sizes = setup.process, setup.info, None
        if result.plan.size_cut is not None:
            # Sent, so that the process that trains need not read them again.
            sizes = process.call("reading the sizes of the samples", read_sizes)
    # A child has ended by now, and its memory is free for the training.
    if isinstance(process, ThisProcess) and info.layout is None:
        trained = process.setup
    else:
        trained = _open_to_train(call, find_workload(call.workload, options.device.seed), info.layout)
        check_same_data([info.data, data_of_setup(trained)], ["the probe", "the process that trains"])
    if sizes is not None:
        trained.worst_case.take_sizes(sizes)
    sampler = _sampler_of(call, trained, samples)
    return _planned(result, trained, sampler, out, key=info.key, data=info.data)


@dataclass(frozen=True, kw_only=True)
class EarlierRun:
    """A run to resume, with the setup that it continues in."""

    checkpoint: Loaded
    plan: Plan
    setup: Setup
    sampler: GlobalBatchSampler
    data: DataDigest | None
    out: Path
    changes: list[str]
    """What rules out the stored plan, in the user's words; empty if the run continues with it."""

    def with_records(self, result: Result) -> Result:
        """Return a result with the records that an earlier process of the run has stored, if it has any."""
        found = stored_records(self.checkpoint.facts)
        if found is None:
            return result
        return msgspec.structs.replace(
            result,
            profile=None if found.profile is None else Path(found.profile),
            **{name: getattr(found, name) for name in BEFORE_TRAINING},
        )

    def planned(self, result: Result, key: Mapping[str, KeyValue], *, is_exact: bool) -> PlannedRun:
        """Return the run that continues with the plan of a result."""
        more = {"resumed": self.checkpoint, "is_exact": is_exact}
        return _planned(result, self.setup, self.sampler, self.out, key=key, data=self.data, **more)


def _open_earlier(call: Call, lock: ExitStack) -> EarlierRun:
    """Open the run to resume, and compare it with what is asked for now."""
    options, ranks = call.options, call.ranks
    call.progress.doing(OPENING)
    workload = find_workload(call.workload, options.device.seed)
    out = claim_of_ranks(call, lambda: folder_of(options.train.out, workload.name, resume=True), lock)
    checkpoint = load_run_state(out, ranks)
    for line in checkpoint.passed_over:
        call.progress.note(f"skipped an invalid checkpoint: {line}")
    plan = load_plan(checkpoint, options)
    setup = _open_to_train(call, workload, layout_to_resume(call, plan))
    sampler = _sampler_of(call, setup, None)
    schedule = setup.workload.schedule
    scheduled = schedule is not None and "steps" in schedule_arguments(schedule)
    check_same_data_order(checkpoint, sampler, scheduled=scheduled)
    data = data_of_setup(setup)
    check_data_of_ranks(data, ranks, checkpoint)
    changes = changes_since_checkpoint(checkpoint, setup, sampler, ranks, options)
    return EarlierRun(
        checkpoint=checkpoint,
        plan=plan,
        setup=setup,
        sampler=sampler,
        data=data,
        out=out,
        changes=sorted({change for of_rank in ranks.gather(changes) for change in of_rank}),
    )


def layout_to_resume(call: Call, plan: Plan) -> ShardLayout | None:
    """Return the layout of the shared model of a resumed run: as asked, else as before."""
    if call.ranks.world == 1 or call.options.ranks.parallel == "replicate":
        return None
    if call.options.ranks.parallel == "shard":
        return layout_of_call(call)
    before = layout_of(plan)
    return None if before is None else msgspec.structs.replace(before, world=call.ranks.world)


def _continue(call: Call, earlier: EarlierRun) -> PlannedRun:
    """Continue with the stored plan, on the same hardware."""
    call.progress.note(f"resuming from {earlier.checkpoint.path} on the same hardware")
    device = earlier.setup.device.describe()
    call.progress.opened(device)
    call.progress.planned(earlier.plan)
    result = earlier.with_records(Result(device=device, plan=earlier.plan, title=earlier.setup.workload.name))
    return earlier.planned(result, earlier.checkpoint.facts.get("key", {}), is_exact=True)


def _plan_again(call: Call, earlier: EarlierRun) -> PlannedRun:
    """Plan a stored run again, because something has changed, at its learning rate and without tuning."""
    call.progress.note(
        f"resuming from {earlier.checkpoint.path} with another {' and another '.join(earlier.changes)}: the "
        "batch, the learning rate and the order of the data stay, the micro-batch is planned again, and sums "
        "differ by rounding"
    )
    call = call.with_options(trials=0, tune_lr=False)
    layout = earlier.setup.layout
    if layout is not None:
        call = call.with_options(parallel="shard")
    elif call.ranks.world > 1:
        call = call.with_options(parallel="replicate")
    with ExitStack() as opened:
        setup = OpenSetup(call, opened)
        found = search_and_plan(call, setup)
        result = finish_plan(call, setup, found, earlier.sampler)
        key = setup.info.key
    assert result.plan is not None
    rate = [name for name in Plan.__struct_fields__ if name.startswith("learning_rate")]
    tuning = earlier.with_records(result).tuning
    if tuning is not None and tuning.trials:
        note = "the run went on with another plan, without the choices that were made before"
        tuning = msgspec.structs.replace(tuning, notes=[*tuning.notes, note])
    plan = msgspec.structs.replace(result.plan, **{name: getattr(earlier.plan, name) for name in rate})
    return earlier.planned(msgspec.structs.replace(result, plan=plan, tuning=tuning), key, is_exact=False)


def _planned(
    result: Result,
    setup: Setup,
    sampler: GlobalBatchSampler,
    out: Path,
    *,
    key: Mapping[str, KeyValue],
    data: DataDigest | None,
    **resumed: Any,
) -> PlannedRun:
    """Return a run that trains with the budget of its probe, as stored in its key."""
    assert result.plan is not None
    budget_bytes = key.get("budget_bytes")
    if budget_bytes is not None:
        setup = replace(setup, device=setup.device.budgeted(int(budget_bytes)))
    facts = {"records": result.to_json(*BEFORE_TRAINING, "profile"), "data": msgspec.to_builtins(data)}
    inputs = RunInputs(setup=setup, plan=result.plan, sampler=sampler, key=key, facts=facts, **resumed)
    return PlannedRun(result, inputs, out)


def _open_to_train(call: Call, workload: Workload, shard: ShardLayout | None) -> Setup:
    """Open the setup for the training; rank 0 holds a model that ranks share."""
    call.progress.doing(OPENING)
    role = Role(world=call.ranks.world, shard=shard, holds_model=call.ranks.rank == 0, trains=True)
    return open_setup(workload, call.options, role, is_demo=call.workload is None)


def _epoch_samples(call: Call, setup: OpenSetup) -> int:
    """Return the samples of an epoch. A stream is counted only if the run depends on its end."""
    if setup.info.epoch_samples is not None:
        return setup.info.epoch_samples
    if call.options.train.epochs is None:
        return ENDLESS
    call.progress.note(COUNTED)
    samples, remarks = call.ranks.once(lambda: setup.process.call("counting the samples", count_stream))
    for line in remarks:
        call.progress.note(line)
    return samples


def _sampler_of(call: Call, setup: Setup, samples: int | None) -> GlobalBatchSampler:
    """Return the batches of the run.

    Args:
        call: of this rank.
        setup: has the data.
        samples: samples of an epoch of a stream; None if they are not counted yet.
    """
    options, ranks, stream = call.options, call.ranks, setup.stream
    if stream is None:
        samples, order = epoch_of(setup.workload, options.device.seed)
        return build_sampler(samples, options, order)
    if samples is None:
        is_counted = options.train.epochs is not None
        samples = ranks.once(lambda: count_samples(stream)[0]) if is_counted else ENDLESS
    note = split_note(setup.workload.train_data[0], ranks)  # type: ignore[index]
    if note is not None:
        call.progress.note(note)
    view = open_stream(stream, ranks, options.device.seed, options.target_batch)
    return build_sampler(samples, options, view=view)


def _repeat_command(command: str, *, resumes: bool) -> str:
    """Return the command that repeats the whole run, without ``--resume``, which would only finish it."""
    if not resumes or not command:
        return command
    words = shlex.split(command)
    # An option of a config file or of the environment is overridden.
    return shlex.join([word for word in words if word != "--resume"] or words) + (
        "" if "--resume" in words else " --no-resume"
    )


def resume_hint(command: str, out: Path) -> str:
    """Return the command, quoted for a shell, or the call that resumes the run."""
    if not command:
        return f"autobatch.fit(…, out={str(out)!r}, resume=True)"
    words = [word for word in shlex.split(command) if word != "--resume"]
    has_folder = any(word == "--out" or word.startswith("--out=") for word in words)
    return shlex.join([*words, *(() if has_folder else ("--out", str(out))), "--resume"])


def _surroundings() -> dict[str, str]:
    """Return what else a repetition would have to match: the source, cores and threads."""
    found = {
        "commit of the working directory": _commit(),
        "platform": platform.platform(),
        "cores": str(usable_cores()),
        "threads of torch": str(torch.get_num_threads()),
        "CUDA of torch": torch.version.cuda,
    }
    return {name: value for name, value in found.items() if value is not None}


def _commit() -> str | None:
    """Return the commit of the working directory, marked if files have changed; None without Git."""
    words = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _write_result(call: Call, result: Result, out: Path) -> Result:
    """Complete a result; rank 0 writes it and the report. A failed report is only noted: the run is done."""
    result = msgspec.structs.replace(
        result, command=call.command, options=call.options.by_name(), surroundings=_surroundings()
    )
    if call.ranks.rank:
        return result
    result = msgspec.structs.replace(
        result,
        out=out,
        report=out / REPORT,
        versions=versions(),
        created=datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        checkpoints=[int(path.name.removeprefix("step-")) for path in list_checkpoints(out / CHECKPOINTS)],
    )
    _write_json(result, out)
    call.progress.doing("writing the report")
    # Only here: matplotlib takes half a second to import.
    from autobatch.report.page import write_report

    try:
        write_report(out / REPORT, load_run(out))
    except Exception as error:  # whatever drawing raises, the training is done
        call.progress.note(f"the report could not be written: {type(error).__name__}: {error_text(error)}")
        result = msgspec.structs.replace(result, report=None)
        # The first one says all else, and the disk may be full by now.
        with suppress(OSError):
            _write_json(result, out)
    return result


def _write_json(result: Result, out: Path) -> None:
    content = msgspec.json.format(msgspec.json.encode(result.to_json()))
    write_atomic(out / RESULT, content + b"\n")
