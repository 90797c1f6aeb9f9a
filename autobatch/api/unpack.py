"""The options of a command, unpacked into the settings of each layer. No layer below knows the options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from autobatch.core.errors import InputError
from autobatch.core.options import Options
from autobatch.core.records.plan import Plan
from autobatch.distributed.sharding.layout import ShardLayout
from autobatch.planning import launched_world_size, make_plan
from autobatch.probing.estimates.settings import EstimateSettings, RankSettings
from autobatch.search.one_probe import ProbeLimits, caps_of
from autobatch.setup.setup import SetupInfo, SetupSettings
from autobatch.tuning.tune_plan import TuneSettings

DEFAULT_TRIALS = 8
"""Configurations that are measured if no number was asked for."""


def setup_settings(
    options: Options,
    *,
    world: int = 1,
    shard: ShardLayout | None = None,
    holds_model: bool = True,
    keeps_batches: bool = False,
) -> SetupSettings:
    """Return the settings with which the setup is opened."""
    return SetupSettings(
        device=options.device.device,
        memory_budget=options.device.memory_budget,
        precision=options.device.precision,
        gradient_dtype=options.device.gradient_dtype,
        seed=options.device.seed,
        max_grad_norm=options.train.max_grad_norm,
        ema=options.train.ema,
        target_batch=options.batch.target_batch,
        keeps_batches=keeps_batches,
        size_multiple=options.search.size_multiple,
        world=world,
        shard=shard,
        holds_model=holds_model,
        scan=options.search.scan,
    )


def shard_layout(options: Options, world: int) -> ShardLayout:
    """Return the layout in which this many ranks share a model."""
    return ShardLayout(world=world, sync=options.ranks.shard_sync, modules=options.ranks.shard_modules)


def probe_limits(options: Options, target_batch: int | None = None) -> ProbeLimits:
    """Return the bounds of the probe; ``target_batch`` is None if the probe is not for a plan."""
    return ProbeLimits(
        target_batch=target_batch,
        max_micro_batch=options.search.max_micro_batch,
        time_limit_s=options.search.time_limit or math.inf,
        has_own_budget=options.device.memory_budget is not None,
    )


def world_size_of(options: Options, environ: Mapping[str, str]) -> int:
    """Return the ranks that share a batch: those that were asked for, else those of the environment.

    Raises:
        InputError: WORLD_SIZE is no number of ranks.
    """
    if options.batch.world_size is not None:
        return options.batch.world_size
    return launched_world_size(environ)


def plan_for(info: SetupInfo, limit: int, options: Options, world_size: int = 1) -> Plan:
    """Plan the batch under a limit on the micro-batch.

    Raises:
        InputError: a rule for the learning rate lacks the batch that it was tuned for.
    """
    return make_plan(
        target_batch=options.target_batch,
        micro_batch_limit=limit,
        world_size=world_size,
        learning_rate=info.learning_rate,
        base_batch=options.batch.base_batch or info.base_batch,
        rule=options.batch.lr_rule,
        precision=info.precision,
        gradient_dtype=info.gradient_dtype,
    )


def estimate_settings(options: Options) -> EstimateSettings:
    """Return the settings of an estimate: what to predict, and for which GPUs."""
    return EstimateSettings(
        device=options.device.device,
        memory_budget=options.device.memory_budget,
        precision=options.device.precision,
        gradient_dtype=options.device.gradient_dtype,
        seed=options.device.seed,
        profiles=options.search.profile,
        micro_batch=options.search.micro_batch,
        max_micro_batch=options.search.max_micro_batch,
        target_batch=options.batch.target_batch,
        scan=options.search.scan,
        memory_viz=options.search.memory_viz,
    )


def rank_settings(options: Options) -> RankSettings | None:
    """Return the ranks that an estimate is for; None for one GPU.

    Raises:
        InputError: the model would be shared by a single rank.
    """
    if options.ranks.ranks is not None and options.ranks.ranks > 1:
        return RankSettings(
            ranks=options.ranks.ranks,
            parallel=options.ranks.parallel,
            shard_sync=options.ranks.shard_sync,
            shard_modules=options.ranks.shard_modules,
        )
    if options.ranks.parallel == "shard":
        raise InputError(
            f"--parallel shard shares a model among ranks, found --ranks {options.ranks.ranks or 'unset'}: "
            "give --ranks N with N at least 2"
        )
    return None


def tune_settings(options: Options, info: SetupInfo, planned_steps: int) -> TuneSettings:
    """Return the settings of the tuner, for a run of this many optimizer steps."""
    budget = options.device.memory_budget
    return TuneSettings(
        trials=DEFAULT_TRIALS if options.tune.trials is None else options.tune.trials,
        planned_steps=planned_steps,
        cap=min(caps_of(info, probe_limits(options, options.target_batch)).values()),
        seed=options.device.seed,
        storage=options.tune.storage,
        study=options.tune.study,
        knobs=options.tune.knobs,
        is_precision_open=options.device.precision == "auto",
        lr_trials=options.tune.lr_trials if options.tune.tune_lr else 0,
        lr_steps=options.tune.lr_steps,
        asked={
            "target_batch": options.target_batch,
            "memory_budget": None if budget is None else str(budget),
            "max_micro_batch": options.search.max_micro_batch,
        },
    )


def fit_tune_settings(options: Options, info: SetupInfo, planned_steps: int) -> TuneSettings:
    """Return the settings of the tuner within ``fit``, which knows how the run is fed."""
    return replace(
        tune_settings(options, info, planned_steps),
        run_samples=planned_steps * options.target_batch if options.tune.trials is None else None,
        workers=info.workers if options.train.workers is None else options.train.workers,
        prefetch=info.prefetch if options.train.prefetch is None else options.train.prefetch,
        skips_nonfinite=options.train.on_nonfinite == "skip",
    )
