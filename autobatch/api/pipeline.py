"""The order of the stages of a `Run`, by command.

    options ──► open ──► limit ──► plan ──► [tune] ──► train ──► write
                         (runs)   (exact)  (Optuna)             (result, report)

`autobatch.api.stages` has the stages before the training. A command runs them in a child process, and this
process opens the workload once more for the training. A resume opens a run with its stored plan: the stages
before the training run again only if something has changed that the plan depends on.
"""

from __future__ import annotations

import datetime
import math
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from autobatch.api.run import Run, agree_on_options, check_data_of_ranks, claim
from autobatch.api.stages import OPENING, examine_loss, limit, open_workload, plan, tune
from autobatch.core.errors import InputError
from autobatch.core.files import write_atomic
from autobatch.core.options import Options, fields_of, refuse
from autobatch.core.records import Plan
from autobatch.core.run_files import REPORT, RESULT
from autobatch.core.text import error_text
from autobatch.core.version import versions
from autobatch.distributed.shared_stream import open_sampler, split_note
from autobatch.estimates.estimator import estimate_limits
from autobatch.estimates.hugging_face import estimate_named
from autobatch.estimates.snapshots import estimate_snapshots
from autobatch.rehearsal.process import ThisProcess
from autobatch.rehearsal.setup import Role, Setup, data_of_setup, open_setup
from autobatch.report.result import Estimates, Result, load_run
from autobatch.search.plan_split import read_sizes
from autobatch.training.checkpoint import Loaded, list_checkpoints, step_of
from autobatch.training.resume import (
    BEFORE_TRAINING,
    changes_since_checkpoint,
    check_same_run,
    load_run_state,
)
from autobatch.training.run import RunInputs, train_plan
from autobatch.training.run_folder import CHECKPOINTS, move_earlier_run
from autobatch.training.split_check import examine_run
from autobatch.training.trackers import check_trackers
from autobatch.workload import demo
from autobatch.workload.contract import Workload, schedule_arguments
from autobatch.workload.data_digest import DataDigest, check_same_data
from autobatch.workload.order import GlobalBatchSampler
from autobatch.workload.reference import NAMED_MODEL, WorkloadSource, find_workload, is_named_model
from autobatch.workload.rng import preserved_generators
from autobatch.workload.streams import length_of_stream


def run_estimate(workload: WorkloadSource, options: Options) -> Estimates:
    """Run ``autobatch estimate``. Memory snapshots stand in place of a workload.

    Raises:
        InputError: the options exclude each other, or the workload or a snapshot is invalid.
    """
    if options.snapshot:
        return estimate_snapshots(options)
    if is_named_model(workload):
        return estimate_named(workload, options)
    own = [name for name, field in fields_of("estimate").items() if field.group == "model"]
    refuse(options, own, f"only autobatch estimate {NAMED_MODEL}NAME takes that, and a workload is code")
    return estimate_limits(find_workload(workload, options.seed), options)


def run_command(run: Run) -> Result:
    """Run ``autobatch probe``, ``plan``, ``tune`` or ``fit``; all ranks call it.

    Raises:
        InputError: an option, the workload, or the content of the run's folder is invalid.
        DoesNotFitError: not even a micro-batch of 1 fits.
        AutobatchError: see `autobatch.training.run.train`.
    """
    agree_on_options(run)
    if run.ranks.rank == 0:
        check_trackers(run.options.log)
    if run.options.command == "fit":
        _settle_fit(run)
        with run.held:
            with preserved_generators(run.workload):
                setup, sampler, inputs = (resume if run.options.resume else begin)(run)
            training, model = train_plan(
                setup, run.plan, sampler, inputs, progress=run.progress, ranks=run.ranks
            )
            # Of a model that ranks share, this one has a part only; the file has all of it.
            run.record(training=training, model=None if run.plan.parallel == "shard" else model)
            write(run, inputs.out)
    else:
        with preserved_generators(run.workload), run.trying:
            open_workload(run)
            limit(run)
            if run.options.command != "probe":
                plan(run)
                tune(run)
    return run.result


