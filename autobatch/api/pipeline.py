"""The order of the stages of a `Run`, by command.

    options ──► open ──► limit ──► plan ──► [tune] ──► train ──► write
                         (runs)   (exact)  (Optuna)             (result, report)

Each stage reads and fills in the `Run`. Those before the training do their work in a child process, and this
process opens the workload once more for the training. A resume opens a run with its stored plan: these stages
run again only if something has changed that the plan depends on. Over several ranks, all of them run the same
stages, each in its own process, and agree where one of them decides for all.
"""

from __future__ import annotations

import datetime
import math
import os
import shlex
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from autobatch.api.run import Run, agree_on_options, check_data_of_ranks, claim
from autobatch.core.errors import AutobatchError, DoesNotFitError, InputError
from autobatch.core.files import REPORT, RESULT, write_atomic
from autobatch.core.options import Options, fields_of, refuse
from autobatch.core.records import Plan, Remedy, Tuning
from autobatch.core.text import error_text
from autobatch.core.version import versions
from autobatch.device.allocator import new_allocator
from autobatch.device.profiles import data_home
from autobatch.distributed.ranks import agree_on_limit
from autobatch.distributed.shared_stream import open_sampler, split_note
from autobatch.estimates.estimator import estimate_limits
from autobatch.estimates.hugging_face import estimate_named
from autobatch.estimates.snapshots import estimate_snapshots
from autobatch.estimates.suggestions import in_words, suggest
from autobatch.footprint.explain import memory_curve
from autobatch.planning import make_plan, split_over_ranks
from autobatch.rehearsal.process import ThisProcess, open_process
from autobatch.rehearsal.setup import Role, Setup, data_of_setup, open_setup
from autobatch.report.result import Estimates, Result, load_run
from autobatch.report.words import plural
from autobatch.search.find_limit import find_limit
from autobatch.search.plan_split import choose_split, read_sizes
from autobatch.search.probe import Limit
from autobatch.training.checkpoint import Loaded, list_checkpoints, load_newest, step_of
from autobatch.training.metrics import check_trackers
from autobatch.training.resume import BEFORE_TRAINING, changes_since_checkpoint, check_same_run
from autobatch.training.run import TrainingRun, train_plan
from autobatch.training.run_folder import CHECKPOINTS, move_earlier_run
from autobatch.training.split_check import SHARED, Finding, examine, examine_run, statistics_notes
from autobatch.workload import demo
from autobatch.workload.contract import Workload
from autobatch.workload.data_digest import DataDigest, check_same_data
from autobatch.workload.order import GlobalBatchSampler
from autobatch.workload.reference import NAMED_MODEL, WorkloadSource, find_workload, is_named_model
from autobatch.workload.rng import preserved_generators
from autobatch.workload.streams import length_of_stream

PLANNED_STEPS = 1000
"""Optimizer steps of the run that is tuned for, if nothing says how many."""
OPENING = "opening the workload"


def open_workload(run: Run, *, shares: bool = False) -> None:
    """Open the workload, with a whole model or with one that the ranks share.

    Raises:
        InputError: the device, the budget, the workload or a setting is invalid.
    """
    run.progress.doing(OPENING)
    shares = shares or run.options.parallel == "shard"
    role = Role(world=run.ranks.world, shards=run.ranks.world if shares else None)
    run.trying.close()
    run.process = run.trying.enter_context(open_process(run.workload, run.options, role, run.child))


