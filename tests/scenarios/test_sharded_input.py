"""A shared model that cannot be trained: each mistake is one line, and exit code 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autobatch
from autobatch import InputError
from tests.support.rank_server import RankServer
from tests.support.training import make_workload, points

pytestmark = pytest.mark.distributed


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))


def part_of(parameters: Any, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters)[1:], lr=rate)


WORKLOADS: dict[str, dict[str, Any]] = {
    "part": {"optimizer": part_of},
    "unsplit": {"loss": lambda model, batch: model(batch[0]).square().sum() / 7},
}


def fit(name: str, out: str, options: dict[str, Any]) -> tuple[str, int]:
    """Return the error of a fit, and its exit code."""
    torch.set_num_threads(1)
    fields: dict[str, Any] = {
        "model": plain,
        "train_data": points(dtype=torch.float32),
        "loss": lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        **WORKLOADS[name],
    }
    common: dict[str, Any] = {"target_batch": 6, "steps": 1, "device": "cpu", "memory_budget": "1GiB"}
    try:
        autobatch.fit(make_workload(**fields), parallel="shard", out=out, **common, **options)
    except InputError as error:
        return str(error), error.exit_code
    return "", 0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "part",
            {},
            "--parallel shard needs an optimizer for every parameter that requires a gradient, and 1",
        ),
        ("unsplit", {"max_micro_batch": 2}, "the gradient of 2 samples has the norm"),
    ],
)
def test_a_mistake_is_one_line(
    server: RankServer, tmp_path: Path, name: str, options: dict[str, Any], message: str
) -> None:
    # The other rank may end by the verdict of the first.
    lines = [one.value for one in server.run(fit, name, str(tmp_path), options) if one.value is not None]
    assert lines
    for line, code in lines:
        assert line.startswith(message)
        assert "\n" not in line
        assert code == 2