def _settle_fit(run: Run) -> None:
    """Settle the length of a training, and resume a run that the launcher has started again."""
    if (earlier := run.ranks.earlier_out) is not None:
        has_checkpoint = run.ranks.once(lambda: bool(list_checkpoints(earlier / CHECKPOINTS)))
        run.settle(out=str(earlier), resume=has_checkpoint)
    if run.options.steps is None and run.options.epochs is None:
        run.settle(**({"steps": demo.STEPS} if run.workload is None else {"epochs": 1}))


ToTrain: TypeAlias = tuple[Setup, GlobalBatchSampler, RunInputs]
"""What a training takes besides the plan: the setup, the batches, and the inputs of the run."""


def begin(run: Run) -> ToTrain:
    """Search, plan and tune for a new run in one process, and open the setup that trains.

    Raises:
        InputError: the workload or an option is invalid.
        DoesNotFitError: not even a micro-batch of 1 fits.
    """
    options, sizes = run.options, None
    with run.trying:
        open_workload(run)
        process, info = run.process, run.process.info
        samples = info.epoch_samples or length_of_stream(options.steps)
        out = claim(run, info.name)
        limit(run)
        plan(run)
        tune(run, options.steps or math.ceil((options.epochs or 1) * samples / run.target))
        process, info = run.process, run.process.info
        if run.plan.size_cut is not None:
            # Sent, so that the process that trains need not read them again.
            sizes = process.call("reading the sizes of the samples", read_sizes)
    if run.ranks.earlier_out is None:  # which is this run, started again
        earlier = run.ranks.once(lambda: move_earlier_run(out))
        if earlier is not None:
            run.progress.note(f"moved the earlier run of {out} to {earlier}")
    # A child has ended by now, and its memory is free for the training.
    if isinstance(process, ThisProcess) and info.shards is None:
        setup = process.setup
    else:
        setup = _open_to_train(run, find_workload(run.workload, options.seed), info.shards)
        check_same_data([info.data, data_of_setup(setup)], ["the probe", "the process that trains"])
    if sizes is not None:
        setup.worst_case.take_sizes(sizes)
    return _budgeted(run, setup), _sampler_of(run, setup), _inputs(run, info.data)


def resume(run: Run) -> ToTrain:
    """Take the stored plan of a run, or plan it again if something has changed that the plan depends on.

    Raises:
        InputError: there is no run to resume, or this is not the same run.
    """
    options, ranks, progress = run.options, run.ranks, run.progress
    progress.doing(OPENING)
    workload = find_workload(run.workload, options.seed)
    checkpoint = load_run_state(claim(run, workload.name), ranks)
    for line in checkpoint.passed_over:
        progress.note(f"skipped an invalid checkpoint: {line}")
    stored = msgspec.convert(checkpoint.facts["plan"], Plan)
    if options.parallel == "shard" and stored.parallel != "shard":
        raise InputError(
            "--parallel shard cannot resume a run of whole models: leave it out, or begin a new run"
        )
    shares = stored.parallel == "shard" and options.parallel != "replicate"
    setup = _open_to_train(run, workload, ranks.world if shares and ranks.world > 1 else None)
    sampler = _sampler_of(run, setup)
    schedule = setup.workload.schedule
    scheduled = schedule is not None and "steps" in schedule_arguments(schedule)
    check_same_run(checkpoint, sampler, is_scheduled=scheduled)
    data = data_of_setup(setup)
    check_data_of_ranks(data, ranks, checkpoint)
    own_changes = changes_since_checkpoint(checkpoint, setup, ranks, options)
    changes = sorted({change for of_rank in ranks.gather(own_changes) for change in of_rank})
    earlier = msgspec.convert(checkpoint.facts["records"], Result, dec_hook=lambda kind, value: kind(value))
    if not changes:
        progress.note(f"resuming from {checkpoint.path} on the same hardware")
        progress.opened(setup.device.describe())
        progress.planned(stored)
        run.result = msgspec.structs.replace(earlier, plan=stored)
        # Somebody may have edited it since. On the same hardware all ranks find the same.
        finding = examine_loss(run, partial(examine_run, setup), is_shared=shares)
        run.loss_notes = finding.notes(options.on_inexact_split, stored)
    else:
        progress.note(
            f"resuming from {checkpoint.path} with another {' and another '.join(changes)}: the batch, the "
            "learning rate and the order of the data stay, the micro-batch is planned again, and sums differ "
            "by rounding"
        )
        _plan_again(run, stored, sampler, shares=setup.role.shards is not None)
        run.record(tuning=earlier.tuning)
    inputs = _inputs(run, data, resumed=checkpoint, is_exact=not changes)
    return _budgeted(run, setup), sampler, inputs


