"""Checkpoints of sharded parameters: any number of ranks reads them, and nothing in them is executed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autobatch.training.checkpoint import (
    MANIFEST,
    STATE,
    begin_after,
    list_checkpoints,
    load_newest,
    save_checkpoint,
)
from autobatch.training.loop import Loop
from autobatch.training.resume import capture_loop, restore_loop
from tests.support.checkpoints import is_valid, leftovers
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group
from tests.support.sharded_loops import block_workload, contents, sharded_loop, step_together
from tests.support.training import make_loop

pytestmark = pytest.mark.distributed


def save_together(loop: Loop, folder: Path, **options: Any) -> Path:
    """Write a checkpoint; all ranks call it."""
    state, ranks = capture_loop(loop), loop.engine.ranks
    return save_checkpoint(folder, step=loop.batches_seen, state=state, facts={}, ranks=ranks, **options)


def killed_at(folder: Path, rank: int, call: int) -> None:
    """Write two checkpoints, and kill this rank before a call of the system of the second."""
    group = open_group()
    loop = sharded_loop(group, block_workload(), ema=0.9)
    step_together(loop, 1)
    save_together(loop, folder)
    calls = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **more: Any) -> Any:
            nonlocal calls
            if group.rank == rank and calls == call:
                os.kill(os.getpid(), signal.SIGKILL)
            calls += 1
            return function(*args, **more)

        return run

    for name in ("mkdir", "rename", "fsync", "open", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    step_together(loop, 1)
    save_together(loop, folder, keep_last=1)
    (folder / f"acknowledged-{group.rank}").touch()
    group.close()


@pytest.mark.parametrize(("rank", "call"), [(0, 4), pytest.param(1, 0, marks=pytest.mark.program)])
def test_a_kill_loses_no_checkpoint(server: RankServer, tmp_path: Path, rank: int, call: int) -> None:
    # The other rank may wait for this one. A launcher ends it at once, here the server after some seconds.
    ended = server.run(killed_at, tmp_path, rank, call, world=2, seconds=20)
    assert ended[rank].code == -signal.SIGKILL
    begin_after(tmp_path, 99)
    found = load_newest(tmp_path)
    assert not found.passed_over
    assert not leftovers(tmp_path)
    assert all(is_valid(path) for path in list_checkpoints(tmp_path))
    if list(tmp_path.glob("acknowledged-*")):
        assert found.path.name == "step-00000002"
    alone = make_loop(block_workload(), ema=0.9)
    restore_loop(alone, found, same_hardware=False)
    assert contents(alone)


def load_with_each_file_damaged(folder: Path) -> dict[str, tuple[str, list[str]]]:
    """Write two checkpoints; change one file of the newer after the other, and load what is valid then."""
    group = open_group()
    loop = sharded_loop(group, block_workload())
    for _ in range(2):
        step_together(loop, 1)
        newer = save_together(loop, folder)
    names = group.once(lambda: [path.name for path in sorted(newer.iterdir())])
    found = {}
    for name in [*names, "none"]:
        path = newer / name
        content = path.read_bytes() if path.exists() else b""
        group.agree(False)
        if group.rank == 0 and content:
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        group.agree(False)
        loaded = load_newest(folder, ranks=group)
        found[name] = loaded.path.name, loaded.passed_over
        group.agree(False)
        if group.rank == 0 and content:
            path.write_bytes(content)
    group.close()
    return found


def test_a_file_that_any_rank_finds_changed_is_passed_over_by_all(server: RankServer, tmp_path: Path) -> None:
    found, other = server.values(load_with_each_file_damaged, tmp_path)
    assert other == found
    assert found.pop("none") == ("step-00000002", [])
    shards = [f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)]
    assert {*found} == {MANIFEST, STATE, *shards}
    for name, (loaded, passed_over) in found.items():
        assert loaded == "step-00000001"
        assert len(passed_over) == 1
        assert "step-00000002: " in passed_over[0], name
