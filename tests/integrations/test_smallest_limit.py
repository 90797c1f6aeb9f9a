"""Ranks of another library that agree on one micro-batch, in real processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import autobatch
from autobatch.core.errors import AutobatchError
from autobatch.integrations.library_plan import plan_for
from autobatch.integrations.smallest_limit import ALONE
from tests.integrations.test_library_plan import a_loop
from tests.support.rank_server import RankServer
from tests.support.training import make_workload


def plan_of_rank(folder: Path, limits: list[int], is_connected: bool) -> Any:
    """Plan as all ranks do, with limits of their own; return what the library runs, or the error."""
    torch.set_num_threads(1)
    os.environ["AUTOBATCH_HOME"] = str(folder / os.environ["RANK"])
    if is_connected:
        torch.distributed.init_process_group("gloo")
    limit = limits[int(os.environ["RANK"])]
    options = {"target_batch": 24, "max_micro_batch": limit or None, "progress": False}
    if not limit:
        options["memory_budget"] = "1KiB"
    try:
        found = plan_for(make_workload(), a_loop(world_size=2), **options)  # type: ignore[arg-type]
    except AutobatchError as error:
        return str(error)
    finally:
        if is_connected:
            torch.distributed.destroy_process_group()
    return found.micro_batch, found.accumulation_steps, [note.removeprefix("Loop: ") for note in found.notes]


@pytest.mark.distributed
def test_all_ranks_run_what_fits_on_the_smallest(server: RankServer, tmp_path: Path) -> None:
    first, second = server.values(plan_of_rank, tmp_path, [7, 5], True, world=2)
    assert first[:2] == second[:2] == (4, 3)
    assert first[2][0] == "all ranks run micro-batches of at most 4, as fit on rank 1"
    assert "all ranks run" not in " ".join(second[2])


@pytest.mark.distributed
def test_a_rank_without_a_plan_ends_the_others(server: RankServer, tmp_path: Path) -> None:
    first, second = server.values(plan_of_rank, tmp_path, [7, 0], True, world=2)
    assert first == "rank 1 has no plan: its own message says why"
    assert second.startswith("a micro-batch of 1 does not fit in the budget of 1.00 KiB")


@pytest.mark.distributed
def test_ranks_that_are_not_connected_say_so(server: RankServer, tmp_path: Path) -> None:
    for _, _, notes in server.values(plan_of_rank, tmp_path, [7, 7], False, world=2):
        assert notes[0] == ALONE


def test_a_plan_of_one_rank_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path))
    plan = plan_for(make_workload(), a_loop(), target_batch=24, max_micro_batch=7)
    assert isinstance(plan, autobatch.Plan)
    assert plan.micro_batch == 6
    assert ALONE not in " ".join(plan.notes)
