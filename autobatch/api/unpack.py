"""The options of a command, unpacked into the settings of each layer. No layer below knows the options."""

from __future__ import annotations

from collections.abc import Mapping

from autobatch.core.errors import InputError
from autobatch.core.options import Options
from autobatch.core.records.plan import Plan
from autobatch.distributed.sharding.layout import ShardLayout
from autobatch.planning import launched_world_size, make_plan
from autobatch.probing.estimates.settings import EstimateSettings, RankSettings
from autobatch.setup.setup import SetupInfo


def shard_layout(options: Options, world: int) -> ShardLayout:
    """Return the layout in which this many ranks share a model."""
    return ShardLayout(world=world, sync=options.ranks.shard_sync, modules=options.ranks.shard_modules)


def world_size_of(options: Options, environ: Mapping[str, str]) -> int:
    """Return the ranks that share a batch: those that were asked for, else those of the environment.

    Raises:
        InputError: WORLD_SIZE is no number of ranks.
    """
    if options.batch.world_size is not None:
        return options.batch.world_size
    return launched_world_size(environ)


def plan_for(
    info: SetupInfo, limit: int, options: Options, world_size: int = 1, *, multiple: int = 1
) -> Plan:
    """Plan the batch under a limit on the micro-batch, of multiples of a number.

    Raises:
        InputError: the batch is no multiple, or a rule for the learning rate lacks the batch that it was
            tuned for.
    """
    return make_plan(
        target_batch=options.target_batch,
        micro_batch_limit=limit,
        world_size=world_size,
        multiple=multiple,
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
