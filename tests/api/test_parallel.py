"""The choice between whole models and a shared one, and what cannot be asked for together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autobatch
from autobatch.api.pipeline import _layout_of_resume
from autobatch.api.ranks import checked_options
from autobatch.core.errors import InputError
from autobatch.core.options import Options
from autobatch.distributed.rank_plan import layout_of
from autobatch.distributed.ranks import Ranks
from autobatch.distributed.sharding.layout import ShardLayout
from tests.support.options import as_options
from tests.support.rank_server import RankServer
from tests.support.sample_run import a_run
from tests.support.training import make_workload, points


class Three(Ranks):
    world = 3


def options(**changes: Any) -> Options:
    return as_options("fit", **{"target_batch": 8, **changes})


def test_one_process_cannot_share_a_model() -> None:
    with pytest.raises(InputError, match="--parallel shard shares a model among ranks, found one process"):
        checked_options(options(parallel="shard"), Ranks())
    assert checked_options(options(parallel="replicate"), Ranks()).ranks.parallel == "replicate"


def test_a_resume_keeps_the_layout_unless_another_is_asked_for() -> None:
    plan = a_run().plan
    assert plan is not None
    shared = msgspec.structs.replace(plan, parallel="shard", shard_sync="once", world_size=2)
    assert layout_of(shared) == ShardLayout(world=2, sync="once")
    assert _layout_of_resume(shared, options(), Three()) == ShardLayout(world=3, sync="once")
    assert _layout_of_resume(shared, options(parallel="replicate"), Three()) is None
    assert _layout_of_resume(shared, options(), Ranks()) is None
    assert _layout_of_resume(plan, options(), Three()) is None
    assert _layout_of_resume(plan, options(parallel="shard"), Three()) == ShardLayout(world=3)


def wide() -> nn.Module:
    """Build a model whose weights, gradients and Adam state take 8 MiB, and twice that is too much."""
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(8)]
    return nn.Sequential(nn.Linear(5, 256), nn.Sequential(*blocks), nn.Linear(256, 3))


def fit(out: str, budget: str, parallel: str) -> tuple[dict[str, Any], float | None]:
    torch.set_num_threads(1)
    workload = make_workload(
        model=wide,
        train_data=points(dtype=torch.float32),
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda params, rate: torch.optim.Adam(params, lr=rate),
        name="wide",
    )
    result = autobatch.fit(
        workload,
        target_batch=8,
        steps=2,
        device="cpu",
        memory_budget=budget,
        trials=0,
        out=out,
        parallel=parallel,  # type: ignore[arg-type]
    )
    assert result.plan is not None
    assert result.training is not None
    return result.to_json()["plan"], result.training.final_loss


@pytest.mark.distributed
@pytest.mark.slow
def test_auto_shares_a_model_only_if_it_does_not_fit_whole(server: RankServer, tmp_path: Path) -> None:
    (plan, loss), _ = server.values(fit, str(tmp_path / "large"), "64MiB", "auto")
    assert (plan["parallel"], plan["shard_sync"]) == ("replicate", None)
    assert plan["parallel_reason"] == "a whole model fits on each rank, so each has its own"
    (plan, other), _ = server.values(fit, str(tmp_path / "small"), "8MiB", "auto")
    assert (plan["parallel"], plan["shard_sync"]) == ("shard", "each")
    assert plan["parallel_reason"].startswith(
        "no whole model fits on rank 0, so the ranks share it (--parallel shard): a micro-batch of 1 does not"
    )
    assert other == pytest.approx(loss, rel=1e-5)
    written = json.loads((tmp_path / "small" / "result.json").read_text())
    assert written["plan"] == plan
    # Weights and gradients take more than 4 MiB, and a rank has a third of them.
    (plan, other), *_ = server.values(fit, str(tmp_path / "least"), "4MiB", "auto", world=3)
    assert plan["parallel_reason"].startswith(
        "no whole model fits on rank 0, so the ranks share it (--parallel shard): the weights and"
    )
    assert other == pytest.approx(loss, rel=1e-5)
