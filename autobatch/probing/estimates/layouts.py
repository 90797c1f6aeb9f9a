"""Ways in which ranks share a step: a whole model on each, or a part of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from autobatch.core.records.base import Parallel, ShardSync
from autobatch.footprint.tracing.trace_step import Arrange


class Layout(NamedTuple):
    """The ranks of a step, and what each of them holds."""

    world: int = 1
    parallel: Parallel = "replicate"
    sync: ShardSync = "each"
    modules: str | None = None


ALONE = Layout()


@contextmanager
def arranged(layout: Layout) -> Iterator[tuple[Arrange | None, int]]:
    """Return how the ranks arrange a model, and how many sum gradients in a buffer beside it.

    A rank that has a part of a model is rank 0 of a group that exchanges nothing within the block.

    Args:
        layout: the ranks.
    """
    if layout.world == 1:
        yield None, 1
        return
    # Importing FSDP takes a second, which an estimate for one GPU saves.
    from autobatch.distributed.fake_group import fake_ranks
    from autobatch.distributed.sharding.model import Sharding

    if layout.parallel == "replicate":
        yield None, layout.world
        return
    with fake_ranks(layout.world) as mesh:
        yield Sharding(mesh=mesh, sync=layout.sync, modules=layout.modules), 1
