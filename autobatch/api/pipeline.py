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
import shlex
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from autobatch.api.run import Run, agree_on_options, check_data_of_ranks, claim
from autobatch.core import versions
from autobatch.core.errors import AutobatchError, DoesNotFitError, InputError
from autobatch.core.files import REPORT, RESULT, write_atomic
from autobatch.core.options import Options, fields_of, refuse
from autobatch.core.records import Plan, Remedy, Tuning
from autobatch.core.text import error_text
from autobatch.device.profiles import data_home
from autobatch.distributed.ranks import agree_on_limit
from autobatch.estimates.estimator import estimate_limits, in_words, suggest
from autobatch.estimates.hugging_face import open_named
from autobatch.estimates.snapshots import estimate_snapshots
from autobatch.footprint.explain import memory_curve
from autobatch.planning import make_plan, split_over_ranks
from autobatch.rehearsal.process import ThisProcess, open_process
from autobatch.rehearsal.setup import Setup, data_of_setup, open_setup
from autobatch.report.facts import plural
from autobatch.report.result import Estimates, Result, load_run
from autobatch.search.find_limit import find_limit
from autobatch.search.plan_split import choose_split, read_sizes
from autobatch.search.probe import Limit
from autobatch.training.checkpoint import list_checkpoints, load_newest, step_of
from autobatch.training.metrics import check_trackers
from autobatch.training.resume import BEFORE_TRAINING, changes_since_checkpoint, check_same_run
from autobatch.training.run import TrainingRun, train_plan
from autobatch.training.run_folder import CHECKPOINTS, move_earlier_run
from autobatch.training.split_check import SHARED, Finding, examine, examine_run, statistics_notes
from autobatch.workload import demo
from autobatch.workload.contract import Workload
from autobatch.workload.data import DataDigest, check_same_data, digest_of
from autobatch.workload.order import GlobalBatchSampler
from autobatch.workload.rng import preserved_generators
from autobatch.workload.streams import length_of_stream, open_sampler
from autobatch.workload.user_code import NAMED_MODEL, WorkloadSource, find_workload, is_named_model

PLANNED_STEPS = 1000
"""Optimizer steps of the run that is tuned for, if nothing says how many."""
OPENING = "opening the workload"


def run_estimate(workload: WorkloadSource, options: Options) -> Estimates:
    """Run ``autobatch estimate``. Memory snapshots stand in place of a workload.

    Raises:
        InputError: the options exclude each other, or the workload or a snapshot is invalid.
    """
    if options.snapshot:
        if workload is not None:
            raise InputError("--snapshot stands in place of a workload, found both: leave one out")
        return estimate_snapshots(options)
    if is_named_model(workload):
        named, about = open_named(workload, options)
        found = estimate_limits(named, options)
        return msgspec.structs.replace(found, notes=[about, *found.notes])
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


def open_workload(run: Run) -> None:
    """Open the workload in the process that tries it.

    Raises:
        InputError: the device, the budget, the workload or a setting is invalid.
    """
    run.progress.doing(OPENING)
    run.trying.close()
    opened = open_process(run.workload, run.options, run.ranks.world, run.child)
    run.process = run.trying.enter_context(opened)


def search(run: Run, steps: int = PLANNED_STEPS) -> None:
    """Find what fits and, if the command plans, plan and tune for so many optimizer steps."""
    found = limit(run)
    if run.options.command != "probe":
        plan(run, found)
        tune(run, steps)


def limit(run: Run) -> Limit:
    """Find the largest micro-batch that fits on all ranks, or check the one that was asked for.

    With ``--parallel auto``, the ranks share the model as soon as a whole one does not fit on one of them.

    Raises:
        InputError: ranks have different workloads, or no plan is possible.
        DoesNotFitError: not even a micro-batch of 1 fits, or the one that was asked for does not.
    """
    ranks, share, reason = run.ranks, None, None
    if run.options.command != "probe":
        # An invalid plan must fail before minutes are spent on a probe.
        share = split_over_ranks(_plan(run, 1).target_batch, run.planned_world)[0]
        samples = run.process.info.epoch_samples
        if samples is not None and run.target > samples:
            run.progress.note(
                f"the batch of {run.target:,} is larger than the data, {plural(samples, 'sample')}"
            )
    found = _find(run, share)
    if run.options.parallel == "auto" and ranks.world > 1:
        refusals = ranks.gather(None if isinstance(found, Limit) else found.split(". ")[0])
        reason = "a whole model fits on each rank, so each has its own"
        rank = next((rank for rank, line in enumerate(refusals) if line is not None), None)
        if rank is not None:
            reason = (
                f"no whole model fits on rank {rank}, so the ranks share it (--parallel shard): "
                f"{refusals[rank]}"
            )
            run.progress.note(reason)
            run.settle(parallel="shard")
            open_workload(run)
            found = _find(run, share)
    if not isinstance(found, Limit):
        remedies: list[Remedy] = []
        with suppress(AutobatchError):  # the error stands without it
            remedies = run.process.call("looking for what helps", suggest)
        raise DoesNotFitError(f"{found}{in_words(remedies)}")
    info = run.process.info
    # For a stream these are only the scanned samples, and rank 0 reads them for all ranks.
    data = None if info.epoch_samples is None else info.samples
    ranks.check_equal({"the model": info.key.get("model"), "the data": data})
    check_data_of_ranks(info.data, ranks)
    probe, planned, note = agree_on_limit(ranks, found.probe, found.planned, info.device)
    if note is not None:
        run.progress.note(note)
    if ranks.world > 1:
        parallel = "shard" if run.options.parallel == "shard" else "replicate"
        probe = msgspec.structs.replace(probe, parallel=parallel, parallel_reason=reason)
    run.result = Result(device=info.device, probe=probe, profile=found.file, command=run.command)
    return found._replace(planned=planned)


