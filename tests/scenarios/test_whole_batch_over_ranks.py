"""A loss over the whole batch, over several ranks: the steps of one process, also after out of memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

import autobatch
from autobatch.workload.contract import Collated, WholeBatchLoss
from tests.support.rank_server import RankServer
from tests.support.runs import rows
from tests.support.training import apart, make_workload, points, weights

pytestmark = pytest.mark.distributed
COMMON: dict[str, Any] = {
    "target_batch": 7,
    "device": "cpu",
    "memory_budget": "1GiB",
    "seed": 3,
    "trials": 0,
    "steps": 4,
    "max_micro_batch": 2,
    "max_grad_norm": 0.3,
    "validate_every": 2,
}


class Towers(nn.Module):
    """Two views of a sample, and a temperature that only the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(5, 4), nn.Linear(5, 4)
        self.temperature = nn.Parameter(torch.tensor(1.5))


def represent(model: Towers, batch: Collated) -> tuple[Tensor, Tensor]:
    return normalize(model.one(batch[0]), dim=1), normalize(model.other(batch[0]), dim=1)


def contrast(model: Towers, views: tuple[Tensor, Tensor]) -> Tensor:
    scores = views[0] @ views[1].T * model.temperature.exp()
    return cross_entropy(scores, torch.arange(len(scores)))


def workload(fault: str = "") -> autobatch.Workload:
    """Return a workload; memory runs out on rank 1 in that of its passes over two samples in training."""
    passes, validated = list[int](), list[int]()

    def failing(model: Towers, batch: Collated) -> tuple[Tensor, Tensor]:
        if not torch.is_grad_enabled():
            validated.append(1)  # before the training, and not in a probe
        elif validated and os.environ.get("RANK") == "1" and len(batch[0]) == 2:
            passes.append(1)
            if fault == str(len(passes)):
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return represent(model, batch)

    return make_workload(
        model=lambda: Towers().double(),
        loss=WholeBatchLoss(represent=failing, loss=contrast),  # type: ignore[arg-type]
        validation_data=points(17, seed=5),
        optimizer=lambda params, rate: torch.optim.SGD(params, lr=rate),
        name="towers",
    )


def fit(out: str, options: dict[str, Any], fault: str = "") -> tuple[list[float], dict[str, Any]]:
    torch.set_num_threads(1)
    with patch("autobatch.report.page.write_report"):
        result = autobatch.fit(workload(fault), out=out, **{**COMMON, **options})
    assert result.model is not None
    return weights(result.model).tolist(), result.to_json()


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {}),
        pytest.param(3, {}, marks=pytest.mark.slow),
        pytest.param(3, {"target_batch": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_run_does_not_depend_on_the_ranks(
    server: RankServer, tmp_path: Path, world: int, options: dict[str, Any]
) -> None:
    expected, _ = fit(str(tmp_path / "alone"), options)
    found = server.values(fit, str(tmp_path / "run"), options, world=world)
    assert len({str(one[0]) for one in found}) == 1
    assert apart(torch.tensor(found[0][0]), torch.tensor(expected)) < 1e-12
    for line, other in zip(rows(tmp_path / "run"), rows(tmp_path / "alone"), strict=True):
        for name in ("loss", "grad_norm", "count"):
            assert line[name] == pytest.approx(other[name], rel=1e-12), name
        assert line["validation"] == pytest.approx(other["validation"], rel=1e-12)


@pytest.mark.parametrize("fault", ["5", pytest.param("8", marks=pytest.mark.slow)])
def test_a_batch_without_memory_on_one_rank_runs_again_on_all(
    server: RankServer, tmp_path: Path, fault: str
) -> None:
    """Memory runs out before the rows travel, or after that."""
    options = {"split_check": "off", "steps": 3, "target_batch": 8}
    expected, _ = fit(str(tmp_path / "alone"), options)
    found = server.values(fit, str(tmp_path / "run"), options, fault)
    assert apart(torch.tensor(found[0][0]), torch.tensor(expected)) < 1e-12
    assert [one[1]["training"]["oom_recoveries"] for one in found] == [1, 1]