def limit(run: Run) -> None:
    """Find the largest micro-batch that fits on all ranks, or check the one that was asked for.

    With ``--parallel auto``, the ranks share the model as soon as a whole one does not fit on one of them.

    Raises:
        InputError: ranks have different workloads, or no plan is possible.
        DoesNotFitError: not even a micro-batch of 1 fits, or the one that was asked for does not.
    """
    share = None
    if run.options.command != "probe":
        # An invalid plan must fail before minutes are spent on a probe.
        share = split_over_ranks(_plan(run, 1).target_batch, run.planned_world)[0]
        samples = run.process.info.epoch_samples
        if samples is not None and run.target > samples:
            run.progress.note(
                f"the batch of {run.target:,} is larger than the data, {plural(samples, 'sample')}"
            )
    found = _find(run, share)
    if run.options.parallel == "auto" and run.ranks.world > 1:
        refusals = run.ranks.gather(None if isinstance(found, Limit) else found.split(". ")[0])
        run.layout_reason = "a whole model fits on each rank, so each has its own"
        rank = next((rank for rank, line in enumerate(refusals) if line is not None), None)
        if rank is not None:
            run.layout_reason = (
                f"no whole model fits on rank {rank}, so the ranks share it (--parallel shard): "
                f"{refusals[rank]}"
            )
            run.progress.note(run.layout_reason)
            open_workload(run, shares=True)
            found = _find(run, share)
    if not isinstance(found, Limit):
        remedies: list[Remedy] = []
        with suppress(AutobatchError):  # the error stands without it
            remedies = run.process.call("looking for what helps", suggest)
        raise DoesNotFitError(f"{found}{in_words(remedies)}")
    info = run.process.info
    # For a stream these are only the scanned samples, and rank 0 reads them for all ranks.
    data = None if info.epoch_samples is None else info.samples
    run.ranks.check_equal({"the model": info.key.get("model"), "the data": data})
    check_data_of_ranks(info.data, run.ranks)
    probe, planned, note = agree_on_limit(run.ranks, found.probe, found.planned, info.device)
    if note is not None:
        run.progress.note(note)
    probe = msgspec.structs.replace(probe, **_layout(run))
    run.limit = found._replace(planned=planned)
    run.result = Result(device=info.device, probe=probe, profile=found.file, command=run.command)


def _find(run: Run, share: int | None) -> Limit | str:
    """Find the largest micro-batch on this rank; return the reason if none fits."""
    home = data_home(os.environ)
    try:
        return find_limit(run.process, run.options, share=share, home=home, progress=run.progress)
    except DoesNotFitError as error:
        return str(error)


def plan(run: Run) -> None:
    """Plan the batch in micro-batches that fit."""
    info, trace = run.process.info, run.limit.trace
    planned = _plan(run, run.limit.planned)
    run.progress.planned(planned)
    if planned.learning_rate_rule == "none" and planned.base_batch not in (None, run.target):
        run.progress.note(f"learning rate {planned.learning_rate:g}: {planned.learning_rate_source}")
    curve = None
    if trace is not None and trace.marks:
        attempts = run.limit.probe.attempts
        ran = max((attempt.micro_batch for attempt in attempts if attempt.fits), default=1)
        curve = memory_curve(trace, ran, new_allocator(info.allocator, None))
    # A training says it of its own batches.
    says_all = run.options.command == "plan"
    notes = statistics_notes(info.batch_norms, planned.micro_batches) if says_all else []
    planned = msgspec.structs.replace(planned, **_layout(run))
    run.record(plan=planned, title=info.name, memory_curve=curve, notes=notes)


def _plan(run: Run, most: int) -> Plan:
    """Return the plan of the batch in micro-batches of at most ``most`` samples."""
    options, info = run.options, run.process.info
    return make_plan(
        target_batch=run.target,
        micro_batch_limit=most,
        world_size=run.planned_world,
        multiple=options.micro_batch_multiple,
        learning_rate=info.learning_rate,
        base_batch=options.base_batch or info.base_batch,
        rule=options.lr_rule,
        precision=info.precision,
        gradient_dtype=info.gradient_dtype,
    )


def _layout(run: Run) -> dict[str, str | None]:
    """Return whether ranks share the model, with the reason; nothing for one process."""
    if run.ranks.world == 1:
        return {}
    parallel = "replicate" if run.process.info.shards is None else "shard"
    return {"parallel": parallel, "parallel_reason": run.layout_reason}


