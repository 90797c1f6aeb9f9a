"""The part of a tensor that a process holds."""

from __future__ import annotations

import pytest
import torch

from autobatch.step.local_part import is_sharded, local_part, local_parts
from tests.support.rank_server import RankServer


def parts() -> tuple[bool, list[int]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from tests.support.ranked import open_group

    group = open_group()
    whole = distribute_tensor(torch.arange(6), init_device_mesh("cpu", (2,)), [Shard(0)])
    part = local_part(whole)
    part[0] = 9
    plain = torch.tensor(7)
    again, same = local_parts([whole, plain])
    again[1] += 10
    assert same is plain
    found = whole.to_local().tolist()
    group.close()
    return is_sharded(whole), found


def test_a_whole_tensor_is_its_own_part() -> None:
    tensor = torch.arange(3)
    assert local_part(tensor) is tensor
    assert local_parts([tensor])[0] is tensor
    assert not is_sharded(tensor)


@pytest.mark.distributed
def test_a_sharded_tensor_is_seen_in_its_memory(server: RankServer) -> None:
    assert server.values(parts) == [(True, [9, 11, 2]), (True, [9, 14, 5])]
