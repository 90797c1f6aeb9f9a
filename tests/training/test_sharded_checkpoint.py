"""Checkpoints of sharded parameters: any number of ranks reads them, and nothing in them is executed."""

from __future__ import annotations

from pathlib import Path

import pytest

from autobatch.training.checkpoint import load_newest, save_checkpoint
from autobatch.training.loop import Loop
from autobatch.training.loop_state import capture_loop, restore_loop
from autobatch.training.sharded_checkpoint import save_sharded
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group
from tests.support.sharded_loops import block_workload, digests, sharded_loop, step_together
from tests.support.training import make_loop

pytestmark = pytest.mark.distributed


def restored(loop: Loop, folder: Path) -> Loop:
    found = load_newest(folder)
    assert found is not None
    restore_loop(loop, found.state, same_hardware=False, folder=found.path)
    return loop


def train_and_save(folder: Path, steps: int, *, resume: bool = False) -> dict[str, str]:
    """Train sharded, from the newest checkpoint if asked for, and write another."""
    group = open_group()
    loop = sharded_loop(group, block_workload(), ema=0.9)
    if resume:
        restored(loop, folder)
    step_together(loop, steps)
    loop.engine.share(loop.train_state.model.buffers())
    save_sharded(loop, folder, state=capture_loop(loop), facts={})
    found = digests(loop)
    group.close()
    return found


def load_sharded(folder: Path) -> dict[str, str]:
    group = open_group()
    found = digests(restored(sharded_loop(group, block_workload(), ema=0.9), folder))
    group.close()
    return found


def load_whole(folder: Path) -> dict[str, str]:
    return digests(restored(make_loop(block_workload(), ema=0.9), folder))


def save_whole(folder: Path, steps: int) -> dict[str, str]:
    loop = make_loop(block_workload(), ema=0.9)
    step_together(loop, steps)
    save_checkpoint(folder, step=steps, state=capture_loop(loop), facts={})
    return digests(loop)


def test_other_ranks_and_one_process_read_the_same_tensors(server: RankServer, tmp_path: Path) -> None:
    written, *others = server.values(train_and_save, tmp_path, 2, world=2)
    assert others == [written]
    assert {"model.0.0.0.weight", "optimizers.0.state.0.exp_avg", "average.averages.0"} <= written.keys()
    assert load_whole(tmp_path) == written
    for world in (2, 3, 4):
        assert server.values(load_sharded, tmp_path, world=world) == [written] * world


def test_the_checkpoint_of_one_process_is_read_by_sharded_ranks(server: RankServer, tmp_path: Path) -> None:
    written = save_whole(tmp_path, 2)
    assert server.values(load_sharded, tmp_path, world=2) == [written] * 2
