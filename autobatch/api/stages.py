"""The stages of a run before its training: open, limit, plan, check, tune and split.

Each reads and fills in the `Run`, and does its work in the process that holds the setup. Over several ranks,
all of them run the same stages, each in its own process, and agree where one of them decides for all.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from autobatch.api.ranks import check_data_of_ranks
from autobatch.api.run import Run
from autobatch.core.errors import AutobatchError, DoesNotFitError, InputError
from autobatch.core.records import MemoryCurve, Plan, PredictedPoint, Remedy, Tuning
from autobatch.distributed.rank_plan import agree_on_limit
from autobatch.estimates.suggestions import in_words, suggest
from autobatch.footprint.explain import memory_curve, predicted_points
from autobatch.planning import launched_world_size, make_plan, split_over_ranks
from autobatch.rehearsal.process import SetupProcess, open_process
from autobatch.rehearsal.setup import Role, SetupInfo, new_allocator
from autobatch.report.result import Result
from autobatch.report.words import decimal, plural
from autobatch.search.find_limit import find_limit
from autobatch.search.plan_split import choose_split
from autobatch.search.probe import Limit
from autobatch.training.batchnorm import statistics_notes
from autobatch.training.split_check import ANYWAY, SHARED, Finding, examine, first_samples
from autobatch.workload.order import GlobalBatchSampler

if TYPE_CHECKING:
    from autobatch.tuning.fastest import Tuner

PLANNED_STEPS = 1000
"""Optimizer steps of the run that is tuned for, if nothing says how many."""
OPENING = "opening the workload"
T = TypeVar("T")


def open_workload(run: Run) -> None:
    """Open the workload, with a whole model or with one that the ranks share.

    With ``--parallel auto``, the ranks share the model as soon as a whole one does not fit on one of them.

    Raises:
        InputError: the device, the budget, the workload or a setting is invalid.
    """
    asked = run.options.parallel
    run.may_share = asked == "auto" and run.ranks.world > 1
    run.shards = run.ranks.world if asked == "shard" else None
    run.layout_reason = "a whole model fits on each rank, so each has its own" if run.may_share else None
    opened(run)


def opened(run: Run) -> SetupProcess:
    """Return the process that holds the setup, which is opened if it is not yet."""
    if run.process is None:
        run.progress.doing(OPENING)
        role = Role(world=run.ranks.world, shards=run.shards)
        run.process = run.trying.enter_context(
            open_process(run.workload, run.options, role, isolated=run.isolated, child=run.child)
        )
    return run.process


def if_it_fits(run: Run, act: Callable[[], T]) -> T:
    """Call an act and return its result. If not even a micro-batch of 1 fits, share the model and repeat.

    Raises:
        DoesNotFitError: it does not fit, and ranks cannot share the model, or share it already.
    """
    if not run.may_share:
        return act()
    failure = None
    try:
        found = act()
    except DoesNotFitError as error:
        failure = str(error).split(". ")[0]
    failures = run.ranks.gather(failure)
    rank = next((rank for rank, line in enumerate(failures) if line is not None), None)
    if rank is None:
        return found
    run.layout_reason = (
        f"no whole model fits on rank {rank}, so the ranks share it (--parallel shard): {failures[rank]}"
    )
    run.trying.close()
    run.process, run.may_share, run.shards = None, False, run.ranks.world
    run.progress.note(run.layout_reason)
    opened(run)
    return act()


def probe(run: Run) -> None:
    """Find the largest micro-batch, or check the one that was asked for.

    Raises:
        DoesNotFitError: not even a micro-batch of 1 fits, or the one that was asked for does not.
        KeyboardInterrupt: it was interrupted, and other ranks wait.
    """
    limit = _limit(run, None)
    _record_limit(run, limit, limit.probe.micro_batch)


def plan(run: Run) -> None:
    """Find the largest micro-batch, and plan the batch in micro-batches of at most that.

    An interrupted probe of one process is planned with for ``plan``; it ends everything else.

    Raises:
        InputError: a rule for the learning rate lacks the batch that it was tuned for.
        DoesNotFitError: not even a micro-batch of 1 fits.
        KeyboardInterrupt: the probe was interrupted.
    """
    world = run.ranks.world
    if run.options.command == "plan" and world == 1:
        world = run.world_size or launched_world_size(os.environ)
    # An invalid plan must fail before minutes are spent on a probe.
    _plan(run, 1, world)
    target, samples = run.target, run.setup.info.epoch_samples
    if samples is not None and target > samples:
        run.progress.note(
            f"the batch of {target:,} is larger than the data: each step takes "
            f"{decimal(target / samples, 3)} epochs of {plural(samples, 'sample')}"
        )
    limit = _limit(run, split_over_ranks(target, world)[0])
    planned = _plan(run, _record_limit(run, limit, limit.planned), world)
    run.progress.planned(planned)
    if planned.learning_rate_rule == "none" and planned.base_batch not in (None, target):
        run.progress.note(f"learning rate {planned.learning_rate:g}: {planned.learning_rate_source}")
    info = run.setup.info
    if run.ranks.world > 1:
        planned = msgspec.structs.replace(planned, **_layout(run))
    predicted, curve = _memory_of(limit, info)
    is_last = run.options.command == "plan"  # a training says it of its own batches
    notes = statistics_notes(info.batch_norms, planned.micro_batches) if is_last else []
    run.record(plan=planned, title=info.name, predicted=predicted, memory_curve=curve, notes=notes)


def _record_limit(run: Run, limit: Limit, planned: int) -> int:
    """Record the limit that holds on all ranks, and return what a plan may ask for."""
    ranks, info = run.ranks, run.setup.info
    found, planned, note = agree_on_limit(ranks, limit.probe, planned, info.device)
    if note is not None:
        run.progress.note(note)
    if ranks.world > 1:
        found = msgspec.structs.replace(found, **_layout(run))
    run.found = Result(device=info.device, probe=found, profile=limit.file, command=run.command)
    is_answer = ranks.world == 1 and run.options.command in ("probe", "plan")
    if found.stopped_by == "interrupt" and not is_answer:
        raise KeyboardInterrupt
    return planned


def _layout(run: Run) -> dict[str, Any]:
    """Return whether ranks share the model, with the reason."""
    parallel = "replicate" if run.setup.info.shards is None else "shard"
    return {"parallel": parallel, "parallel_reason": run.layout_reason}


def _limit(run: Run, samples: int | None) -> Limit:
    """Find the largest micro-batch on this rank alone, and check that all ranks have the same workload."""

    def find() -> Limit:
        process = opened(run)
        try:
            return find_limit(process, run.options, share=samples, home=run.home, progress=run.progress)
        except DoesNotFitError as error:
            if run.may_share:
                raise
            refused = str(error)
        found: list[Remedy] = []
        with suppress(AutobatchError):  # the error stands without it
            found = process.call("looking for what helps", suggest)
        raise DoesNotFitError(f"{refused}{in_words(found)}")

    limit = if_it_fits(run, find)
    info = run.setup.info
    # For a stream these are only the scanned samples, and rank 0 reads them for all ranks.
    data = None if info.epoch_samples is None else info.samples
    run.ranks.check_equal({"the model": info.key.get("model"), "the data": data})
    check_data_of_ranks(info.data, run.ranks)
    return limit


def _memory_of(limit: Limit, info: SetupInfo) -> tuple[list[PredictedPoint], MemoryCurve | None]:
    """Return predicted peaks around a limit, and the memory over a step of the run at it; None if unknown."""
    unlimited = partial(new_allocator, info, capped=False)
    ran = max((attempt.micro_batch for attempt in limit.probe.attempts if attempt.fits), default=1)
    has_phases = limit.trace is not None and limit.trace.marks
    curve = memory_curve(limit.trace, ran, unlimited()) if limit.trace is not None and has_phases else None
    return predicted_points(limit.programs, ran, unlimited, info.samples), curve


def _plan(run: Run, limit: int, world_size: int) -> Plan:
    """Plan the batch in micro-batches up to ``limit``."""
    options, info = run.options, run.setup.info
    return make_plan(
        target_batch=run.target,
        micro_batch_limit=limit,
        world_size=world_size,
        multiple=options.micro_batch_multiple,
        learning_rate=info.learning_rate,
        base_batch=options.base_batch or info.base_batch,
        rule=options.lr_rule,
        precision=info.precision,
        gradient_dtype=info.gradient_dtype,
    )


def finish_plan(run: Run, batches: GlobalBatchSampler | None = None) -> None:
    """Check the split of the loss, tune, and choose the split of batches.

    Args:
        run: with a limit, and with a plan unless only a probe was asked for.
        batches: of the run; None if they are unknown.

    Raises:
        InputError: the loss cannot be split, or a split by size was asked for and would change results.
    """
    options = run.options
    command = options.command
    has_trials, tunes_rate = command in ("tune", "fit") and options.trials != 0, options.tune_lr
    if (has_trials or tunes_rate) and run.setup.info.shards is not None:
        run.progress.note("nothing is tuned, because the ranks share the model")
        has_trials = tunes_rate = False
    # A training checks the loss on its own. Trials need the answer before.
    if command != "fit" or (run.options.on_inexact_split == "error" and (has_trials or tunes_rate)):
        _check_loss(run, batches)
    if command == "probe":
        return
    tuner = None
    if has_trials or tunes_rate:
        tuner = _open_tuner(run, PLANNED_STEPS if batches is None else batches.total)
    if tuner is not None and has_trials:
        chosen, tuning = tuner.tune(run.plan)
        run.record(plan=chosen, tuning=tuning)
    elif command == "tune":
        run.record(tuning=Tuning(notes=["no trial was asked for"]))
    if run.probe.stopped_by != "interrupt":
        split = choose_split(
            run.setup, run.plan, run.probe, run.options, ranks=run.ranks, progress=run.progress
        )
        run.record(plan=split)
    if tuner is not None and tunes_rate:
        _tune_learning_rate(run, tuner)


def _check_loss(run: Run, batches: GlobalBatchSampler | None) -> None:
    """Check that the loss can be split, as ``--split-check`` asks; skip it after an interrupted probe.

    A check that itself fails is an error only if a split is planned and the option asks for errors.
    """
    found_limit, planned, asked = run.probe, run.result.plan, run.options.on_inexact_split
    if found_limit.micro_batch < 1 or found_limit.stopped_by == "interrupt" or asked == "off":
        return
    if run.setup.info.shards is not None:
        if run.options.command != "fit":
            run.progress.note(SHARED)
        return
    micro_batch, steps = found_limit.micro_batch, 2
    if planned is not None:
        micro_batch, steps = planned.micro_batch, planned.accumulation_steps
    must_split = planned is not None and asked == "error"
    if must_split and steps == 1:
        return
    run.progress.doing("checking that the loss can be split into micro-batches")
    try:
        ids = None if batches is None else first_samples(batches)
        found = run.setup.call("the check of the loss", examine, micro_batch, ids)
    except (AutobatchError, KeyboardInterrupt) as error:
        is_stopped = isinstance(error, KeyboardInterrupt)
        if must_split or (is_stopped and run.options.command == "tune"):
            raise
        found = Finding(unchecked="the check was interrupted" if is_stopped else str(error))
    if must_split:
        if found.fault is not None:
            raise InputError(f"{found.fault}. {ANYWAY}")
        return
    for line in found.notes(is_split=steps > 1):
        run.progress.note(line)


def _open_tuner(run: Run, steps: int) -> Tuner:
    """Return the tuner of a plan, and start its time limit."""
    # Only here: Optuna takes half a second to import.
    from autobatch.tuning.fastest import Tuner

    timeout = run.options.timeout
    return Tuner(
        process=run.setup,
        options=run.options,
        planned_steps=steps,
        home=run.home,
        progress=run.progress,
        ranks=run.ranks,
        deadline=math.inf if timeout is None else time.monotonic() + timeout,
    )


def _tune_learning_rate(run: Run, tuner: Tuner) -> None:
    """Tune the learning rate, and record it beside the trials, if there are any."""
    from autobatch.tuning.learning_rate import tune_learning_rate

    try:
        chosen, rate = tune_learning_rate(tuner, run.plan)
    except KeyboardInterrupt:
        # Other ranks may be in the middle of a run, and ``fit`` would train next.
        if run.ranks.world > 1 or run.options.command == "fit":
            raise
        # The result so far is complete, and the next call continues the study.
        run.progress.note("interrupted: kept the learning rate")
        return
    tuning = msgspec.structs.replace(run.result.tuning or Tuning(), learning_rate=rate)
    run.record(plan=chosen, tuning=tuning)
