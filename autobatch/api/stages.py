"""The stages of a run before its training: open, limit, plan and tune.

Each reads and fills in the `Run`, and does its work in the process that holds the setup. Over several ranks,
all of them run the same stages, each in its own process, and agree where one of them decides for all.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from autobatch.api.run import Run, check_data_of_ranks
from autobatch.core.errors import AutobatchError, DoesNotFitError
from autobatch.core.records import Plan, Remedy, Tuning
from autobatch.core.text import listed
from autobatch.device.allocator.caching import new_allocator
from autobatch.device.profiles import data_home
from autobatch.distributed.rank_plan import agree_on_limit
from autobatch.estimates.suggestions import in_words, suggest
from autobatch.footprint.explain import memory_curve
from autobatch.planning import make_plan, split_over_ranks
from autobatch.rehearsal.process import open_process
from autobatch.rehearsal.setup import Role
from autobatch.report.result import Result
from autobatch.report.words import plural
from autobatch.search.find_limit import find_limit
from autobatch.search.plan_split import choose_split
from autobatch.search.probe import Limit
from autobatch.training.batchnorm import statistics_notes
from autobatch.training.split_check import SHARED, Finding, examine, examine_run

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
    of_trials = ("knobs",) if tunes_rate else ("knobs", "timeout")
    idle = [f"--{name}" for name in of_trials if getattr(options, name) is not None]
    if options.trials == 0 and idle:
        run.progress.note(f"no effect with --trials 0: {listed(idle)}")
    if (has_trials or tunes_rate) and process.info.shards is not None:
        run.progress.note("nothing is tuned, because the ranks share the model")
        has_trials = tunes_rate = False
    finding = examine_loss(
        run,
        lambda *asked: process.call("the check of the loss", examine_run, *asked),
        is_shared=process.info.shards is not None,
    )
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


def examine_loss(run: Run, check: Callable[[int, int, int], Finding], *, is_shared: bool) -> Finding:
    """Examine whether the loss can be split, before minutes are spent on trials.

    Args:
        run: with its plan.
        check: examines a micro-batch, a target batch and a seed.
        is_shared: True if ranks share the model.

    Raises:
        InputError: it cannot, the plan splits it, and ``--split-check`` asks for an error.
    """
    if run.options.on_inexact_split == "off":
        return Finding()
    if is_shared:
        return SHARED
    run.progress.doing("checking that the loss can be split into micro-batches")
    try:
        finding = check(run.plan.micro_batch, run.plan.target_batch, run.options.seed)
    except AutobatchError as error:
        finding = Finding(unchecked=str(error))
    finding.notes(run.options.on_inexact_split, run.plan)
    return finding
