"""The stages of the pipeline before the training: open, search, plan, check, tune and split.

Each runs in the process that holds the setup. Over several ranks, all of them run the same stages, each in
its own process, and agree where one of them decides for all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from autobatch.api.call import Call
from autobatch.api.ranks import check_data_of_ranks
from autobatch.core.errors import AutobatchError, DoesNotFitError, InputError
from autobatch.core.records import MemoryCurve, Plan, PredictedPoint, Remedy, Tuning
from autobatch.distributed.rank_plan import agree_on_limit
from autobatch.distributed.sharding.layout import ShardLayout
from autobatch.estimates.suggestions import in_words, suggest
from autobatch.footprint.explain import memory_curve, predicted_points
from autobatch.planning import launched_world_size, make_plan, split_over_ranks
from autobatch.rehearsal.process import SetupProcess, open_process
from autobatch.rehearsal.setup import Role, SetupInfo, new_allocator
from autobatch.report.result import Result
from autobatch.report.words import decimal, plural
from autobatch.search.find_limit import Limit, check_size, find_limit
from autobatch.search.plan_split import choose_split
from autobatch.training.batchnorm import statistics_notes
from autobatch.training.split_check import ANYWAY, Finding, examine, first_samples
from autobatch.workload.order import GlobalBatchSampler

if TYPE_CHECKING:
    from autobatch.tuning.fastest import Tuner

PLANNED_STEPS = 1000
"""Optimizer steps of the run that is tuned for, if nothing says how many."""
OPENING = "opening the workload"
T = TypeVar("T")


class OpenSetup:
    """The process that holds the setup of a call: with a whole model, or with one that the ranks share.

    With ``--parallel auto``, the ranks share the model as soon as a whole one does not fit on one of them.
    All ranks make the same calls.

    Args:
        call: of this rank.
        opened: keeps the process open.
    """

    def __init__(self, call: Call, opened: ExitStack) -> None:
        self._call = call
        self._opened = opened
        asked = call.options.ranks.parallel
        self.may_share = asked == "auto" and call.ranks.world > 1
        """True as long as the ranks may still share the model."""
        self._layout = layout_of_call(call) if asked == "shard" else None
        self._process: SetupProcess | None = None
        self.reason = "a whole model fits on each rank, so each has its own" if self.may_share else None
        """The reason for the layout; None if it was asked for."""
        self.fitting(lambda: self.process)

    @property
    def process(self) -> SetupProcess:
        """The process that holds the setup; a new one once the ranks share the model."""
        if self._process is None:
            call, ranks = self._call, self._call.ranks
            call.progress.doing(OPENING)
            role = Role(
                world=ranks.world,
                shard=self._layout,
                holds_model=ranks.rank == 0,
                may_share=self.may_share,
            )
            self._process = self._opened.enter_context(
                open_process(call.workload, call.options, role, isolated=call.isolated, child=call.child)
            )
        return self._process

    @property
    def info(self) -> SetupInfo:
        """Description of the setup."""
        return self.process.info

    def fitting(self, act: Callable[[], T]) -> T:
        """Call an act and return its result. If not even a micro-batch of 1 fits, share the model and repeat.

        Raises:
            DoesNotFitError: it does not fit, and ranks cannot share the model, or share it already.
        """
        if not self.may_share:
            return act()
        failure = None
        try:
            found = act()
        except DoesNotFitError as error:
            failure = str(error).split(". ")[0]
        failures = self._call.ranks.gather(failure)
        rank = next((rank for rank, line in enumerate(failures) if line is not None), None)
        if rank is None:
            return found
        self.reason = (
            f"no whole model fits on rank {rank}, so the ranks share it (--parallel shard): {failures[rank]}"
        )
        self._opened.close()
        self._process, self.may_share, self._layout = None, False, layout_of_call(self._call)
        self._call.progress.note(self.reason)
        return act()


def layout_of_call(call: Call) -> ShardLayout:
    """Return the layout in which the ranks of a call share a model."""
    return ShardLayout(world=call.ranks.world)


def search_and_plan(call: Call, setup: OpenSetup) -> Result:
    """Find the largest micro-batch, and plan the batch unless only a probe was asked for.

    An interrupted probe of one process answers ``probe`` and ``plan``; it ends everything else.

    Raises:
        InputError: a rule for the learning rate lacks the batch that it was tuned for.
        DoesNotFitError: not even a micro-batch of 1 fits, or the one that was asked for does not.
    """
    alone = call.ranks.world == 1
    result = _probe(call, setup) if call.options.command == "probe" else _probe_and_plan(call, setup)
    may_end_here = alone and call.options.command in ("probe", "plan")
    if result.probe is not None and result.probe.stopped_by == "interrupt" and not may_end_here:
        raise KeyboardInterrupt
    return result if alone else _with_layout(call, setup, result)


def _probe(call: Call, setup: OpenSetup) -> Result:
    """Find the largest micro-batch, or check the one that was asked for."""
    asked, ranks = call.options.search.micro_batch, call.ranks
    if asked is None:
        limit = _limit(call, setup, None)
    else:
        size = asked

        def check() -> Limit:
            return Limit(check_size(setup.process, size, progress=call.progress))

        # If a larger size does not fit, that is no reason to share the model.
        limit = setup.fitting(check) if size == 1 else check()
    probe, _, note = agree_on_limit(ranks, limit.probe, limit.probe.micro_batch, setup.info.device)
    if note is not None:
        call.progress.note(note)
    return Result(
        device=setup.info.device,
        probe=probe,
        profile=limit.file,
        command=call.command,
    )


def _limit(call: Call, setup: OpenSetup, samples: int | None) -> Limit:
    """Find the largest micro-batch on this rank alone, and check that all ranks have the same workload."""

    def find() -> Limit:
        process, options = setup.process, call.options
        try:
            return find_limit(process, options, share=samples, home=call.home, progress=call.progress)
        except DoesNotFitError as error:
            if setup.may_share:
                raise
            refused = str(error)
        found: list[Remedy] = []
        with suppress(AutobatchError):  # the error stands without it
            found = process.call("looking for what helps", suggest)
        raise DoesNotFitError(f"{refused}{in_words(found)}")

    limit = setup.fitting(find)
    info = setup.info
    # For a stream these are only the scanned samples, and rank 0 reads them for all ranks.
    data = None if info.epoch_samples is None else info.samples
    call.ranks.check_equal({"the model": info.key.get("model"), "the data": data})
    check_data_of_ranks(info.data, call.ranks)
    return limit


def _memory_of(limit: Limit, info: SetupInfo) -> tuple[list[PredictedPoint], MemoryCurve | None]:
    """Return predicted peaks around a limit, and the memory over a step of the run at it; None if unknown."""
    unlimited = partial(new_allocator, info, capped=False, falls=limit.falls)
    ran = max((attempt.micro_batch for attempt in limit.probe.attempts if attempt.fits), default=1)
    has_phases = limit.trace is not None and limit.trace.marks
    curve = memory_curve(limit.trace, ran, unlimited()) if limit.trace is not None and has_phases else None
    return predicted_points(limit.programs, ran, unlimited, info.samples), curve


def _probe_and_plan(call: Call, setup: OpenSetup) -> Result:
    """Find the largest micro-batch and plan the batch, also after an interrupted probe."""
    ranks = call.ranks
    world = ranks.world
    if call.options.command == "plan" and world == 1:
        world = call.world_size or launched_world_size(os.environ)
    # An invalid plan must fail before minutes are spent on a probe.
    _plan(call, setup.info, 1, world)
    target, samples = call.options.target_batch, setup.info.epoch_samples
    if samples is not None and target > samples:
        call.progress.note(
            f"the batch of {target:,} is larger than the data: each step takes "
            f"{decimal(target / samples, 3)} epochs of {plural(samples, 'sample')}"
        )
    limit = _limit(call, setup, split_over_ranks(call.options.target_batch, world)[0])
    info = setup.info
    probe, planned, note = agree_on_limit(ranks, limit.probe, limit.planned, info.device)
    if note is not None:
        call.progress.note(note)
    plan = _plan(call, info, planned, world)
    call.progress.planned(plan)
    if plan.learning_rate_rule == "none" and plan.base_batch not in (None, plan.target_batch):
        call.progress.note(f"learning rate {plan.learning_rate:g}: {plan.learning_rate_source}")
    predicted, curve = _memory_of(limit, info)
    is_last = call.options.command == "plan"  # a training says it of its own batches
    return Result(
        device=info.device,
        probe=probe,
        plan=plan,
        profile=limit.file,
        title=info.name,
        command=call.command,
        predicted=predicted,
        memory_curve=curve,
        notes=statistics_notes(info.batch_norms, plan.micro_batches) if is_last else [],
    )


def _plan(call: Call, info: SetupInfo, limit: int, world_size: int) -> Plan:
    """Plan the batch in micro-batches up to ``limit``."""
    batch = call.options.batch
    return make_plan(
        target_batch=call.options.target_batch,
        micro_batch_limit=limit,
        world_size=world_size,
        multiple=call.options.search.micro_batch_multiple,
        learning_rate=info.learning_rate,
        base_batch=batch.base_batch or info.base_batch,
        rule=batch.lr_rule,
        precision=info.precision,
        gradient_dtype=info.gradient_dtype,
    )


def _with_layout(call: Call, setup: OpenSetup, result: Result) -> Result:
    """Record in the probe and the plan whether ranks share the model, with the reasons."""
    parallel = "replicate" if setup.info.layout is None else "shard"
    fields: dict[str, Any] = {"parallel": parallel, "parallel_reason": setup.reason}
    assert result.probe is not None
    probe = msgspec.structs.replace(result.probe, **fields)
    plan = result.plan and msgspec.structs.replace(result.plan, **fields)
    return msgspec.structs.replace(result, probe=probe, plan=plan)


def finish_plan(
    call: Call, setup: OpenSetup, result: Result, batches: GlobalBatchSampler | None = None
) -> Result:
    """Check the split of the loss, tune, choose the split of batches, and write what was asked for.

    Args:
        call: of this rank.
        setup: holds the process.
        result: of `search_and_plan`.
        batches: of the run; None if they are unknown.

    Raises:
        InputError: the loss cannot be split, or a split by size was asked for and would change results.
    """
    command, tune = call.options.command, call.options.tune
    has_trials, tunes_rate = command in ("tune", "fit") and tune.trials != 0, tune.tune_lr
    if (has_trials or tunes_rate) and setup.info.layout is not None:
        call.progress.note("nothing is tuned, because the ranks share the model")
        has_trials = tunes_rate = False
    # A training checks the loss on its own. Trials need the answer before.
    if command != "fit" or (call.options.split_check == "error" and (has_trials or tunes_rate)):
        _check_loss(call, setup, result, batches)
    tuner = None
    if has_trials or tunes_rate:
        tuner = _open_tuner(call, setup, PLANNED_STEPS if batches is None else batches.total)
    if tuner is not None and has_trials:
        assert result.plan is not None
        plan, tuning = tuner.tune(result.plan)
        result = msgspec.structs.replace(result, plan=plan, tuning=tuning)
    elif command == "tune":
        result = msgspec.structs.replace(result, tuning=Tuning(notes=["no trial was asked for"]))
    if result.plan is not None and result.probe is not None and result.probe.stopped_by != "interrupt":
        plan = choose_split(
            setup.process,
            result.plan,
            result.probe,
            call.options,
            ranks=call.ranks,
            progress=call.progress,
        )
        result = msgspec.structs.replace(result, plan=plan)
    return _add_learning_rate(call, tuner, result) if tuner is not None and tunes_rate else result


def _check_loss(call: Call, setup: OpenSetup, result: Result, batches: GlobalBatchSampler | None) -> None:
    """Check that the loss can be split, as ``--split-check`` asks; skip it after an interrupted probe.

    A check that itself fails is an error only if a split is planned and the option asks for errors.
    """
    probe, plan, asked = result.probe, result.plan, call.options.split_check
    if probe is None or probe.micro_batch < 1 or probe.stopped_by == "interrupt" or asked == "off":
        return
    if setup.info.layout is not None:
        if call.options.command != "fit":
            call.progress.note(
                "autobatch fit checks on rank 0 that the loss can be split, because the ranks share the model"
            )
        return
    micro_batch, steps = (
        (probe.micro_batch, 2) if plan is None else (plan.micro_batch, plan.accumulation_steps)
    )
    must_split = plan is not None and asked == "error"
    if must_split and steps == 1:
        return
    call.progress.doing("checking that the loss can be split into micro-batches")
    try:
        ids = None if batches is None else first_samples(batches)
        found = setup.process.call("the check of the loss", examine, micro_batch, ids)
    except AutobatchError as error:
        if must_split:
            raise
        found = Finding(unchecked=str(error))
    except KeyboardInterrupt:
        if must_split or call.options.command == "tune":
            raise
        found = Finding(unchecked="the check was interrupted")
    if must_split:
        if found.fault is not None:
            raise InputError(f"{found.fault}. {ANYWAY}")
        return
    if plan is None:
        found = found._replace(remark=None)  # a probe has no batch to split
    for line in found.notes(is_split=steps > 1):
        call.progress.note(line)


def _open_tuner(call: Call, setup: OpenSetup, steps: int) -> Tuner:
    """Return the tuner of a plan, and start its time limit."""
    # Only here: Optuna takes half a second to import.
    from autobatch.tuning.fastest import Tuner

    start, seconds = time.monotonic(), call.options.tune.timeout
    return Tuner(
        process=setup.process,
        options=call.options,
        planned_steps=steps,
        home=call.home,
        progress=call.progress,
        ranks=call.ranks,
        expired=lambda: seconds is not None and time.monotonic() - start > seconds,
    )


def _add_learning_rate(call: Call, tuner: Tuner, result: Result) -> Result:
    """Tune the learning rate, and add it to a result beside its trials, if it has any."""
    from autobatch.tuning.learning_rate import tune_learning_rate

    assert result.plan is not None
    try:
        plan, found = tune_learning_rate(tuner, result.plan)
    except KeyboardInterrupt:
        # Other ranks may be in the middle of a run, and ``fit`` would train next.
        if call.ranks.world > 1 or call.options.command == "fit":
            raise
        # The result so far is complete, and the next call continues the study.
        call.progress.note("interrupted: kept the learning rate")
        return result
    tuning = msgspec.structs.replace(result.tuning or Tuning(), learning_rate=found)
    return msgspec.structs.replace(result, plan=plan, tuning=tuning)
