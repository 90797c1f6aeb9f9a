"""Memory that runs out on one rank: all ranks run the batch again, or all of them leave to start smaller."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from autobatch import AutobatchError, Progress
from autobatch.training.checkpoint import list_checkpoints
from autobatch.training.loop import Loop
from autobatch.training.run import train
from autobatch.training.run_folder import RunFiles
from autobatch.workload.order import GlobalBatch
from tests.support.faults import FAULTY_STEP, Fault, Quick, Watching, plain
from tests.support.options import as_options
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group, ranked_loop
from tests.support.training import TOKENS, apart, make_workload, weights

pytestmark = pytest.mark.distributed
LIMITS = [4, 3]
RECOVERED = ("data", "forward", "backward")
STEPS = 3
FAULTY_RANK = 1


def open_loop(group: Any, kind: str, fault: Fault) -> Loop:
    """Build a loop whose fault knows when the sums of the ranks are exchanged."""
    workload = plain() if kind == "mean" else make_workload(**TOKENS)
    loop = ranked_loop(
        group,
        workload,
        LIMITS,
        target_batch=14,
        steps=STEPS,
        meter=Watching(fault),
        device=Quick(memory_budget="1GiB"),
    )
    for optimizer in loop.train_state.optimizers:
        optimizer.fault = fault
    combine = loop.engine.combine

    def combine_marked(*args: Any) -> Any:
        fault.phase = "exchange"
        return combine(*args)

    train_batch = loop._train_batch

    def train_batch_armed(batch: GlobalBatch) -> Any:
        fault.armed, fault.phase = batch.index == FAULTY_STEP, "data"
        try:
            return train_batch(batch)
        finally:
            fault.armed = False

    loop.engine.combine = combine_marked  # type: ignore[method-assign]
    loop._train_batch = train_batch_armed  # type: ignore[method-assign]
    return loop


def run(loop: Loop, fault: Fault) -> list[Any]:
    """Train with a fault in `FAULTY_STEP`."""
    with fault:
        return list(loop.run())


def fail_everywhere(kind: str, stride: int) -> tuple[int, float, list[Any]]:
    """Let memory run out at operators before the sums are exchanged; return sites and worst error."""
    torch.set_num_threads(1)
    group = open_group()
    undisturbed = Fault()
    loop = open_loop(group, kind, undisturbed)
    run(loop, undisturbed)
    expected = weights(loop.train_state.model)
    own = [n for n, phase in enumerate(undisturbed.phases) if phase in RECOVERED]
    sites, worst, seen = group.gather(own)[FAULTY_RANK], 0.0, []
    for site in sites[::stride]:
        fault = Fault(*([site] if group.rank == FAULTY_RANK else []))
        loop = open_loop(group, kind, fault)
        records = run(loop, fault)
        worst = max(worst, apart(weights(loop.train_state.model), expected))
        seen.append((loop.oom_recoveries, loop.micro_batch, [*loop.engine.limits], records[1].recovered))
    group.close()
    return len(sites), worst, seen


@pytest.mark.parametrize(
    "stride", [9, pytest.param(1, marks=pytest.mark.slow, id="at every operator")], ids=str
)
@pytest.mark.parametrize("kind", ["mean", "tokens"])
def test_a_batch_runs_again_wherever_memory_ran_out(server: RankServer, kind: str, stride: int) -> None:
    for rank, (sites, worst, seen) in enumerate(server.values(fail_everywhere, kind, stride)):
        assert sites > 40
        assert worst < 1e-12
        for recoveries, micro_batch, limits, message in seen:
            assert recoveries == 1
            assert limits[0] == 4
            assert 1 <= limits[FAULTY_RANK] <= 2
            assert micro_batch == limits[rank]
            assert "rank 1: CUDA out of memory" in message


def fail_in_the_step(out: str, phase: str) -> None:
    """Let memory run out on one rank where it cannot be mended, and leave as the command line does."""
    torch.set_num_threads(1)
    group = open_group()
    group.enter(Path(out))
    first = Fault()
    loop = open_loop(group, "mean", first)
    run(loop, first)
    site = first.phases.index(phase)
    fault = Fault(*([site] if group.rank == FAULTY_RANK else []))
    loop = open_loop(group, "mean", fault)
    settings = RunFiles(
        out=Path(out), options=as_options("fit", target_batch=1, checkpoint_every=1, keep_last=9)
    )
    try:
        with fault:
            train(loop, settings, Progress(), None)
    except AutobatchError as error:
        os._exit(group.fail(str(error), error.exit_code) or error.exit_code)


@pytest.mark.parametrize("phase", ["exchange", "optimizer", "step"])
def test_all_ranks_leave_if_memory_runs_out_in_the_step(
    server: RankServer, tmp_path: Path, phase: str
) -> None:
    ended = server.run(fail_in_the_step, str(tmp_path), phase)
    assert [one.code for one in ended] == [77, 77], "\n".join(one.error for one in ended)
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000001"]
    assert json.loads((tmp_path / "oom.json").read_text())["limits"] == [4, 2]
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert (verdict["rank"], verdict["code"]) == (1, 77)
    assert "inside the optimizer step" in verdict["line"]
