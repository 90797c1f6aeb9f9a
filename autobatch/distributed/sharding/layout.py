"""The layout of a model over ranks, in plain values that travel to a child process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from autobatch.core.records import Record, ShardSync

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from autobatch.distributed.sharding.model import Sharding


ONCE = "the weights have 16 bits, and sums of many micro-batches need more"
"""The reason for one reduction per step where another was asked for."""


class ShardLayout(Record, frozen=True, kw_only=True):
    """A model that ranks share."""

    world: int
    """Ranks that share it."""
    sync: ShardSync = "each"
    """Reduction of gradients: after each micro-batch, or once per step."""
    modules: str | None = None
    """Regular expression for the modules to gather at a time; None for the repeated blocks."""

    def fitting(self, model: nn.Module) -> ShardLayout:
        """Return the layout that a model gets."""
        from autobatch.distributed.sharding.checks import sync_of

        return msgspec.structs.replace(self, sync=sync_of(model, self.sync))

    def over(self, mesh: DeviceMesh) -> Sharding:
        """Return the sharding over the ranks of a mesh."""
        # Importing FSDP takes a second, which a run without it saves.
        from autobatch.distributed.sharding.model import Sharding

        return Sharding(mesh=mesh, sync=self.sync, modules=self.modules)

    def for_probe(self, device_type: str) -> Sharding:
        """Return the sharding of a process that runs a rank's steps without the other ranks.

        In a run, all ranks call it.
        """
        from autobatch.distributed.fake_group import open_fake_mesh

        return self.over(open_fake_mesh(self.world, device_type=device_type))

    def __str__(self) -> str:
        return f"shard:{self.sync}:{self.modules or ''}"