def _find(run: Run, share: int | None) -> Limit | str:
    """Find the largest micro-batch on this rank; return the reason if none fits."""
    home = data_home()
    try:
        return find_limit(run.process, run.options, share=share, home=home, progress=run.progress)
    except DoesNotFitError as error:
        return str(error)


def plan(run: Run, found: Limit) -> None:
    """Plan the batch in micro-batches that fit."""
    info, trace, probe = run.process.info, found.trace, run.result.probe
    planned = _plan(run, found.planned)
    if planned.learning_rate_rule == "none" and planned.base_batch not in (None, run.target):
        run.progress.note(f"learning rate {planned.learning_rate:g}: {planned.learning_rate_source}")
    curve = None
    if trace is not None and trace.marks:
        curve = memory_curve(trace, found.probe.micro_batch, info.new_allocator(None))
    # A training says it of its own batches.
    says_all = run.options.command == "plan"
    notes = statistics_notes(info.batch_norms, planned.micro_batches) if says_all else []
    shared = {"parallel": probe.parallel, "parallel_reason": probe.parallel_reason}
    planned = msgspec.structs.replace(planned, **shared)
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
        precision=options.precision,
        gradient_dtype=info.gradient_dtype,
    )


def tune(run: Run, steps: int) -> None:
    """Check the loss of a plan, tune it for so many optimizer steps, and choose the split of its batches.

    Raises:
        InputError: the loss cannot be split, or a split by size was asked for and would change results.
    """
    options, process = run.options, run.process
    has_trials, tunes_rate = options.command in ("tune", "fit") and options.trials != 0, options.tune_lr
    if (has_trials or tunes_rate) and options.parallel == "shard":
        run.progress.note("nothing is tuned, because the ranks share the model")
        has_trials = tunes_rate = False
    finding = check_loss(run, lambda *asked: process.call("the check of the loss", examine_run, *asked))
    tuner = None
    if has_trials or tunes_rate:
        # Only here: Optuna takes half a second to import.
        from autobatch.tuning.fastest import Tuner
        from autobatch.tuning.learning_rate import tune_learning_rate

        tuner = Tuner(
            process=process,
            options=options,
            planned_steps=steps,
            home=data_home(),
            progress=run.progress,
            ranks=run.ranks,
            deadline=math.inf if options.timeout is None else time.monotonic() + options.timeout,
        )
    if tuner is not None and has_trials:
        chosen, tuning = tuner.tune(run.plan)
        run.record(plan=chosen, tuning=tuning)
    run.progress.doing("choosing how batches are split")
    chosen, note = choose_split(process, run.plan, run.result.probe, options, check=examine, ranks=run.ranks)
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


def check_loss(run: Run, check: Callable[[int, int, int], Finding]) -> Finding:
    """Check that the loss can be split as planned, before minutes are spent on trials.

    Args:
        run: with its plan.
        check: examines a micro-batch, a target batch and a seed.

    Raises:
        InputError: it cannot, and ``--split-check`` asks for an error.
    """
    asked, plan = run.options.on_inexact_split, run.plan
    if asked == "off":
        return Finding()
    if plan.parallel == "shard":
        return SHARED
    run.progress.doing("checking that the loss can be split")
    try:
        finding = check(plan.micro_batch, plan.target_batch, run.options.seed)
    except AutobatchError as error:
        finding = Finding(unchecked=str(error))
    finding.notes(asked, plan)
    return finding


def fit(run: Run) -> None:
    """Train a run to its end, and write its result and its report."""
    if (earlier := run.ranks.earlier_out) is not None:  # the launcher has started it again
        has_checkpoint = run.ranks.once(lambda: bool(list_checkpoints(earlier / CHECKPOINTS)))
        run.settle(out=str(earlier), resume=has_checkpoint)
    if run.options.steps is None and run.options.epochs is None:
        run.settle(**({"steps": demo.STEPS} if run.workload is None else {"epochs": 1}))
    with preserved_generators(run.workload):
        setup, sampler, data = (resume if run.options.resume else begin)(run)
    out, resumed = run.ranks.out, run.checkpoint
    assert out is not None
    training_run = TrainingRun(
        out=out,
        options=run.options,
        progress=run.progress,
        resume_hint=resume_hint(run.command, out),
        facts={
            "records": run.result.to_json(*BEFORE_TRAINING, "profile"),
            "data": msgspec.to_builtins(data),
        },
        notes=list(dict.fromkeys([*(resumed.facts["notes"] if resumed else []), *run.loss_notes])),
        sinks=run.sinks,
        until=run.until,
        resumed=resumed,
        is_exact=run.is_exact,
    )
    # The budget is that of the probe, which may be an earlier one.
    setup = replace(setup, device=setup.device.budgeted(run.result.device.budget_bytes))
    training = train_plan(setup, run.plan, sampler, training_run, run.ranks)
    # A model that ranks share is in the file alone.
    run.record(training=training, model=None if run.plan.parallel == "shard" else setup.model)
    write(run, out)


