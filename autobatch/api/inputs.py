"""The inputs of a training: of a new run, and of one that is resumed with its stored plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from autobatch.api.run import Run, check_data_of_ranks, claim
from autobatch.api.stages import OPENING, open_workload, plan, tune_and_split
from autobatch.core.errors import InputError
from autobatch.core.records import Plan, RunRecord
from autobatch.distributed.rank_plan import shards_of
from autobatch.distributed.shared_stream import open_sampler, split_note
from autobatch.rehearsal.process import ThisProcess
from autobatch.rehearsal.setup import KeyValue, Role, Setup, data_of_setup, open_setup
from autobatch.report.result import Result
from autobatch.search.plan_split import read_sizes
from autobatch.training.export import check_exportable
from autobatch.training.resume import (
    BEFORE_TRAINING,
    changes_since_checkpoint,
    check_same_run,
    load_run_state,
)
from autobatch.training.run import RunInputs
from autobatch.training.run_folder import folder_of, move_earlier_run
from autobatch.workload.contract import Workload, schedule_arguments
from autobatch.workload.data_digest import DataDigest, check_same_data
from autobatch.workload.order import GlobalBatchSampler
from autobatch.workload.reference import find_workload
from autobatch.workload.streams import COUNTED, ENDLESS, count_samples


def begin(run: Run) -> RunInputs:
    """Search, plan and tune for a new run in one process, and open the setup that trains.

    Raises:
        InputError: the workload or an option is invalid.
        DoesNotFitError: not even a micro-batch of 1 fits.
    """
    options, sizes = run.options, None
    with ExitStack() as run.trying:
        open_workload(run)
        process, info = run.setup, run.setup.info
        samples = info.epoch_samples
        if samples is None:
            samples = _count(run, lambda: process.call("counting the samples", count_stream))
        out = claim(run, lambda: folder_of(options.out, info.name, resume=False))
        if info.shards is None:
            # Weights that cannot be exported must fail before minutes are spent on a probe.
            process.call("the check of the weights", check_exportable)
        plan(run)
        if run.ranks.earlier_out is None:  # which is this run, started again
            earlier = run.ranks.once(lambda: move_earlier_run(out))
            if earlier is not None:
                run.progress.note(f"moved the earlier run of {out} to {earlier}")
        tune_and_split(run, options.steps or math.ceil((options.epochs or 1) * samples / run.target))
        process, info = run.setup, run.setup.info
        if run.plan.size_cut is not None:
            # Sent, so that the process that trains need not read them again.
            sizes = process.call("reading the sizes of the samples", read_sizes)
    # A child has ended by now, and its memory is free for the training.
    if isinstance(process, ThisProcess) and info.shards is None:
        setup = process.setup
    else:
        setup = _open_to_train(run, find_workload(run.workload, options.seed), info.shards)
        check_same_data([info.data, data_of_setup(setup)], ["the probe", "the process that trains"])
    if sizes is not None:
        setup.worst_case.take_sizes(sizes)
    return _inputs(run, setup, _sampler_of(run, setup, samples), key=info.key, data=info.data)


def resume(run: Run) -> RunInputs:
    """Take the stored plan of a run, or plan it again if something has changed that the plan depends on.

    Raises:
        InputError: there is no run to resume, or this is not the same run.
    """
    options, ranks, progress = run.options, run.ranks, run.progress
    progress.doing(OPENING)
    workload = find_workload(run.workload, options.seed)
    out = claim(run, lambda: folder_of(options.out, workload.name, resume=True))
    checkpoint = load_run_state(out, ranks)
    for line in checkpoint.passed_over:
        progress.note(f"skipped an invalid checkpoint: {line}")
    stored = msgspec.convert(checkpoint.facts["plan"], Plan)
    is_shared = shards_of(stored) is not None
    if options.parallel == "shard" and not is_shared:
        raise InputError(
            "--parallel shard cannot resume a run of whole models: leave it out, or begin a new run"
        )
    shares = is_shared and options.parallel != "replicate"
    setup = _open_to_train(run, workload, ranks.world if shares and ranks.world > 1 else None)
    stream = setup.stream
    samples = None if stream is None else _count(run, lambda: count_samples(stream))
    sampler = _sampler_of(run, setup, samples)
    schedule = setup.workload.schedule
    scheduled = schedule is not None and "steps" in schedule_arguments(schedule)
    check_same_run(checkpoint, sampler, is_scheduled=scheduled)
    data = data_of_setup(setup)
    check_data_of_ranks(data, ranks, checkpoint)
    own_changes = changes_since_checkpoint(checkpoint, setup, ranks, options)
    changes = sorted({change for of_rank in ranks.gather(own_changes) for change in of_rank})
    content = checkpoint.facts["records"]
    records, profile = msgspec.convert(content, RunRecord), content.get("profile")
    earlier: dict[str, Any] = {name: getattr(records, name) for name in BEFORE_TRAINING}
    earlier["profile"] = None if profile is None else Path(profile)
    if changes:
        progress.note(
            f"resuming from {checkpoint.path} with another {' and another '.join(changes)}: the batch, the "
            "learning rate and the order of the data stay, the micro-batch is planned again, and sums differ "
            "by rounding"
        )
        key = _plan_again(run, stored, sampler, shares=setup.shards is not None)
        run.record(tuning=earlier.get("tuning"))
    else:
        progress.note(f"resuming from {checkpoint.path} on the same hardware")
        device = setup.device.describe()
        progress.opened(device)
        progress.planned(stored)
        run.result = Result(device=device, plan=stored, title=setup.workload.name)
        run.record(**earlier)
        key = checkpoint.facts.get("key", {})
    return _inputs(run, setup, sampler, key=key, data=data, resumed=checkpoint, is_exact=not changes)


def _plan_again(
    run: Run, stored: Plan, sampler: GlobalBatchSampler, *, shares: bool
) -> Mapping[str, KeyValue]:
    """Plan a stored run again, at its learning rate and without tuning. Return the key of its setup."""
    run.settle(trials=0, tune_lr=False)
    if run.ranks.world > 1:
        run.settle(parallel="shard" if shares else "replicate")
    with ExitStack() as run.trying:
        open_workload(run)
        plan(run)
        tune_and_split(run, sampler.total)
    rate = [name for name in Plan.__struct_fields__ if name.startswith("learning_rate")]
    run.record(plan=msgspec.structs.replace(run.plan, **{name: getattr(stored, name) for name in rate}))
    return run.setup.info.key


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


def count_stream(setup: Setup) -> tuple[int, list[str]]:
    """Count the samples of the stream of an open setup; see `count_samples`."""
    return count_samples(setup.stream)


def _count(run: Run, count: Callable[[], tuple[int, list[str]]]) -> int:
    """Return the samples of an epoch of a stream, counted only if the run depends on its end."""
    if run.options.epochs is None:
        return ENDLESS
    run.progress.note(COUNTED)
    samples, remarks = run.ranks.once(count)
    for line in remarks:
        run.progress.note(line)
    return samples


def _sampler_of(run: Run, setup: Setup, samples: int | None) -> GlobalBatchSampler:
    """Return the batches of the run.

    Args:
        run: of this rank.
        setup: has the data.
        samples: of an epoch of a stream.
    """
    if setup.stream is not None:
        note = split_note(setup.workload.train_data[0], run.ranks)  # type: ignore[index]
        if note is not None:
            run.progress.note(note)
    return open_sampler(setup.workload, setup.stream, run.ranks, run.options, samples)
