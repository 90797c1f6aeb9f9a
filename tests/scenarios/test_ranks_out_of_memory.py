"""Memory that runs out on one rank: all ranks run the batch again, or all of them leave to start smaller."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autobatch import AutobatchError
from autobatch.distributed.group import LaunchedGroup
from autobatch.training.checkpoint import list_checkpoints, load_newest
from autobatch.training.loop import Loop
from autobatch.training.resume import restore_loop
from tests.support.detection import detection, scenes
from tests.support.faults import FAULTY_STEP, Fault, Quick, Watching, plain
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group, ranked_loop
from tests.support.runs import settings, train
from tests.support.sharded_loops import block_workload, sharded_loop
from tests.support.training import HOST, TOKENS, apart, make_workload, weights

pytestmark = pytest.mark.distributed
LIMITS = [4, 3]
RECOVERED = ("data", "forward", "backward")
FAULTY_RANK = 1
SAVED: dict[str, Any] = {"checkpoint_every": 1, "keep_last": 9}
WORKLOADS = {
    "mean": plain,
    "tokens": partial(make_workload, **TOKENS),
    "terms": partial(detection, train_data=scenes(24)),
    "sharded": block_workload,
}


def open_loop(
    group: LaunchedGroup, kind: str, site: int | None = None, limits: list[int] = LIMITS
) -> tuple[Loop, Fault]:
    """Build a loop with a fault on one rank, which knows when the sums of the ranks are exchanged."""
    fault = Fault(*([site] if group.rank == FAULTY_RANK and site is not None else []))
    build: Any = sharded_loop if kind == "sharded" else ranked_loop
    kind, _, step = kind.partition(", step ")
    faulty_step = int(step or FAULTY_STEP)
    parts = {"meter": Watching(fault), "device": Quick(HOST, "1GiB")}
    loop: Loop = build(group, WORKLOADS[kind](), limits, target_batch=14, steps=3, **parts)
    fault.watch(loop.train_state.optimizers)

    def marked(act: Any) -> Any:
        def run_marked(*args: Any) -> Any:
            fault.phase = "exchange"
            return act(*args)

        return run_marked

    train_batch = loop._train_batch

    def train_batch_armed(batch: Any, *rest: Any) -> Any:
        fault.armed, fault.phase = batch.index == faulty_step, "data"
        try:
            return train_batch(batch, *rest)
        finally:
            fault.armed = False

    loop.engine.combine = marked(loop.engine.combine)  # type: ignore[method-assign]
    if (ahead := loop.train_state.counts) is not None:
        ahead.sum_over_ranks = marked(ahead.sum_over_ranks)
    loop._train_batch = train_batch_armed  # type: ignore[method-assign]
    return loop, fault


def run_with_fault(
    group: LaunchedGroup, kind: str, site: int | None
) -> tuple[Tensor, list[str], tuple[int, int, list[str]]]:
    """Train; return the weights, the phase of each operator, and how the loop recovered."""
    loop, fault = open_loop(group, kind, site)
    with fault:
        messages = [one.recovered for one in loop.run() if one.recovered is not None]
    return weights(loop.train_state.model), fault.phases, (loop.oom_recoveries, loop.micro_batch, messages)


def fail_everywhere(kind: str, stride: int) -> tuple[int, float, list[Any]]:
    """Let memory run out at operators before the sums are exchanged; return sites and worst error."""
    group = open_group()
    expected, phases, _ = run_with_fault(group, kind, None)
    sites = group.gather([n for n, phase in enumerate(phases) if phase in RECOVERED])[FAULTY_RANK]
    found = [run_with_fault(group, kind, site) for site in sites[::stride]]
    group.close()
    return len(sites), max(apart(own, expected) for own, _, _ in found), [seen for _, _, seen in found]


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
        for recoveries, micro_batch, (message,) in seen:
            assert (recoveries, 1 <= micro_batch <= 2) == (1, True)
            assert "rank 1: CUDA out of memory" in message


def leave(out: str, kind: str, site: int | None) -> list[str]:
    """Train with memory that runs out on one rank at an operator, and leave as the command line does.

    Returns:
        The phase of each operator; a rank that leaves returns nothing.
    """
    group = open_group()
    loop, fault = open_loop(group, kind, site)
    group.enter(Path(out), Path(out, "mark"))
    (optimizer,) = loop.train_state.optimizers
    optimizer.register_step_post_hook(lambda *_: print("step", file=steps, flush=True))
    try:
        with fault, (Path(out) / f"steps-of-rank-{group.rank}").open("w") as steps:
            train(loop, settings(Path(out), **SAVED))
    except AutobatchError as error:
        os._exit(group.fail(str(error), error.exit_code) or error.exit_code)
    group.close()
    return fault.phases


def train_smaller(kind: str, out: str | None, limit: int) -> tuple[Tensor, int]:
    """Resume the run in the smaller micro-batches that it left, or train in them from the beginning."""
    group = open_group()
    loop, _ = open_loop(group, kind, limits=LIMITS if out else [limit, limit])
    if out is None:
        list(loop.run())
    else:
        resumed = load_newest(Path(out) / "checkpoints", group)
        restore_loop(loop, resumed, same_hardware=True)
        train(loop, settings(Path(out), resumed=resumed, **SAVED))
    parts = [p.full_tensor() if isinstance(p, DTensor) else p for p in loop.train_state.model.parameters()]
    group.close()
    return torch.cat([part.detach().flatten() for part in parts]), loop.micro_batch


@pytest.mark.parametrize(
    ("kind", "strides"),
    [
        ("mean", {"exchange": 10**6, "optimizer": 10**6, "step": 10**6}),
        pytest.param("sharded", {"forward": 120, "backward": 36, "step": 10**6}, marks=pytest.mark.program),
        pytest.param("sharded", dict.fromkeys(("forward", "backward", "step"), 1), marks=pytest.mark.slow),
    ],
    ids=["whole models", "a shared model", "a shared model, at every operator"],
)
def test_all_ranks_leave_where_a_batch_cannot_run_again_and_start_smaller(
    server: RankServer, tmp_path: Path, kind: str, strides: dict[str, int]
) -> None:
    (tmp_path / "run").mkdir()
    phases = server.values(leave, str(tmp_path / "run"), kind, None)[FAULTY_RANK]
    expected: Tensor | None = None
    for phase, stride in strides.items():
        sites = [number for number, one in enumerate(phases) if one == phase]
        assert sites
        for site in sites[::stride]:
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
        resumed, found = server.values(train_smaller, kind, str(out), limit)[0]
        assert found == limit
        if expected is None:
            expected = server.values(train_smaller, kind, None, limit)[0][0]
        assert apart(resumed, expected) < 1e-12