def _plan_again(run: Run, stored: Plan, sampler: GlobalBatchSampler, *, shares: bool) -> None:
    """Plan a stored run again, at its learning rate and without tuning."""
    run.settle(trials=0, tune_lr=False, knobs=None, timeout=None)
    if run.ranks.world > 1:
        run.settle(parallel="shard" if shares else "replicate")
    with run.trying:
        open_workload(run)
        limit(run)
        plan(run)
        tune(run, sampler.total)
    rate = [name for name in Plan.__struct_fields__ if name.startswith("learning_rate")]
    run.record(plan=msgspec.structs.replace(run.plan, **{name: getattr(stored, name) for name in rate}))


def _budgeted(run: Run, setup: Setup) -> Setup:
    """Return the setup of a training with the budget of its probe, which may be an earlier one."""
    return replace(setup, device=setup.device.budgeted(run.result.device.budget_bytes))


def _inputs(run: Run, data: DataDigest | None, *, resumed: Loaded | None = None, **fields: Any) -> RunInputs:
    """Return the inputs of a training of these data."""
    assert run.out is not None
    before = [] if resumed is None else resumed.facts["notes"]
    records = run.result.to_json(*BEFORE_TRAINING, "profile")
    return RunInputs(
        out=run.out,
        options=run.options,
        resume_hint=resume_hint(run.command, run.out),
        facts={"records": records, "data": msgspec.to_builtins(data)},
        notes=list(dict.fromkeys([*before, *run.loss_notes])),
        sinks=run.sinks,
        until=run.until,
        resumed=resumed,
        **fields,
    )


def _open_to_train(run: Run, workload: Workload, shards: int | None) -> Setup:
    """Open the setup for the training; rank 0 holds a model that ranks share."""
    run.progress.doing(OPENING)
    role = Role(world=run.ranks.world, shards=shards, rank=run.ranks.rank)
    return open_setup(workload, run.options, role, is_demo=run.workload is None)


def _sampler_of(run: Run, setup: Setup) -> GlobalBatchSampler:
    """Return the batches of the run."""
    if setup.stream is not None:
        note = split_note(setup.workload.train_data[0], run.ranks)  # type: ignore[index]
        if note is not None:
            run.progress.note(note)
    return open_sampler(setup.workload, setup.stream, run.ranks, run.options)


def resume_hint(command: str, out: Path) -> str:
    """Return the command, quoted for a shell, or the call that resumes the run."""
    if not command:
        return f"autobatch.fit(…, out={str(out)!r}, resume=True)"
    words = [word for word in shlex.split(command) if word != "--resume"]
    has_folder = any(word == "--out" or word.startswith("--out=") for word in words)
    return shlex.join([*words, *(() if has_folder else ("--out", str(out))), "--resume"])


def write(run: Run, out: Path) -> None:
    """Write the result and the report on rank 0. A failed report is only noted: the run is done."""
    run.record(command=run.command, options=run.options.by_name())
    if run.ranks.rank:
        return
    run.record(
        out=out,
        report=out / REPORT,
        versions=versions(),
        created=datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        checkpoints=[step_of(path) for path in list_checkpoints(out / CHECKPOINTS)],
    )
    content = msgspec.json.format(msgspec.json.encode(run.result.to_json()))
    write_atomic(out / RESULT, content + b"\n")
    run.progress.doing("writing the report")
    # Only here: matplotlib takes half a second to import.
    from autobatch.report.page import write_report

    try:
        write_report(out / REPORT, load_run(out))
    except Exception as error:  # whatever drawing raises, the training is done
        run.progress.note(f"the report could not be written: {type(error).__name__}: {error_text(error)}")
        run.record(report=None)
