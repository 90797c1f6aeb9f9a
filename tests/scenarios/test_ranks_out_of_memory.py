"""Memory that runs out on one rank: all ranks run the batch again, or all of them leave to start smaller."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autobatch import AutobatchError, Progress
from autobatch.training.checkpoint import list_checkpoints
from autobatch.training.loop import Loop
from autobatch.training.resume import load_run_state, restore_loop
from autobatch.training.run import train
from autobatch.training.run_folder import RunFiles
from autobatch.workload.order import GlobalBatch
from tests.support.detection import detection, scenes
from tests.support.faults import FAULTY_STEP, Fault, Quick, Watching, plain
from tests.support.options import as_options
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group, ranked_loop
from tests.support.sharded_loops import block_workload, sharded_loop
from tests.support.training import TOKENS, apart, make_workload, weights

pytestmark = pytest.mark.distributed
LIMITS = [4, 3]
RECOVERED = ("data", "forward", "backward")
STEPS = 3
FAULTY_RANK = 1


def open_loop(group: Any, kind: str, fault: Fault, limits: Sequence[int] = LIMITS) -> Loop:
    """Build a loop whose fault knows when the sums of the ranks are exchanged."""
    build: Any = sharded_loop if kind == "sharded" else ranked_loop
    kind, _, step = kind.partition(", step ")
    faulty_step = int(step or FAULTY_STEP)
    workloads = {
        "mean": plain,
        "tokens": partial(make_workload, **TOKENS),
        "terms": partial(detection, train_data=scenes(24)),
        "sharded": block_workload,
    }
    loop: Loop = build(
        group,
        workloads[kind](),
        limits,
        target_batch=14,
        steps=STEPS,
        meter=Watching(fault),
        device=Quick(memory_budget="1GiB"),
    )
    fault.watch(loop.train_state.optimizers)

    def marked(act: Any) -> Any:
        def run_marked(*args: Any) -> Any:
            fault.phase = "exchange"
            return act(*args)

        return run_marked

    train_batch = loop._train_batch

    def train_batch_armed(batch: GlobalBatch, *rest: Any) -> Any:
        fault.armed, fault.phase = batch.index == faulty_step, "data"
        try:
            return train_batch(batch, *rest)
        finally:
            fault.armed = False

    loop.engine.combine = marked(loop.engine.combine)  # type: ignore[method-assign]
    loop.engine.sum_counts = marked(loop.engine.sum_counts)  # type: ignore[attr-defined]
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
        (message,) = [one.recovered for one in records if one.recovered is not None]
        seen.append((loop.oom_recoveries, loop.micro_batch, message))
    group.close()
    return len(sites), worst, seen


@pytest.mark.parametrize(
    ("kind", "stride"),
    [
        ("mean", 19),
        ("terms, step 0", 29),
        *(
            pytest.param(kind, 1, marks=pytest.mark.slow)
            for kind in ("mean", "tokens", "terms", "terms, step 0")
        ),
    ],
)
def test_a_batch_runs_again_wherever_memory_ran_out(server: RankServer, kind: str, stride: int) -> None:
    for sites, worst, seen in server.values(fail_everywhere, kind, stride):
        assert sites > 40
        assert worst < 1e-12
        for recoveries, micro_batch, message in seen:
            assert recoveries == 1
            assert 1 <= micro_batch <= 2
            assert "rank 1: CUDA out of memory" in message


def leave(out: str, kind: str, site: int | None) -> list[str]:
    """Train with memory that runs out on one rank at an operator, and leave as the command line does.

    Returns:
        The phase of each operator; a rank that leaves returns nothing.
    """
    torch.set_num_threads(1)
    group = open_group()
    group.enter(Path(out))
    fault = Fault(*([site] if group.rank == FAULTY_RANK and site is not None else []))
    loop = open_loop(group, kind, fault)
    (optimizer,) = loop.train_state.optimizers
    optimizer.register_step_post_hook(lambda *_: print("step", file=steps, flush=True))
    try:
        with fault, (Path(out) / f"steps-of-rank-{group.rank}").open("w") as steps:
            train(loop, files_of(loop, out), Progress(), None)
    except AutobatchError as error:
        os._exit(group.fail(str(error), error.exit_code) or error.exit_code)
    group.close()
    return fault.phases


def files_of(loop: Loop, out: str) -> RunFiles:
    options = as_options("fit", target_batch=14, checkpoint_every=1, keep_last=9)
    return RunFiles(out=Path(out), options=options, facts={})


def resume_smaller(out: str, kind: str) -> tuple[Tensor, int]:
    """Resume the run in the smaller micro-batches that it left; return the weights and the limit."""
    group = open_group()
    loop = open_loop(group, kind, Fault())
    resumed = load_run_state(Path(out), group)
    restore_loop(loop, resumed.state, same_hardware=True, folder=resumed.path)
    train(loop, files_of(loop, out), Progress(), resumed)
    found = whole(loop), loop.micro_batch
    group.close()
    return found


def train_smaller(kind: str, limits: Sequence[int]) -> Tensor:
    group = open_group()
    loop = open_loop(group, kind, Fault(), limits)
    list(loop.run())
    found = whole(loop)
    group.close()
    return found


def whole(loop: Loop) -> Tensor:
    model = loop.train_state.model
    parts = [one.full_tensor() if isinstance(one, DTensor) else one for one in model.parameters()]
    return torch.cat([one.detach().flatten() for one in parts])


KINDS = {
    "mean": {"exchange": 10**6, "optimizer": 10**6, "step": 10**6},
    "sharded": {"forward": 40, "backward": 12, "optimizer": 10**6},
}
"""Phases in which a batch cannot run again, and the operators from one error to the next."""


@pytest.mark.parametrize(
    ("kind", "stride"),
    [
        pytest.param("mean", 1.0, id="whole models"),
        pytest.param("sharded", 3.0, marks=pytest.mark.program, id="a shared model"),
        pytest.param("sharded", 0.0, marks=pytest.mark.slow, id="a shared model, at every operator"),
    ],
)
def test_all_ranks_leave_where_a_batch_cannot_run_again_and_start_smaller(
    server: RankServer, tmp_path: Path, kind: str, stride: float
) -> None:
    (tmp_path / "run").mkdir()
    phases = server.values(leave, str(tmp_path / "run"), kind, None)[FAULTY_RANK]
    expected: Tensor | None = None
    for phase, step in KINDS[kind].items():
        sites = [number for number, one in enumerate(phases) if one == phase]
        assert sites
        for site in sites[:: max(1, int(step * stride))]:
            out = tmp_path / f"{phase}-{site}"
            out.mkdir()
            ended = server.run(leave, str(out), kind, site)
            assert [one.code for one in ended] == [77, 77], "\n".join(one.error for one in ended)
            assert [path.name for path in list_checkpoints(out / "checkpoints")] == ["step-00000001"]
            if phase in ("forward", "backward"):
                steps = [(out / f"steps-of-rank-{rank}").read_text() for rank in range(2)]
                assert steps == ["step\n"] * 2, "no rank takes the step that memory ran out in"
            limit = json.loads((out / "oom.json").read_text())["micro_batch"]
            assert limit < LIMITS[FAULTY_RANK]
            verdict = json.loads((out / "verdict.json").read_text())
            assert (verdict["rank"], verdict["code"]) == (1, 77)
            if kind == "mean":
                assert "inside the optimizer step" in verdict["line"]
        resumed, found = server.values(resume_smaller, str(out), kind)[0]
        assert found == limit
        if expected is None:
            expected = server.values(train_smaller, kind, [limit, limit])[0]
        assert apart(resumed, expected) < 1e-12
