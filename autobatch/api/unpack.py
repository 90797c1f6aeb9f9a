"""The options of a command, unpacked into the settings of each layer. No layer below knows the options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from autobatch.core.errors import InputError
from autobatch.core.options import EstimateOptions, FitOptions
from autobatch.core.plan_options import PlanOptions, RankPlanOptions, TuneOptions
from autobatch.core.records.plan import Plan
from autobatch.core.search_options import SearchOptions
from autobatch.distributed.sharding.layout import ShardLayout
from autobatch.planning import launched_world_size, make_plan
from autobatch.probing.estimates.settings import EstimateSettings, RankSettings
from autobatch.search.one_probe import ProbeLimits, caps_of
from autobatch.setup.setup import SetupInfo, SetupSettings
from autobatch.training.run_settings import LoopSettings, RunSettings
from autobatch.tuning.tune_plan import TuneSettings
from autobatch.workload import demo

DEFAULT_TRIALS = 8
"""Configurations that are measured if no number was asked for."""


def setup_settings(
    options: SearchOptions,
    *,
    world: int = 1,
    shard: ShardLayout | None = None,
    holds_model: bool = True,
    keeps_batches: bool = False,
) -> SetupSettings:
    """Return the settings with which the setup is opened."""
    return SetupSettings(
        device=options.device,
        memory_budget=options.memory_budget,
        precision=options.precision,
        gradient_dtype=options.gradient_dtype,
        seed=options.seed,
        max_grad_norm=options.max_grad_norm,
        ema=options.ema,
        target_batch=options.batch,
        keeps_batches=keeps_batches,
        size_multiple=options.size_multiple,
        world=world,
        shard=shard,
        holds_model=holds_model,
        scan=options.scan,
    )


def shard_layout(options: SearchOptions, world: int) -> ShardLayout:
    """Return the layout in which this many ranks share a model."""
    return ShardLayout(world=world, sync=options.shard_sync, modules=options.shard_modules)


def probe_limits(options: SearchOptions, target_batch: int | None = None) -> ProbeLimits:
    """Return the bounds of the probe; ``target_batch`` is None if the probe is not for a plan."""
    return ProbeLimits(
        target_batch=target_batch,
        max_micro_batch=options.max_micro_batch,
        time_limit_s=options.time_limit or math.inf,
        has_own_budget=options.memory_budget is not None,
    )


def world_size_of(options: RankPlanOptions, environ: Mapping[str, str]) -> int:
    """Return the ranks that share a batch: those that were asked for, else those of the environment.

    Raises:
        InputError: WORLD_SIZE is no number of ranks.
    """
    if options.world_size is not None:
        return options.world_size
    return launched_world_size(environ)


def plan_for(info: SetupInfo, limit: int, options: PlanOptions, world_size: int = 1) -> Plan:
    """Plan the batch under a limit on the micro-batch.

    Raises:
        InputError: a rule for the learning rate lacks the batch that it was tuned for.
    """
    return make_plan(
        target_batch=options.target_batch,
        micro_batch_limit=limit,
        world_size=world_size,
        learning_rate=info.learning_rate,
        base_batch=options.base_batch or info.base_batch,
        rule=options.lr_rule,
        precision=info.precision,
        gradient_dtype=info.gradient_dtype,
    )


def estimate_settings(options: EstimateOptions) -> EstimateSettings:
    """Return the settings of an estimate: what to predict, and for which GPUs."""
    return EstimateSettings(
        device=options.device,
        memory_budget=options.memory_budget,
        precision=options.precision,
        gradient_dtype=options.gradient_dtype,
        seed=options.seed,
        profiles=options.profile,
        micro_batch=options.micro_batch,
        max_micro_batch=options.max_micro_batch,
        target_batch=options.target_batch,
        scan=options.scan,
        memory_viz=options.memory_viz,
    )


def rank_settings(options: EstimateOptions) -> RankSettings | None:
    """Return the ranks that an estimate is for; None for one GPU.

    Raises:
        InputError: the model would be shared by a single rank.
    """
    if options.ranks is not None and options.ranks > 1:
        return RankSettings(
            ranks=options.ranks,
            parallel=options.parallel,
            shard_sync=options.shard_sync,
            shard_modules=options.shard_modules,
        )
    if options.parallel == "shard":
        raise InputError(
            f"--parallel shard shares a model among ranks, found --ranks {options.ranks or 'unset'}: give "
            "--ranks N with N at least 2"
        )
    return None


def tune_settings(options: TuneOptions, info: SetupInfo, planned_steps: int) -> TuneSettings:
    """Return the settings of the tuner, for a run of this many optimizer steps."""
    return TuneSettings(
        trials=DEFAULT_TRIALS if options.trials is None else options.trials,
        planned_steps=planned_steps,
        cap=min(caps_of(info, probe_limits(options, options.target_batch)).values()),
        seed=options.seed,
        storage=options.storage,
        study=options.study,
        knobs=options.knobs,
        is_precision_open=options.precision == "auto",
        lr_trials=options.lr_trials if options.tune_lr else 0,
        lr_steps=options.lr_steps,
        asked={
            "target_batch": options.target_batch,
            "memory_budget": None if options.memory_budget is None else str(options.memory_budget),
            "max_micro_batch": options.max_micro_batch,
        },
    )


def fit_tune_settings(options: FitOptions, info: SetupInfo, planned_steps: int) -> TuneSettings:
    """Return the settings of the tuner within ``fit``, which knows how the run is fed."""
    return replace(
        tune_settings(options, info, planned_steps),
        run_samples=planned_steps * options.target_batch if options.trials is None else None,
        workers=info.workers if options.workers is None else options.workers,
        prefetch=info.prefetch if options.prefetch is None else options.prefetch,
        skips_nonfinite=options.on_nonfinite == "skip",
    )


def loop_settings(options: FitOptions, *, is_demo: bool) -> LoopSettings:
    """Return the settings of the training loop. A run without a length is one epoch; the demo has its own."""
    steps, epochs = options.steps, options.epochs
    if steps is None and epochs is None:
        steps, epochs = (demo.STEPS, None) if is_demo else (None, 1)
    return LoopSettings(
        target_batch=options.target_batch,
        seed=options.seed,
        steps=steps,
        epochs=epochs,
        last_batch=options.last_batch,
        max_grad_norm=options.max_grad_norm,
        ema=options.ema,
        on_nonfinite=options.on_nonfinite,
        warmup_samples=options.warmup_samples,
        bn_momentum=options.bn_momentum,
        workers=options.workers,
        prefetch=options.prefetch,
        sample_seeds=options.sample_seeds,
        grad_sync=options.grad_sync,
    )


def run_settings(options: FitOptions, out: Path, resume_hint: str) -> RunSettings:
    """Return the settings of a run: what it writes, and when."""
    return RunSettings(
        out=out,
        checkpoint_every=options.checkpoint_every,
        checkpoint_minutes=options.checkpoint_minutes,
        on_failed_save=options.on_failed_save,
        validate_every=options.validate_every,
        validation_micro_batch=options.validation_micro_batch,
        keep_last=options.keep_last,
        resume_hint=resume_hint,
    )
