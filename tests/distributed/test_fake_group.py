"""A rank of many in one process: it leaves no group, and refuses to replace a real one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from autobatch.core.errors import InputError
from autobatch.distributed.fake_group import fake_ranks
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group

pytestmark = pytest.mark.distributed


def reduce_alone() -> tuple[int, int, float, bool]:
    with fake_ranks(64) as mesh:
        one = torch.ones(3)
        dist.all_reduce(one)
        place = (dist.get_rank(), mesh.size(), float(one[0]))
    return (*place, dist.is_initialized())


def test_a_rank_of_many_waits_for_nobody_and_leaves_no_group(server: RankServer):
    assert server.values(reduce_alone, world=1) == [(0, 64, 1.0, False)]


def open_within_a_group() -> str:
    group = open_group()
    try:
        with fake_ranks(8):
            pass
    except InputError as error:
        group.close()
        return str(error)
    return ""


def test_a_process_with_a_group_is_refused(server: RankServer):
    assert "this process has a process group already" in server.values(open_within_a_group, world=2)[0]
