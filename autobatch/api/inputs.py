"""The inputs of a training: of a new run, and of one that is resumed with its stored plan."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from autobatch.api.ranks import check_data_of_ranks, claim_of_ranks
from autobatch.api.run import Run
from autobatch.api.stages import OPENING, finish_plan, open_workload, plan
from autobatch.core.records import Plan, Tuning
from autobatch.distributed.rank_plan import shards_of
from autobatch.distributed.shared_stream import open_stream, split_note
from autobatch.rehearsal.process import ThisProcess
from autobatch.rehearsal.setup import KeyValue, Role, Setup, data_of_setup, open_setup
from autobatch.report.result import Result
from autobatch.search.plan_split import read_sizes
from autobatch.training.build import build_sampler, count_stream
from autobatch.training.checkpoint import Loaded
from autobatch.training.export import examine_weights
from autobatch.training.resume import (
    BEFORE_TRAINING,
    changes_since_checkpoint,
    check_same_run,
    load_run_state,
    stored_records,
)
from autobatch.training.run import RunInputs
from autobatch.training.run_folder import folder_of, move_earlier_run
from autobatch.workload.contract import Workload, schedule_arguments
from autobatch.workload.data_digest import DataDigest, check_same_data
from autobatch.workload.order import GlobalBatchSampler, epoch_of
from autobatch.workload.reference import find_workload
from autobatch.workload.streams import COUNTED, ENDLESS, count_samples


def begin(run: Run) -> RunInputs:
    """Search, plan and tune for a new run in one process, and open the setup that trains.

    Raises:
        InputError: the workload or an option is invalid.
        DoesNotFitError: not even a micro-batch of 1 fits.
    """
    sizes = None
    with ExitStack() as run.trying:
        open_workload(run)
        process, info = run.setup, run.setup.info
        samples = _epoch_samples(run)
        is_stream = info.epoch_samples is None
        batches = build_sampler(samples, run.options, (lambda _: range(samples)) if is_stream else None)
        claim_of_ranks(run, lambda: folder_of(run.options.out, info.name, resume=False))
        if info.shards is None:
            # Weights that cannot be exported must fail before minutes are spent on a probe.
            process.call("the check of the weights", examine_weights)
        plan(run)
        make_room(run)
        finish_plan(run, batches)
        process, info = run.setup, run.setup.info
        if run.plan.size_cut is not None:
            # Sent, so that the process that trains need not read them again.
            sizes = process.call("reading the sizes of the samples", read_sizes)
    # A child has ended by now, and its memory is free for the training.
    if isinstance(process, ThisProcess) and info.shards is None:
        setup = process.setup
    else:
        setup = _open_to_train(run, find_workload(run.workload, run.options.seed), info.shards)
        check_same_data([info.data, data_of_setup(setup)], ["the probe", "the process that trains"])
    if sizes is not None:
        setup.worst_case.take_sizes(sizes)
    return _inputs(run, setup, _sampler_of(run, setup, samples), key=info.key, data=info.data)


def make_room(run: Run) -> None:
    """Move an earlier run out of the folder, if one was asked for."""
    # A run that the launcher has started again has no earlier one.
    out = run.out
    if out is not None and run.ranks.earlier_out is None:
        earlier = run.ranks.once(lambda: move_earlier_run(out))
        if earlier is not None:
            run.progress.note(f"moved the earlier run of {out} to {earlier}")


def resume(run: Run) -> RunInputs:
    """Take the stored plan of a run, or plan it again if something has changed that the plan depends on.

    Raises:
        InputError: there is no run to resume, or this is not the same run.
    """
    options, ranks, progress = run.options, run.ranks, run.progress
    progress.doing(OPENING)
    workload = find_workload(run.workload, options.seed)
    out = claim_of_ranks(run, lambda: folder_of(options.out, workload.name, resume=True))
    checkpoint = load_run_state(out, ranks)
    for line in checkpoint.passed_over:
        progress.note(f"skipped an invalid checkpoint: {line}")
    stored = msgspec.convert(checkpoint.facts["plan"], Plan)
    setup = _open_to_train(run, workload, shards_to_resume(run, stored))
    sampler = _sampler_of(run, setup, None)
    schedule = setup.workload.schedule
    scheduled = schedule is not None and "steps" in schedule_arguments(schedule)
    check_same_run(checkpoint, sampler, is_scheduled=scheduled)
    data = data_of_setup(setup)
    check_data_of_ranks(data, ranks, checkpoint)
    own_changes = changes_since_checkpoint(checkpoint, setup, ranks, options)
    changes = sorted({change for of_rank in ranks.gather(own_changes) for change in of_rank})
    if changes:
        progress.note(
            f"resuming from {checkpoint.path} with another {' and another '.join(changes)}: the batch, the "
            "learning rate and the order of the data stay, the micro-batch is planned again, and sums differ "
            "by rounding"
        )
        if ranks.world > 1:
            run.settle(parallel="replicate" if setup.shards is None else "shard")
        key = _plan_again(run, stored, sampler, _stored(checkpoint).get("tuning"))
    else:
        progress.note(f"resuming from {checkpoint.path} on the same hardware")
        device = setup.device.describe()
        progress.opened(device)
        progress.planned(stored)
        run.found = Result(device=device, plan=stored, title=setup.workload.name)
        run.record(**_stored(checkpoint))
        key = checkpoint.facts.get("key", {})
    return _inputs(run, setup, sampler, key=key, data=data, resumed=checkpoint, is_exact=not changes)


def shards_to_resume(run: Run, stored: Plan) -> int | None:
    """Return the number of ranks that share the model of a resumed run: as asked, else as before."""
    world, asked = run.ranks.world, run.options.parallel
    if world == 1 or asked == "replicate":
        return None
    return world if asked == "shard" or shards_of(stored) is not None else None


def _stored(checkpoint: Loaded) -> dict[str, Any]:
    """Return the records that an earlier process of the run has stored, if it has any."""
    found = stored_records(checkpoint.facts)
    if found is None:
        return {}
    profile = None if found.profile is None else Path(found.profile)
    return {"profile": profile, **{name: getattr(found, name) for name in BEFORE_TRAINING}}


def _plan_again(
    run: Run, stored: Plan, sampler: GlobalBatchSampler, tuning: Tuning | None
) -> Mapping[str, KeyValue]:
    """Plan a stored run again, at its learning rate and without tuning. Return the key of its setup."""
    run.settle(trials=0, tune_lr=False)
    with ExitStack() as run.trying:
        open_workload(run)
        plan(run)
        finish_plan(run, sampler)
        key = run.setup.info.key
    rate = [name for name in Plan.__struct_fields__ if name.startswith("learning_rate")]
    planned = msgspec.structs.replace(run.plan, **{name: getattr(stored, name) for name in rate})
    if tuning is not None and tuning.trials:
        note = "the run went on with another plan, without the choices that were made before"
        tuning = msgspec.structs.replace(tuning, notes=[*tuning.notes, note])
    run.record(plan=planned, tuning=tuning)
    return key


def _inputs(
    run: Run,
    setup: Setup,
    sampler: GlobalBatchSampler,
    *,
    key: Mapping[str, KeyValue],
    data: DataDigest | None,
    **resumed: Any,
) -> RunInputs:
    """Return the inputs of a training with the budget of its probe, as stored in its key."""
    budget_bytes = key.get("budget_bytes")
    if budget_bytes is not None:
        setup = replace(setup, device=setup.device.budgeted(int(budget_bytes)))
    records = run.result.to_json(*BEFORE_TRAINING, "profile")
    facts = {"records": records, "data": msgspec.to_builtins(data)}
    return RunInputs(
        setup=setup, plan=run.plan, sampler=sampler, key=key, facts=facts, until=run.until, **resumed
    )


def _open_to_train(run: Run, workload: Workload, shards: int | None) -> Setup:
    """Open the setup for the training; rank 0 holds a model that ranks share."""
    run.progress.doing(OPENING)
    role = Role(world=run.ranks.world, shards=shards, rank=run.ranks.rank)
    return open_setup(workload, run.options, role, is_demo=run.workload is None)


def _epoch_samples(run: Run) -> int:
    """Return the samples of an epoch. A stream is counted only if the run depends on its end."""
    process = run.setup
    if process.info.epoch_samples is not None:
        return process.info.epoch_samples
    if run.options.epochs is None:
        return ENDLESS
    run.progress.note(COUNTED)
    samples, remarks = run.ranks.once(lambda: process.call("counting the samples", count_stream))
    for line in remarks:
        run.progress.note(line)
    return samples


def _sampler_of(run: Run, setup: Setup, samples: int | None) -> GlobalBatchSampler:
    """Return the batches of the run.

    Args:
        run: of this rank.
        setup: has the data.
        samples: samples of an epoch of a stream; None if they are not counted yet.
    """
    options, ranks, stream = run.options, run.ranks, setup.stream
    if stream is None:
        samples, order = epoch_of(setup.workload, options.seed)
        return build_sampler(samples, options, order)
    if samples is None:
        is_counted = options.epochs is not None
        samples = ranks.once(lambda: count_samples(stream)[0]) if is_counted else ENDLESS
    note = split_note(setup.workload.train_data[0], ranks)  # type: ignore[index]
    if note is not None:
        run.progress.note(note)
    reader = open_stream(stream, ranks, options.seed, run.target)
    return build_sampler(samples, options, reader=reader)