def begin(run: Run) -> tuple[Setup, GlobalBatchSampler, DataDigest | None]:
    """Search, plan and tune for a new run in one process, and open what trains: setup, batches and data.

    Raises:
        InputError: the workload or an option is invalid.
        DoesNotFitError: not even a micro-batch of 1 fits.
    """
    options, sizes = run.options, None
    with run.trying:
        open_workload(run)
        samples = run.process.info.epoch_samples or length_of_stream(options.steps)
        out = claim(run, run.process.info.name)
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
    if isinstance(process, ThisProcess) and run.options.parallel != "shard":
        setup = process.setup
    else:
        setup = _open_to_train(run, find_workload(run.workload, options.seed))
        check_same_data([info.data, data_of_setup(setup)], ["the probe", "the process that trains"])
    if sizes is not None:
        setup.worst_case.take_sizes(sizes)
    return setup, _sampler_of(run, setup), info.data


def resume(run: Run) -> tuple[Setup, GlobalBatchSampler, DataDigest | None]:
    """Open a run with its stored plan, or plan it again if something has changed that the plan depends on.

    Raises:
        InputError: there is no run to resume, or this is not the same run.
    """
    ranks, progress = run.ranks, run.progress
    progress.doing(OPENING)
    workload = find_workload(run.workload, run.options.seed)
    run.checkpoint = checkpoint = load_newest(claim(run, workload.name) / CHECKPOINTS, ranks)
    for line in checkpoint.passed_over:
        progress.note(f"skipped an invalid checkpoint: {line}")
    stored = msgspec.convert(checkpoint.facts["plan"], Plan)
    if run.options.parallel == "shard" and stored.parallel != "shard":
        raise InputError(
            "--parallel shard cannot resume a run of whole models: leave it out, or begin a new run"
        )
    if run.options.parallel == "auto" and ranks.world > 1:
        run.settle(parallel=stored.parallel or "replicate")
    setup = _open_to_train(run, workload)
    sampler = _sampler_of(run, setup)
    check_same_run(checkpoint, setup, sampler)
    data = data_of_setup(setup)
    check_data_of_ranks(data, ranks, checkpoint)
    own_changes = changes_since_checkpoint(checkpoint, setup, ranks, run.options)
    changes = sorted({change for of_rank in ranks.gather(own_changes) for change in of_rank})
    run.is_exact = not changes
    run.result = msgspec.convert(
        checkpoint.facts["records"], Result, dec_hook=lambda kind, value: kind(value)
    )
    rate = stored.learning_rate / stored.learning_rate_factor
    if not math.isclose(workload.learning_rate, rate):
        progress.note(
            f"the learning rate of the checkpoint, {rate:g}, counts, and not the workload's "
            f"{workload.learning_rate:g}"
        )
    if run.is_exact:
        progress.note(f"resuming from {checkpoint.path} on the same hardware")
        progress.opened(setup.device.describe())
        run.record(plan=stored)
        # Somebody may have edited it since. On the same hardware all ranks find the same.
        finding = check_loss(run, partial(examine_run, setup))
        run.loss_notes = finding.notes(run.options.on_inexact_split, stored)
        return setup, sampler, data
    progress.note(
        f"resuming from {checkpoint.path} with another {' and another '.join(changes)}: the batch, the "
        "learning rate and the order of the data stay, the micro-batch is planned again, and sums differ by "
        "rounding"
    )
    tuning = run.result.tuning
    run.settle(trials=0, tune_lr=False)
    with run.trying:
        open_workload(run)
        search(run)
    rates = {
        name: getattr(stored, name) for name in Plan.__struct_fields__ if name.startswith("learning_rate")
    }
    run.record(plan=msgspec.structs.replace(run.plan, **rates), tuning=tuning)
    return setup, sampler, data


def _open_to_train(run: Run, workload: Workload) -> Setup:
    """Open the setup for the training; rank 0 holds a model that ranks share."""
    run.progress.doing(OPENING)
    return open_setup(workload, run.options, run.ranks.world, rank=run.ranks.rank)


def _sampler_of(run: Run, setup: Setup) -> GlobalBatchSampler:
    """Return the batches of the run."""
    if setup.stream is not None and len({*run.ranks.gather(digest_of(setup.workload.train_data[0]))}) > 1:
        run.progress.note(
            "the stream begins with another sample on each rank. Rank 0 reads it for all ranks, so it must "
            "not be split by rank, or only the part of rank 0 is trained"
        )
    return open_sampler(setup.workload, setup.stream, run.options, run.ranks.broadcast)


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