def tune(run: Run, steps: int = PLANNED_STEPS) -> None:
    """Check the loss of a plan, tune it for so many optimizer steps, and choose the split of its batches.

    Raises:
        InputError: the loss cannot be split, or a split by size was asked for and would change results.
    """
    options, process = run.options, run.process
    has_trials, tunes_rate = options.command in ("tune", "fit") and options.trials != 0, options.tune_lr
    if (has_trials or tunes_rate) and process.info.shards is not None:
        run.progress.note("nothing is tuned, because the ranks share the model")
        has_trials = tunes_rate = False
    finding = examine_loss(run, lambda *asked: process.call("the check of the loss", examine_run, *asked))
    if options.command == "tune":
        run.record(tuning=Tuning(notes=[] if has_trials else ["no trial was asked for"]))
    tuner = None
    if has_trials or tunes_rate:
        # Only here: Optuna takes half a second to import.
        from autobatch.tuning.fastest import Tuner
        from autobatch.tuning.learning_rate import tune_learning_rate

        tuner = Tuner(
            process=process,
            options=options,
            planned_steps=steps,
            home=data_home(os.environ),
            progress=run.progress,
            ranks=run.ranks,
            deadline=math.inf if options.timeout is None else time.monotonic() + options.timeout,
        )
    if tuner is not None and has_trials:
        chosen, tuning = tuner.tune(run.plan)
        run.record(plan=chosen, tuning=tuning)
    probe = run.result.probe
    assert probe is not None
    run.progress.doing("choosing how batches are split")
    chosen, note = choose_split(process, run.plan, probe, options, check=examine, ranks=run.ranks)
    if note:
        run.progress.note(note)
    run.record(plan=chosen)
    if tuner is not None and tunes_rate:
        chosen, rate = tune_learning_rate(tuner, run.plan)
        tuning = msgspec.structs.replace(run.result.tuning or Tuning(), learning_rate=rate)
        run.record(plan=chosen, tuning=tuning)
    # A tuned plan may split batches that fitted whole.
    run.loss_notes = finding.notes(options.on_inexact_split, run.plan)
    for line in run.loss_notes:
        run.progress.note(line)


