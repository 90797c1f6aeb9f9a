"""A process group that has the place of a rank of many and exchanges nothing.

A rank allocates the same under it as beside real ranks, without a peer that it could wait for. Values are
meaningless there: parts of other ranks never arrive.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autobatch.core.errors import InputError

ALONE = ("alone",)
"""Name of the dimension of a mesh that lasts. DTensor takes meshes of one name and size for one mesh, and
would ask the ranks of the wrong group."""


@contextmanager
def fake_ranks(world: int) -> Iterator[DeviceMesh]:
    """Be rank 0 of ``world`` within the block, and return the mesh of all ranks.

    Rank 0 has the largest part of every parameter. What torch keeps of a mesh outlives the group, so a
    process that may train over real ranks later opens this in a child.

    Raises:
        InputError: this process is a rank of a real group already.
    """
    # Importing this registers the backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise InputError(
            f"--ranks {world} predicts a rank in a process of its own, and this process has a process group "
            "already: call torch.distributed.destroy_process_group() first, or run autobatch estimate"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield init_device_mesh("cpu", (world,))
    finally:
        dist.destroy_process_group()


def open_fake_mesh(world: int, *, device_type: str) -> DeviceMesh:
    """Return a mesh of this many ranks that exchange nothing, until the end of this process.

    A process without a group becomes rank 0. A rank of a real group keeps its place, and all ranks of it call
    this together.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        group = dist.new_group(backend="fake")
        return DeviceMesh.from_group(group, device_type, mesh_dim_names=ALONE)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    return init_device_mesh(device_type, (world,), mesh_dim_names=ALONE)
