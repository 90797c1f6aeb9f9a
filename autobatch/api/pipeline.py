"""The stages of each command, in order.

    workload ──► footprint ──► probe ──► plan ──► tune ──► train ──► report
                   (traced)    (run)    (exact)  (Optuna)  (loop)   (to read)

With an isolated `RunContext`, one child process opens the workload for the probe, the trials and the short
runs, and this process opens it once more for the training. Over several ranks, all of them run the same
stages, each with its own child.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Literal

from autobatch.api import unpack
from autobatch.api.checks import note_split, refuse_split
from autobatch.api.context import RunContext
from autobatch.api.over_ranks import check_count, options_of_rank
from autobatch.api.parallel import StageResult, check_parallel, open_choice, probe_choice
from autobatch.api.probe_stage import probe_and_plan, probe_only, uninterrupted, write_memory_viz
from autobatch.api.split import add_split
from autobatch.api.tune_stage import (
    add_learning_rate,
    add_tuning,
    check_storage_option,
    open_tuner,
)
from autobatch.core.errors import InputError
from autobatch.core.options import Options
from autobatch.device.profiles import data_home
from autobatch.distributed.ranks import Ranks
from autobatch.estimates.estimator import estimate_limits
from autobatch.report.result import Estimates, Result
from autobatch.workload.contract import Workload
from autobatch.workload.reference import find_workload

PLANNED_STEPS = 1000
"""Optimizer steps of the run that is tuned for, if nothing says how many."""


def checked_options(options: Options, ranks: Ranks) -> Options:
    """Return the options of this rank, after a check that the ranks can do what was asked for.

    Raises:
        InputError: they cannot, or ranks differ in an option or a version.
    """
    check_count(options, ranks)
    check_parallel(options, ranks)
    return options_of_rank(options, ranks)


def run_probe(workload: Workload | str | None, options: Options, context: RunContext) -> Result:
    """Run ``autobatch probe``; all ranks call it."""
    options = checked_options(options, context.ranks)
    with ExitStack() as opened:
        first = open_choice(workload, options, context, opened)
        found = probe_choice(workload, options, context, first, opened, stage=probe_only)
        return _finished(found, options, context)


def run_plan(workload: Workload | str | None, options: Options, context: RunContext) -> Result:
    """Run ``autobatch plan``; all ranks call it.

    An interrupted probe of one process answers with the largest size so far.

    Raises:
        InputError: see `for_own_loop`.
    """
    ranks = context.ranks
    options = for_own_loop(checked_options(options, ranks), ranks)
    world_size = 1 if ranks.world > 1 else unpack.world_size_of(options, context.environ)
    with ExitStack() as opened:
        first = open_choice(workload, options, context, opened)
        stage = partial(probe_and_plan, world_size=world_size)
        found = probe_choice(workload, options, context, first, opened, stage=stage)
        result = _finished(found, options, context, check=options.split_check)
        return add_split(found.process, result, options, context.progress, ranks=ranks, is_last=True)


def for_own_loop(options: Options, ranks: Ranks) -> Options:
    """Return the options of a plan over ranks. In a user's loop, each rank has a whole model.

    Raises:
        InputError: another number of ranks was asked for than run, or such a loop would share a model.
    """
    if ranks.world == 1:
        return options
    if options.batch.world_size not in (None, ranks.world):
        raise InputError(
            f"--world-size {options.batch.world_size} plans for another launcher, and {ranks.world} ranks "
            "run: leave one out"
        )
    if not options.search.own_loop:
        return options
    if options.ranks.parallel == "shard":
        raise InputError(
            "--own-loop plans for a loop of your own, in which each rank has a whole model, and --parallel "
            "shard shares it: leave one out"
        )
    return options.with_values(parallel="replicate")


def run_estimate(workload: Workload | str | None, options: Options, environ: Mapping[str, str]) -> Estimates:
    """Run ``autobatch estimate``.

    Raises:
        InputError: the options exclude each other, or the workload is invalid.
    """
    return estimate_limits(find_workload(workload, options.device.seed), options, home=data_home(environ))


def run_tune(workload: Workload | str | None, options: Options, context: RunContext) -> Result:
    """Run ``autobatch tune``; all ranks call it."""
    options = checked_options(options, context.ranks)
    check_storage_option(options)
    with ExitStack() as opened:
        first = open_choice(workload, options, context, opened)
        found = probe_choice(workload, options, context, first, opened, stage=probe_and_plan)
        process, result = found.process, uninterrupted(found.result)
        note_split(process, result, context.progress, is_last=False)
        tuner = open_tuner(process, options, PLANNED_STEPS, context, found.shard)
        if tuner.trials or not tuner.lr_trials:
            result = add_tuning(tuner, result)
        write_memory_viz(process, result, options, context.progress)
        result = add_split(process, result, options, context.progress, ranks=context.ranks)
        if not tuner.lr_trials:
            return result
        try:
            return add_learning_rate(tuner, result)
        except KeyboardInterrupt:
            if context.ranks.world > 1:
                raise  # the other ranks may be in the middle of a run
            # The result so far is complete, and the next call continues the study.
            context.progress.note("interrupted: kept the learning rate")
            return result


def _finished(
    found: StageResult,
    options: Options,
    context: RunContext,
    *,
    check: Literal["error", "note", "off"] | None = None,
) -> Result:
    """Return the result of a probe, after the extras that were asked for."""
    write_memory_viz(found.process, found.result, options, context.progress)
    if check == "error" and found.result.plan is not None and found.shard is None:
        refuse_split(found.process, found.result.plan)
    elif check != "off":
        note_split(found.process, found.result, context.progress)
    return found.result
