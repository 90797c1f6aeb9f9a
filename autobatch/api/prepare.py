"""A run that is ready to be trained: probed, planned and tuned, or resumed from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from autobatch.api.checks import CHECKING_SPLIT, refuse_split, refuse_weights
from autobatch.api.context import RunContext
from autobatch.api.over_ranks import check_data_of_ranks, claim_of_ranks
from autobatch.api.parallel import layout_of_resume, open_choice, probe_choice, with_parallel
from autobatch.api.probe_stage import (
    OPENING,
    JointSettings,
    open_setup_process,
    probe_and_plan,
    uninterrupted,
    write_memory_viz,
)
from autobatch.api.split import add_split, sizes_of
from autobatch.api.tune_stage import (
    add_learning_rate,
    add_tuning,
    check_storage_option,
    open_tuner,
)
from autobatch.core.options import Options
from autobatch.core.records.plan import Plan
from autobatch.core.records.run import RunRecord
from autobatch.core.records.tuning import Tuning
from autobatch.distributed.rank_plan import layout_of
from autobatch.distributed.sharding.layout import ShardLayout
from autobatch.distributed.shared_stream import open_stream, split_note
from autobatch.report.result import Result
from autobatch.search.sizes.real_batches import Order
from autobatch.setup.attempt import TrainSetup
from autobatch.setup.child import SetupProcess, ThisProcess
from autobatch.setup.key import KeyValue, device_key
from autobatch.setup.setup import Role, data_of_setup, open_setup
from autobatch.training.build import (
    build_sampler,
    count_stream,
    depends_on_end,
    order_changes,
    split_changes,
    stream_length,
)
from autobatch.training.resume import (
    changes_since_checkpoint,
    check_same_data_order,
    load_plan,
    load_run_state,
)
from autobatch.training.run_folder import (
    folder_of,
    move_earlier_run,
)
from autobatch.training.train_plan import PreparedRun, Resume
from autobatch.workload.contract import Workload
from autobatch.workload.data_digest import DataDigest, check_same_data
from autobatch.workload.order import GlobalBatchSampler
from autobatch.workload.reference import find_workload
from autobatch.workload.sampler_order import epoch_of
from autobatch.workload.streams import ENDLESS, count_samples

BEFORE_TRAINING = ("device", "probe", "tuning", "title", "predicted", "memory_curve")
"""Records of the parts before the training, which every checkpoint keeps for a resume."""


class ReadyRun(NamedTuple):
    """A run that is ready to be trained, and its folder."""

    result: Result
    """Records of the parts before the training."""
    run: PreparedRun
    out: Path


def prepare(
    workload: Workload | str | None,
    options: Options,
    context: RunContext,
    held: ExitStack,
) -> ReadyRun:
    """Probe, plan and tune in one process, then open the setup for the training."""
    check_storage_option(options)
    ranks = context.ranks
    with ExitStack() as opened:
        first = open_choice(workload, options, context, opened)
        process = first.process
        samples = _epoch_samples(process, options, context)
        sampler = build_sampler(samples, options)
        name = process.info.name
        out = claim_of_ranks(
            lambda: folder_of(options.train.out, name, resume=False), ranks, context.entered, held
        )
        if first.shard is None:
            refuse_weights(process)
        process, result, shard = probe_choice(workload, options, context, first, opened, stage=probe_and_plan)
        result = uninterrupted(result)
        assert result.plan is not None
        # A run that the launcher has started again has no earlier one.
        earlier = None if ranks.restart > 0 else ranks.once(lambda: move_earlier_run(out))
        if earlier is not None:
            context.progress.note(f"moved the earlier run of {out} to {earlier}")
        tuner = open_tuner(process, options, sampler.total, context, shard)
        if (
            (tuner.trials or tuner.lr_trials)
            and shard is None
            and options.split_check == "error"
            and result.plan.accumulation_steps > 1
        ):
            context.progress.doing(CHECKING_SPLIT)
            refuse_split(process, result.plan)
        if tuner.trials:
            result = add_tuning(tuner, result)
        if tuner.lr_trials:
            result = add_learning_rate(tuner, result)
        write_memory_viz(process, result, options, context.progress)
        result = _with_split(process, result, options, context)
        sizes = sizes_of(process, result)
    assert result.plan is not None
    # A child has ended by now, and its memory is free for the training.
    data = process.info.data
    if isinstance(process, ThisProcess) and shard is None:
        setup = process.setup
    else:
        found = _find(workload, options.device.seed, context)
        setup = _open_setup(found, options, context, shard, is_demo=workload is None)
        check_same_data([data, data_of_setup(setup)], ["the probe", "the process that trains"])
    setup = _budgeted(setup, process.info.key)
    sampler = _sampler_of(setup, options, samples, context)
    if sizes is not None:
        setup.worst_case.take_sizes(sizes)
    run = PreparedRun(
        setup=setup,
        plan=result.plan,
        sampler=sampler,
        key=process.info.key,
        facts=run_facts(result, data),
    )
    return ReadyRun(result, run, out)


def prepare_resume(
    workload: Workload | str | None,
    options: Options,
    context: RunContext,
    held: ExitStack,
) -> ReadyRun:
    """Take the stored plan if nothing has changed, else probe and plan the same batch again."""
    progress, ranks = context.progress, context.ranks
    found = _find(workload, options.device.seed, context)
    out = claim_of_ranks(
        lambda: folder_of(options.train.out, found.name, resume=True), ranks, context.entered, held
    )
    stored = load_run_state(out, ranks)
    for line in stored.passed_over:
        progress.note(f"skipped an invalid checkpoint: {line}")
    plan = load_plan(stored, options)
    shard = layout_of_resume(plan, options, ranks)
    setup = _open_setup(found, options, context, shard, is_demo=workload is None)
    sampler = _sampler_of(setup, options, None, context)
    check_same_data_order(stored, sampler, scheduled=setup.workload.schedule is not None)
    data = data_of_setup(setup)
    check_data_of_ranks(data, ranks, stored)
    changes = changes_since_checkpoint(
        stored,
        device_key(setup),
        plan,
        ranks,
        max_micro_batch=options.search.max_micro_batch,
        set_budget=None if options.device.memory_budget is None else setup.device.budget_bytes,
    )
    changes += split_changes(setup, plan, options.batch.split) + order_changes(setup, plan, sampler)
    changes += [] if setup.layout == layout_of(plan) else ["--parallel"]
    changes = sorted({change for of_rank in ranks.gather(changes) for change in of_rank})
    if not changes:
        # Nothing is claimed of a stream, and of values that are random by nature.
        exactly = ", bit for bit" if data is not None and data.is_fixed else ""
        progress.note(f"resuming from {stored.path} on the same hardware{exactly}")
        device = setup.device.describe()
        progress.opened(device)
        progress.planned(plan)
        result = stored_result(stored.facts, Result(device=device, plan=plan, title=setup.workload.name))
        setup = _budgeted(setup, stored.facts.get("key", {}))
        run = PreparedRun(
            setup=setup,
            plan=plan,
            sampler=sampler,
            key=stored.facts.get("key", {}),
            facts=run_facts(result, data),
            resume=Resume(checkpoint=stored, is_exact=True),
        )
        return ReadyRun(result, run, out)
    progress.note(
        f"resuming from {stored.path} with another {' and another '.join(changes)}: the batch, the learning "
        "rate and the order of the data stay, the micro-batch is planned again, and sums differ by rounding"
    )
    result, key = _planned_again(workload, options, context, shard)
    assert result.plan is not None
    rate = {name: getattr(plan, name) for name in Plan.__struct_fields__ if name.startswith("learning_rate")}
    plan = msgspec.structs.replace(result.plan, **rate)
    tuning = stored_result(stored.facts, result).tuning
    result = msgspec.structs.replace(result, plan=plan, tuning=_tuned_elsewhere(tuning))
    setup = _budgeted(setup, key)
    run = PreparedRun(
        setup=setup,
        plan=plan,
        sampler=sampler,
        key=key,
        facts=run_facts(result, data),
        resume=Resume(checkpoint=stored, is_exact=False),
    )
    return ReadyRun(result, run, out)


def run_facts(result: Result, data: DataDigest | None) -> dict[str, Any]:
    """Return what a resume takes over: the records of the parts before the training, and the data."""
    return {"records": result.to_json(*BEFORE_TRAINING, "profile"), "data": msgspec.to_builtins(data)}


def stored_result(facts: Mapping[str, Any], result: Result) -> Result:
    """Return a result with the records that an earlier process of the run has stored, if there are any."""
    fields = {name: facts.get("records", {}).get(name) for name in RunRecord.__struct_fields__}
    profile = facts.get("records", {}).get("profile")
    try:
        found = msgspec.convert(
            {name: value for name, value in fields.items() if value is not None}, RunRecord
        )
    except msgspec.ValidationError:  # of a checkpoint without records
        return result
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


def _planned_again(
    workload: Workload | str | None, options: Options, context: RunContext, shard: ShardLayout | None
) -> tuple[Result, Mapping[str, KeyValue]]:
    """Probe and plan the batch of a resumed run, and return the result with the key of the setup."""
    ranks = context.ranks
    with open_setup_process(workload, options, context, shard) as process:
        shard = process.info.layout
        together = JointSettings(shard)
        result = uninterrupted(probe_and_plan(process, options, context, together))
        if ranks.world > 1:
            result = with_parallel(result, options, shard, None, context)
        result = _with_split(process, result, options, context)
    return result, process.info.key


def _with_split(process: SetupProcess, result: Result, options: Options, context: RunContext) -> Result:
    """Choose the split of a run, whose order is known."""
    order = Order(
        options.target_batch,
        options.device.seed,
        last_batch=options.train.last_batch,
        steps=options.train.steps,
        epochs=options.train.epochs,
    )
    return add_split(process, result, options, context.progress, ranks=context.ranks, order=order)


def _find(workload: Workload | str | None, seed: int, context: RunContext) -> Workload:
    context.progress.doing(OPENING)
    return find_workload(workload, seed)


def _open_setup(
    workload: Workload,
    options: Options,
    context: RunContext,
    shard: ShardLayout | None,
    *,
    is_demo: bool,
) -> TrainSetup:
    """Open the setup for the training; rank 0 holds a model that ranks share."""
    ranks = context.ranks
    role = Role(world=ranks.world, shard=shard, holds_model=ranks.rank == 0, trains=True)
    return open_setup(workload, options, role, environ=context.environ, is_demo=is_demo)


def _budgeted(setup: TrainSetup, key: Mapping[str, KeyValue]) -> TrainSetup:
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
    setup: TrainSetup, options: Options, samples: int | None, context: RunContext
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
