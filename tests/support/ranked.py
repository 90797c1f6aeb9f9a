"""Loops over several ranks, as every rank of a test builds its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from autobatch import Workload
from autobatch.distributed.engine import Whole
from autobatch.distributed.group import Group, LaunchedGroup
from autobatch.distributed.launch import open_ranks
from autobatch.training.loop import Loop
from autobatch.workload.order import Split
from tests.support.training import make_loop


def open_group(limit_s: float = 60.0) -> LaunchedGroup:
    """Join the ranks of a case, which wait for each other for so many seconds."""
    group = open_ranks(os.environ, limit_s)
    assert isinstance(group, LaunchedGroup)
    return group


def ranked_loop(
    group: Group,
    workload: Workload,
    limits: Sequence[int],
    **options: Any,
) -> Loop:
    """Build the loop of a rank, which has a limit of its own."""
    loop = make_loop(
        workload,
        micro_batch=limits[group.rank],
        split=Split(group.rank, group.world),
        **options,
    )
    loop.engine = Whole(group, loop.train_state)
    return loop