def examine_loss(run: Run, check: Callable[[int, int, int], Finding]) -> Finding:
    """Examine whether the loss can be split, before minutes are spent on trials.

    Args:
        run: with its plan.
        check: examines a micro-batch, a target batch and a seed.

    Raises:
        InputError: it cannot, the plan splits it, and ``--split-check`` asks for an error.
    """
    if run.options.on_inexact_split == "off":
        return Finding()
    if run.plan.parallel == "shard":
        return SHARED
    run.progress.doing("checking that the loss can be split into micro-batches")
    try:
        finding = check(run.plan.micro_batch, run.plan.target_batch, run.options.seed)
    except AutobatchError as error:
        finding = Finding(unchecked=str(error))
    finding.notes(run.options.on_inexact_split, run.plan)
    return finding


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
        AutobatchError: see `TrainingRun.train`.
    """
    agree_on_options(run)
    if run.ranks.rank == 0:
        check_trackers(run.options.log)
    if run.options.command == "fit":
        with run.held:
            fit(run)
    else:
        with preserved_generators(run.workload), run.trying:
            open_workload(run)
            search(run)
    return run.result


def search(run: Run, steps: int = PLANNED_STEPS) -> None:
    """Find what fits and, if the command plans, plan and tune for so many optimizer steps."""
    limit(run)
    if run.options.command != "probe":
        plan(run)
        tune(run, steps)


def fit(run: Run) -> None:
    """Train a run to its end, and write its result and its report."""
    if (earlier := run.ranks.earlier_out) is not None:  # the launcher has started it again
        has_checkpoint = run.ranks.once(lambda: bool(list_checkpoints(earlier / CHECKPOINTS)))
        run.settle(out=str(earlier), resume=has_checkpoint)
    if run.options.steps is None and run.options.epochs is None:
        run.settle(**({"steps": demo.STEPS} if run.workload is None else {"epochs": 1}))
    with preserved_generators(run.workload):
        setup, sampler, training_run = (resume if run.options.resume else begin)(run)
    # The budget is that of the probe, which may be an earlier one.
    setup = replace(setup, device=setup.device.budgeted(run.result.device.budget_bytes))
    training, model = train_plan(setup, run.plan, sampler, training_run, run.ranks)
    # Of a model that ranks share, this one has a part only; the file has all of it.
    run.record(training=training, model=None if run.plan.parallel == "shard" else model)
    write(run, training_run.out)


def begin(run: Run) -> tuple[Setup, GlobalBatchSampler, TrainingRun]:
    """Search, plan and tune for a new run in one process, and open the setup that trains.

    Raises:
        InputError: the workload or an option is invalid.
        DoesNotFitError: not even a micro-batch of 1 fits.
    """
    options, sizes = run.options, None
    with run.trying:
        open_workload(run)
        info = run.process.info
        samples = info.epoch_samples or length_of_stream(options.steps)
        out = claim(run, info.name)
        search(run, options.steps or math.ceil((options.epochs or 1) * samples / run.target))
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
    return setup, _sampler_of(run, setup), _training_run(run, info.data)


def resume(run: Run) -> tuple[Setup, GlobalBatchSampler, TrainingRun]:
    """Take the stored plan of a run, or plan it again if something has changed that the plan depends on.

    Raises:
        InputError: there is no run to resume, or this is not the same run.
    """
    options, ranks, progress = run.options, run.ranks, run.progress
    progress.doing(OPENING)
    workload = find_workload(run.workload, options.seed)
    checkpoint = load_newest(claim(run, workload.name) / CHECKPOINTS, ranks)
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
    check_same_run(checkpoint, setup, sampler)
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
        finding = examine_loss(run, partial(examine_run, setup))
        run.loss_notes = finding.notes(options.on_inexact_split, stored)
    else:
        progress.note(
            f"resuming from {checkpoint.path} with another {' and another '.join(changes)}: the batch, the "
            "learning rate and the order of the data stay, the micro-batch is planned again, and sums differ "
            "by rounding"
        )
        _plan_again(run, stored, shares=setup.role.shards is not None)
        run.record(tuning=earlier.tuning)
    return setup, sampler, _training_run(run, data, resumed=checkpoint, is_exact=not changes)


def _plan_again(run: Run, stored: Plan, *, shares: bool) -> None:
    """Plan a stored run again, at its learning rate and without tuning."""
    run.settle(trials=0, tune_lr=False)
    if run.ranks.world > 1:
        run.settle(parallel="shard" if shares else "replicate")
    with run.trying:
        open_workload(run)
        search(run)
    rate = [name for name in Plan.__struct_fields__ if name.startswith("learning_rate")]
    run.record(plan=msgspec.structs.replace(run.plan, **{name: getattr(stored, name) for name in rate}))


def _training_run(
    run: Run, data: DataDigest | None, *, resumed: Loaded | None = None, is_exact: bool = True
) -> TrainingRun:
    """Return the training of these data in the folder of the run."""
    assert run.ranks.out is not None
    before = [] if resumed is None else resumed.facts["notes"]
    records = run.result.to_json(*BEFORE_TRAINING, "profile")
    return TrainingRun(
        out=run.ranks.out,
        options=run.options,
        progress=run.progress,
        resume_hint=resume_hint(run.command, run.ranks.out),
        facts={"records": records, "data": msgspec.to_builtins(data)},
        notes=list(dict.fromkeys([*before, *run.loss_notes])),
        sinks=run.sinks,
        until=run.until,
        resumed=resumed,
        is_exact=is_exact,
    )


def _open_to_train(run: Run, workload: Workload, shards: int | None) -> Setup:
    """Open the setup for the training; rank 0 holds a model that ranks share."""
    run.progress.doing(OPENING)
    role = Role(world=run.ranks.world, shards=shards, rank=run.ranks.rank)
    return open_setup(workload, run.options, role, is_demo=run.workload is None)


def _sampler_of(run: Run, setup: Setup) -> GlobalBatchSampler:
    """Return the batches of the run."""
    if setup.stream is not None:
        note = split_note(setup.workload.train_data[0], run.ranks)
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
    from autobatch.report.page import render

    try:
        write_atomic(out / REPORT, render(load_run(out)).encode())
    except Exception as error:  # whatever drawing raises, the training is done
        run.progress.note(f"the report could not be written: {type(error).__name__}: {error_text(error)}")
        run.record(report=None)
