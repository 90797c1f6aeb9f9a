"""What ranks agree on before they train; `tests/scenarios/test_ranks.py` has whole runs."""

from __future__ import annotations

import fractions
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autobatch
from autobatch import InputError
from autobatch.api import pipeline
from autobatch.api.pipeline import run_command
from autobatch.api.run import Run, claim
from autobatch.distributed.ranks import Ranks
from tests.support.options import as_options
from tests.support.probes import Listener
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group
from tests.support.training import make_setup, make_workload, points


class Two(Ranks):
    """The first of two ranks; the other gives what the first does, but for what is changed."""

    world = 2

    def __init__(self, **changes: Any) -> None:
        self.changes = changes

    def gather(self, value: Any) -> list[Any]:
        other = {**value, **self.changes} if isinstance(value, dict) else value
        return [value, other]


def a_run(group: Any = None, command: str = "fit", **options: Any) -> Run:
    asked = as_options(command, **{"target_batch": 8, **options})
    return Run(workload=None, options=asked, ranks=group or Ranks())


@pytest.mark.parametrize(
    ("ranks", "command", "options", "message"),
    [
        (Ranks(), "fit", {"ranks": 2}, "ranks is 2, and 1 run: only the command"),
        (Two(), "fit", {"ranks": 3}, "ranks is 3, and 2 run"),
        (Two(**{"--seed": 1}), "fit", {}, "--seed: rank 1 has 1, and rank 0 has 0"),
        (Ranks(), "fit", {"parallel": "shard"}, "--parallel shard shares a model among ranks, found one"),
    ],
)
def test_what_ranks_cannot_do_is_refused_by_name(
    ranks: Any, command: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        run_command(a_run(ranks, command, **options))


@pytest.mark.parametrize("is_known", [True, False])
def test_a_restart_moves_a_run_that_it_does_not_know(tmp_path: Path, is_known: bool) -> None:
    """Without the store of the first start, nothing tells its checkpoints from those of another run."""
    out = tmp_path / "run"
    options = {"target_batch": 8, "steps": 1, "out": str(out), "max_micro_batch": 4, "trials": 0}
    ranks = Ranks()
    for _ in range(2):
        run_command(Run(workload=make_workload(), options=as_options("fit", **options), ranks=ranks))
        ranks.earlier_out = out if is_known else None
    assert len(list(tmp_path.rglob("step-00000001"))) == (1 if is_known else 2)


def test_a_folder_that_a_rank_does_not_see_is_refused(tmp_path: Path) -> None:
    class Blind(Two):
        def gather(self, value: Any) -> list[Any]:
            return [[True, "a"], [False, "b"]]

    run = a_run(Blind(), out=str(tmp_path))
    with run.held, pytest.raises(InputError, match="rank 1 on b does not see the folder"):
        claim(run, "name")
    assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == []


def read_stream() -> tuple[bool, int, list[str]]:
    """Open a stream whose first sample differs by rank, and share a batch of it.

    Returns:
        True if all samples arrived, the bytes that one of them takes, and the notes.
    """
    group = open_group()
    samples = [
        [torch.arange(20.0).reshape(4, 5).T[1:], torch.tensor(2.5, dtype=torch.bfloat16), torch.zeros(0, 3)],
        {"text": "a", "more": (np.float32(0.5), fractions.Fraction(1, 3), None)},
        torch.zeros(1000, 1000)[3],
    ]
    setup = make_setup(make_workload(train_data=[group.rank]), stream=lambda: iter(samples))
    listener = Listener()
    run = replace(a_run(group, target_batch=3, steps=1), progress=listener)
    sampler: Any = pipeline._sampler_of(run, setup)
    next(sampler.batches())
    tensors, plain, row = sampler.held.values()
    group.close()
    is_same = all(map(torch.equal, tensors, samples[0])) and plain == samples[1]  # type: ignore[arg-type]
    return is_same, row.untyped_storage().nbytes(), listener.notes


@pytest.mark.distributed
def test_samples_of_a_stream_arrive_without_the_memory_around_them_and_a_split_one_is_noted(
    server: RankServer,
) -> None:
    for is_same, size, (note,) in server.values(read_stream):
        assert (is_same, size) == (True, 4000)
        assert "must not be split by rank" in note


def wide() -> nn.Module:
    """Build a model whose weights, gradients and Adam state take 8 MiB, and twice that is too much."""
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(8)]
    return nn.Sequential(nn.Linear(5, 256), nn.Sequential(*blocks), nn.Linear(256, 3))


def fit(out: str, budget: str) -> tuple[dict[str, Any], float | None]:
    torch.set_num_threads(1)
    workload = make_workload(
        model=wide,
        train_data=points(dtype=torch.float32),
        optimizer=lambda params, rate: torch.optim.Adam(params, lr=rate),
        name="wide",
    )
    result = autobatch.fit(
        workload, target_batch=8, steps=2, device="cpu", memory_budget=budget, trials=2, out=out
    )
    assert result.training is not None
    return result.to_json()["plan"], result.training.final_loss


@pytest.mark.distributed
@pytest.mark.slow
def test_auto_shares_a_model_only_if_it_does_not_fit_whole(server: RankServer, tmp_path: Path) -> None:
    (plan, loss), _ = server.values(fit, str(tmp_path / "large"), "64MiB")
    assert plan["parallel"] == "replicate"
    assert plan["parallel_reason"] == "a whole model fits on each rank, so each has its own"
    (plan, other), _ = server.values(fit, str(tmp_path / "small"), "8MiB")
    assert plan["parallel"] == "shard"
    why = "no whole model fits on rank 0, so the ranks share it (--parallel shard): "
    assert plan["parallel_reason"].startswith(f"{why}a micro-batch of 1 does not")
    assert other == pytest.approx(loss, rel=1e-5)
    assert json.loads((tmp_path / "small" / "result.json").read_text())["plan"] == plan
    # Weights and gradients take more than 4 MiB, and a rank has a third of them.
    (plan, other), *_ = server.values(fit, str(tmp_path / "least"), "4MiB", world=3)
    assert plan["parallel_reason"].startswith(why)
    assert other == pytest.approx(loss, rel=1e-5)
