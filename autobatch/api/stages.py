"""The stages of the pipeline before the training: open, search, plan, check, tune and split.

Each runs in the process that holds the setup. Over several ranks, all of them run the same stages, each in
its own process, and agree where one of them decides for all.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from autobatch.api.call import Call
from autobatch.api.ranks import WholeModelTooLargeError, agree_on_fit, check_data_of_ranks
from autobatch.core.errors import AutobatchError, InputError
from autobatch.core.files import write_atomic
from autobatch.core.records import Plan, RankLimit, Tuning
from autobatch.distributed.rank_plan import limits_over_ranks, spread
from autobatch.distributed.sharding.layout import ONCE, ShardLayout
from autobatch.planning import launched_world_size, make_plan, samples_of_rank
from autobatch.report.result import Result
from autobatch.report.words import decimal, plural
from autobatch.search.attempts import step_snapshot
from autobatch.search.find_limit import Limit, check_size, find_limit
from autobatch.search.plan_split import choose_split
from autobatch.setup.session import SetupProcess, open_process
from autobatch.setup.setup import Role, SetupInfo
from autobatch.setup.trace import predicted_memory
from autobatch.training.split_check.check import ANYWAY, examine
from autobatch.training.split_check.compare import Finding
from autobatch.tuning.tune_plan import PlanTuner
from autobatch.workload.order import GlobalBatchSampler

PLANNED_STEPS = 1000
"""Optimizer steps of the run that is tuned for, if nothing says how many."""
OPENING = "opening the workload"
CHECKING_SPLIT = "checking that the loss can be split into micro-batches"
WHOLE = "a whole model fits on each rank, so each has its own"


class OpenSetup(NamedTuple):
    """The process that holds the setup, and the layout that it was opened with."""

    process: SetupProcess
    shard: ShardLayout | None
    """The layout of a shared model; None if each rank has a whole one."""
    reason: str | None
    """The reason for the layout; None if it was asked for."""


def open_layout(call: Call, opened: ExitStack) -> OpenSetup:
    """Open the setup as asked; ``auto`` shares the model if its weights alone are too large for some rank.

    Args:
        call: of this rank.
        opened: keeps the process open.
    """
    if _is_open_choice(call):
        try:
            process = agree_on_fit(lambda: _open(call, opened, may_share=True), call.ranks)
        except WholeModelTooLargeError as error:
            return _open_shared(call, opened, str(error))
        return OpenSetup(process, None, WHOLE)
    process = _open(call, opened, shard=layout_of_call(call) if _is_shared(call) else None)
    return OpenSetup(process, process.info.layout, None)


def search_and_plan(call: Call, setup: OpenSetup, opened: ExitStack) -> tuple[OpenSetup, Result]:
    """Find the largest micro-batch, and plan the batch if there is one; all ranks call it.

    ``auto`` shares the model if it does not fit whole on some rank. An interrupted probe of one process
    answers, but not one of several.

    Returns:
        The setup, which is another one if the ranks came to share the model, and what was found.

    Raises:
        InputError: a rule for the learning rate lacks the batch that it was tuned for.
        DoesNotFitError: not even a micro-batch of 1 fits, or the one that was asked for does not.
    """
    stage = _probe if call.options.command == "probe" else _probe_and_plan
    try:
        result = stage(call, setup, setup.shard is None and _is_open_choice(call))
    except WholeModelTooLargeError as error:
        setup = _open_shared(call, opened, str(error))
        result = stage(call, setup, False)
    if call.ranks.world == 1:
        return setup, result
    return setup, _with_layout(call, setup, uninterrupted(result))


def finish_plan(
    call: Call, setup: OpenSetup, result: Result, batches: GlobalBatchSampler | None = None
) -> Result:
    """Check the split of the loss, tune, choose the split of batches, and write what was asked for.

    Args:
        call: of this rank.
        setup: holds the process.
        result: what the search has found.
        batches: of the run; None if they are unknown.

    Raises:
        InputError: the loss cannot be split, or a split by size was asked for and would change results.
    """
    command = call.options.command
    tuner = None
    if command in ("tune", "fit"):
        result = uninterrupted(result)
        tuner = _open_tuner(call, setup, PLANNED_STEPS if batches is None else batches.total)
    has_trials = tuner is not None and tuner.trials > 0
    tunes_rate = tuner is not None and tuner.lr_trials > 0
    # A training checks the loss on its own. Trials need the answer before.
    if command != "fit" or (call.options.split_check == "error" and (has_trials or tunes_rate)):
        _check_loss(call, setup, result)
    if tuner is not None and (has_trials or (command == "tune" and not tunes_rate)):
        assert result.plan is not None
        assert result.probe is not None
        plan, tuning = tuner.tune(result.plan, result.probe.micro_batch)
        result = msgspec.structs.replace(result, plan=plan, tuning=tuning)
    _write_memory_viz(call, setup.process, result)
    result = _add_split(call, setup.process, result, batches)
    return _add_learning_rate(call, tuner, result) if tuner is not None and tunes_rate else result


def uninterrupted(result: Result) -> Result:
    """Return a result, or raise if its probe was interrupted, which ends the later stages too.

    Raises:
        KeyboardInterrupt: the probe was interrupted.
    """
    if result.probe is not None and result.probe.stopped_by == "interrupt":
        raise KeyboardInterrupt
    return result


def layout_of_call(call: Call) -> ShardLayout:
    """Return the layout in which the ranks of a call share a model."""
    asked = call.options.ranks
    return ShardLayout(world=call.ranks.world, sync=asked.shard_sync, modules=asked.shard_modules)


def _is_open_choice(call: Call) -> bool:
    """Return whether the ranks share a model only if they must."""
    return call.options.ranks.parallel == "auto" and call.ranks.world > 1


def _is_shared(call: Call) -> bool:
    return call.options.ranks.parallel == "shard"


def _open(
    call: Call, opened: ExitStack, *, shard: ShardLayout | None = None, may_share: bool = False
) -> SetupProcess:
    """Open the setup in a process that can be asked to try it."""
    ranks = call.ranks
    role = Role(world=ranks.world, shard=shard, holds_model=ranks.rank == 0, may_share=may_share)
    call.progress.doing(OPENING)
    return opened.enter_context(
        open_process(call.workload, call.options, role, isolated=call.isolated, child=call.child)
    )


def _open_shared(call: Call, opened: ExitStack, reason: str) -> OpenSetup:
    """Open the setup of a shared model in place of a whole one."""
    opened.close()
    call.progress.note(reason)
    process = _open(call, opened, shard=layout_of_call(call))
    return OpenSetup(process, process.info.layout, reason)


def _probe(call: Call, setup: OpenSetup, may_share: bool) -> Result:
    """Find the largest micro-batch, or check the one that was asked for."""
    process, ranks = setup.process, call.ranks
    asked = call.options.search.micro_batch
    if asked is None:
        found = _limit(call, process, None, may_share=may_share)
        probe = found.probe
    else:
        size = asked

        def check() -> Limit:
            return Limit(check_size(process, size, progress=call.progress))

        # A larger size that does not fit is no reason to share the model.
        found = agree_on_fit(check, ranks) if may_share and size == 1 else check()
        probe = found.probe
    of_ranks = limits_over_ranks(ranks, probe.micro_batch, process.info.device)
    limit = of_ranks[ranks.rank].limit
    if limit < probe.micro_batch:
        probe = msgspec.structs.replace(probe, micro_batch=limit, upper_bound_by=None)
    return Result(
        device=process.info.device,
        probe=msgspec.structs.replace(probe, ranks=of_ranks if ranks.world > 1 else []),
        profile=found.file,
        command=call.command,
    )


def _limit(call: Call, process: SetupProcess, samples: int | None, *, may_share: bool) -> Limit:
    """Find the largest micro-batch on this rank alone, after a check that all ranks have the same workload.

    Raises:
        DoesNotFitError: not even a micro-batch of 1 fits. All ranks raise it if they may share the model.
    """
    info, ranks = process.info, call.ranks

    def search() -> Limit:
        return find_limit(
            process, call.options, share=samples, home=call.home, progress=call.progress, clock=call.clock
        )

    limit = agree_on_fit(search, ranks) if may_share else search()
    # For a stream these are only the scanned samples, and rank 0 reads them for all ranks.
    data = None if info.epoch_samples is None else info.samples
    ranks.check_equal({"the model": info.key.get("model"), "the data": data})
    check_data_of_ranks(info.data, ranks)
    return limit


def _probe_and_plan(call: Call, setup: OpenSetup, may_share: bool) -> Result:
    """Find the largest micro-batch and plan the batch, also after an interrupted probe."""
    process, info, ranks = setup.process, setup.process.info, call.ranks
    world_size = 1
    if call.options.command == "plan" and ranks.world == 1:
        world_size = call.options.batch.world_size or launched_world_size(call.environ)
    # An invalid plan must fail before minutes are spent on a probe.
    _plan(call, info, 1, max(world_size, ranks.world), multiple=call.options.multiple or 1)
    samples = samples_of_rank(call.options.target_batch, world_size, 0)
    limit = _limit(call, process, samples, may_share=may_share)
    multiple = math.lcm(*ranks.gather(limit.probe.multiple))
    plan = _plan(call, info, limit.planned, world_size, multiple=multiple)
    of_ranks: list[RankLimit] = []
    if ranks.world > 1:
        of_ranks = limits_over_ranks(ranks, limit.planned, info.device)
        plan = spread(plan, of_ranks, setup.shard)
    _report_plan(call, plan, info.epoch_samples)
    call.progress.doing("predicting the memory of a step")
    predicted, curve = predicted_memory(limit.footprint, info, limit.probe.micro_batch)
    return Result(
        device=info.device,
        probe=msgspec.structs.replace(limit.probe, ranks=of_ranks),
        plan=plan,
        profile=limit.file,
        title=info.name,
        command=call.command,
        predicted=predicted,
        memory_curve=curve,
    )


def _plan(call: Call, info: SetupInfo, limit: int, world_size: int, *, multiple: int) -> Plan:
    """Plan the batch under a limit on the micro-batch, of multiples of a number."""
    batch = call.options.batch
    return make_plan(
        target_batch=call.options.target_batch,
        micro_batch_limit=limit,
        world_size=world_size,
        multiple=multiple,
        learning_rate=info.learning_rate,
        base_batch=batch.base_batch or info.base_batch,
        rule=batch.lr_rule,
        precision=info.precision,
        gradient_dtype=info.gradient_dtype,
    )


def _report_plan(call: Call, plan: Plan, epoch_samples: int | None) -> None:
    """Report a plan, that its batch exceeds an epoch, and that its learning rate is that of another batch."""
    call.progress.planned(plan)
    if epoch_samples is not None and plan.target_batch > epoch_samples:
        epochs = decimal(plan.target_batch / epoch_samples, 3)
        call.progress.note(
            f"the batch of {plan.target_batch:,} is larger than the data: each step takes {epochs} epochs of "
            f"{plural(epoch_samples, 'sample')}"
        )
    if plan.learning_rate_rule == "none" and plan.base_batch not in (None, plan.target_batch):
        call.progress.note(f"learning rate {plan.learning_rate:g}: {plan.learning_rate_source}")


def _with_layout(call: Call, setup: OpenSetup, result: Result) -> Result:
    """Record in the probe and the plan whether ranks share the model, with the reasons."""
    sync = None if setup.shard is None else setup.shard.sync
    is_changed = sync not in (None, call.options.ranks.shard_sync)
    if is_changed:
        call.progress.note(f"gradients are reduced once per step (--shard-sync once): {ONCE}")
    layout: dict[str, Any] = {
        "parallel": "replicate" if setup.shard is None else "shard",
        "parallel_reason": setup.reason,
        "shard_sync": sync,
        "shard_sync_reason": ONCE if is_changed else None,
    }
    assert result.probe is not None
    probe = msgspec.structs.replace(result.probe, **layout)
    plan = None if result.plan is None else msgspec.structs.replace(result.plan, **layout)
    return msgspec.structs.replace(result, probe=probe, plan=plan)


def _check_loss(call: Call, setup: OpenSetup, result: Result) -> None:
    """Check whether the loss can be split, as asked; an interrupted probe has no check.

    Where a note is enough, the check is an extra: if it fails, that is a note too.

    Raises:
        InputError: it cannot be split into the micro-batches of the plan, and a note is not enough.
    """
    probe, plan, asked = result.probe, result.plan, call.options.split_check
    if probe is None or probe.micro_batch < 1 or probe.stopped_by == "interrupt" or asked == "off":
        return
    if setup.shard is not None:
        if call.options.command != "fit":
            call.progress.note(
                "autobatch fit checks on rank 0 that the loss can be split, because the ranks share the model"
            )
        return
    steps = 2 if plan is None else plan.accumulation_steps
    micro_batch = probe.micro_batch if plan is None else plan.micro_batch
    act = "the check of the loss"
    if plan is not None and asked == "error":
        if steps > 1:
            call.progress.doing(CHECKING_SPLIT)
            found = setup.process.call(act, examine, micro_batch, steps)
            if found.fault is not None:
                raise InputError(f"{found.fault}. {ANYWAY}")
        return
    call.progress.doing(CHECKING_SPLIT)
    try:
        found = setup.process.call(act, examine, micro_batch, steps)
    except AutobatchError as error:
        found = Finding(unchecked=str(error))
    except KeyboardInterrupt:
        if call.options.command == "tune":
            raise
        found = Finding(unchecked="the check was interrupted")
    if plan is None:
        found = found._replace(remarks=())  # a probe has no batch to split
    for line in found.notes(is_split=steps > 1):
        call.progress.note(line)


def _open_tuner(call: Call, setup: OpenSetup, steps: int) -> PlanTuner:
    """Return the tuner of a plan, whose time starts now; it tries nothing of a model that ranks share."""
    start, seconds = call.clock(), call.options.tune.timeout
    tuner = PlanTuner(
        process=setup.process,
        options=call.options,
        planned_steps=steps,
        home=call.home,
        progress=call.progress,
        ranks=call.ranks,
        expired=lambda: seconds is not None and call.clock() - start > seconds,
        clock=call.clock,
    )
    if setup.shard is None or not (tuner.trials or tuner.lr_trials):
        return tuner
    call.progress.note("nothing is tuned, because the ranks share the model")
    return replace(tuner, options=call.options.with_values(trials=0, tune_lr=False))


def _add_learning_rate(call: Call, tuner: PlanTuner, result: Result) -> Result:
    """Put the best learning rate into a result, beside the trials if there were any."""
    assert result.plan is not None
    try:
        plan, found = tuner.tune_learning_rate(result.plan)
    except KeyboardInterrupt:
        # Other ranks may be in the middle of a run, and a training would go on.
        if call.ranks.world > 1 or call.options.command == "fit":
            raise
        # The result so far is complete, and the next call continues the study.
        call.progress.note("interrupted: kept the learning rate")
        return result
    nothing = Tuning(trials=0, best={}, baseline_samples_per_s=0.0, best_samples_per_s=0.0, study="")
    tuning = msgspec.structs.replace(result.tuning or nothing, learning_rate=found)
    return msgspec.structs.replace(result, plan=plan, tuning=tuning)


def _write_memory_viz(call: Call, process: SetupProcess, result: Result) -> None:
    """Write the memory of a few steps of the result to ``--memory-viz``, if it was asked for.

    Raises:
        InputError: the file cannot be written.
    """
    probe, plan, path = result.probe, result.plan, call.options.search.memory_viz
    if path is None or probe is None or probe.micro_batch < 1:
        return
    call.progress.doing("recording the memory of a few steps")
    content = step_snapshot(
        process, probe.micro_batch if plan is None else plan.micro_batch, {} if plan is None else plan.knobs
    )
    if content is None:
        call.progress.note("--memory-viz: nothing was written, because the steps did not run on CUDA")
        return
    try:
        write_atomic(Path(path), content)
    except OSError as error:
        raise InputError(
            f"--memory-viz {path} cannot be written: {error.strerror or error}. Give another file"
        ) from error
    call.progress.note(f"the memory of a few steps is in {path}: open it at pytorch.org/memory_viz")


def _add_split(
    call: Call, process: SetupProcess, result: Result, batches: GlobalBatchSampler | None
) -> Result:
    """Put the split into the plan of a result; see `choose_split`."""
    if result.plan is None or result.probe is None or result.probe.stopped_by == "interrupt":
        return result
    plan = choose_split(
        process,
        result.plan,
        result.probe,
        call.options,
        ranks=call.ranks,
        batches=batches,
        progress=call.progress,
    )
    return msgspec.structs.replace(result, plan=plan)
