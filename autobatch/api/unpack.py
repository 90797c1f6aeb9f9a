"""The options of a command, unpacked into the settings of each layer. No layer below knows the options."""

from __future__ import annotations

from collections.abc import Mapping

from autobatch.core.options import Options
from autobatch.core.records.plan import Plan
from autobatch.distributed.sharding.layout import ShardLayout
from autobatch.planning import launched_world_size, make_plan
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
