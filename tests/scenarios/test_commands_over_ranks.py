"""Probe, plan and tune over ranks answer as a fit over the same ranks does."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autobatch
from tests.support.rank_server import RankServer
from tests.support.training import make_workload, points

pytestmark = pytest.mark.distributed
COMMON: dict[str, Any] = {"device": "cpu", "memory_budget": "1GiB", "max_micro_batch": 3}


def workload() -> autobatch.Workload:
    return make_workload(
        model=lambda: nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 3)),
        train_data=points(dtype=torch.float32),
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        name="plain",
    )


def answers(out: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of a probe, a plan and a fit of one workload."""
    torch.set_num_threads(1)
    made, given = workload(), {**COMMON, **options}
    plan = autobatch.plan(made, target_batch=14, **given)
    probe = autobatch.probe(made, **given)
    with patch("autobatch.report.page.write_report"):
        fit = autobatch.fit(made, target_batch=14, out=out, steps=1, trials=0, **given)
    found = {"plan": msgspec.to_builtins(plan), "probe": msgspec.to_builtins(probe)}
    return {**found, "fit": fit.to_json()["plan"]}


def test_a_plan_over_replicas_is_that_of_a_fit(server: RankServer, tmp_path: Path) -> None:
    first, second = server.values(answers, str(tmp_path / "run"), {})
    plan = first["plan"]
    for other in (second["plan"], first["fit"]):
        assert all(other[name] == plan[name] for name in first["fit"])
    assert (plan["world_size"], plan["parallel"]) == (2, "replicate")
    assert plan["parallel_reason"] == "a whole model fits on each rank, so each has its own"
    assert plan["micro_batches"] == [3, 2, 2]
    probe = first["probe"]
    assert (probe["micro_batch"], probe["parallel"], probe["world_size"]) == (3, "replicate", 2)
