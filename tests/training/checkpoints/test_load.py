"""Ranks that load a checkpoint together: each compares some sums, and all of them take the same one."""

from __future__ import annotations

from pathlib import Path

import pytest

from autobatch.core.errors import InputError
from autobatch.training.checkpoints.load import load_newest
from autobatch.training.checkpoints.sharded import save_sharded
from autobatch.training.loop_state import capture_loop
from tests.support.checkpoints import STATE, save
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group
from tests.support.sharded_loops import block_workload, sharded_loop, step_together


def load_with_each_file_damaged(folder: Path) -> dict[str, tuple[str, list[str]]]:
    """Write two checkpoints; change one file of the newer after the other, and load what is valid then."""
    group = open_group()
    loop = sharded_loop(group, block_workload())
    for _ in range(2):
        step_together(loop, 1)
        newer = save_sharded(loop, folder, state=capture_loop(loop), facts={})
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
        assert loaded is not None
        found[name] = loaded.path.name, loaded.passed_over
        group.agree(False)
        if group.rank == 0 and content:
            path.write_bytes(content)
    group.close()
    return found


@pytest.mark.distributed
def test_a_file_that_any_rank_finds_changed_is_passed_over_by_all(server: RankServer, tmp_path: Path) -> None:
    found, other = server.values(load_with_each_file_damaged, tmp_path)
    assert other == found
    assert found.pop("none") == ("step-00000002", [])
    assert len(found) == 4
    for name, (loaded, passed_over) in found.items():
        assert loaded == "step-00000001"
        assert len(passed_over) == 1
        assert f"step-00000002: {name} " in passed_over[0]


def load_nothing(folder: Path) -> str:
    group = open_group()
    try:
        load_newest(folder, ranks=group)
    except InputError as error:
        return str(error)
    finally:
        group.close()
    return ""


@pytest.mark.distributed
def test_ranks_end_alike_if_nothing_is_valid(server: RankServer, tmp_path: Path) -> None:
    (save(tmp_path, 1) / STATE).write_bytes(b"")
    first, second = server.values(load_nothing, tmp_path)
    assert first == second
    assert first.startswith(f"no checkpoint in {tmp_path} is valid")
