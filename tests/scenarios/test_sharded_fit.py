"""A whole fit whose ranks share the model: the batches, weights and figures of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy

import autobatch
from autobatch.training.run_folder import AVERAGED_WEIGHTS, WEIGHTS
from tests.support.ragged import ragged_workload
from tests.support.rank_server import RankServer
from tests.support.runs import keep_only, rows
from tests.support.training import TOKENS, apart, make_workload, points, weights

pytestmark = pytest.mark.distributed
COMMON: dict[str, Any] = {
    "target_batch": 7,
    "device": "cpu",
    "memory_budget": "1GiB",
    "seed": 3,
    "trials": 0,
    "steps": 4,
}


class Blocks(nn.Module):
    """A model with repeated blocks, tied weights beside them, and rows that two ranks share unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2)])
        self.last = nn.Linear(7, 7, bias=False)
        self.again = nn.Linear(7, 7, bias=False)
        self.again.weight = self.last.weight
        self.register_buffer("scale", torch.tensor([0.5]), persistent=False)
        self.head = nn.Linear(7, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.again(self.last(hidden * self.scale)))


def accuracy(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).double().mean()}


def halved(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def blocks() -> autobatch.Workload:
    return make_workload(
        model=lambda: Blocks().double(),
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        validation_data=points(11, seed=5),
        optimizer=lambda params, rate: torch.optim.AdamW(params, lr=rate),
        metrics=accuracy,
        schedule=halved,
        name="blocks",
    )


WORKLOADS = {
    "ragged": lambda: ragged_workload(name="ragged"),
    "blocks": blocks,
    "tokens": lambda: make_workload(**TOKENS, name="tokens"),
}


def fit(name: str, out: str, options: dict[str, Any]) -> tuple[list[float] | None, dict[str, Any]]:
    """Train, and return the weights and the result."""
    torch.set_num_threads(1)
    with patch("autobatch.report.page.write_report"):  # charts take longer than these runs
        result = autobatch.fit(WORKLOADS[name](), out=out, **{**COMMON, **options})
    found = None if result.model is None else weights(result.model).tolist()
    return found, result.to_json()


@pytest.mark.parametrize(
    ("name", "world"),
    [
        ("blocks", 2),
        pytest.param("tokens", 3, marks=pytest.mark.slow),
    ],
)
def test_a_run_does_not_depend_on_the_ranks(
    server: RankServer, tmp_path: Path, name: str, world: int
) -> None:
    options = {"max_micro_batch": 2, "validate_every": 2, "max_grad_norm": 0.2, "ema": 0.5}
    expected, alone = fit(name, str(tmp_path / "alone"), options)
    out = tmp_path / str(world)
    found = server.values(fit, name, str(out), {**options, "parallel": "shard"}, world=world)
    trained = torch.tensor(found[0][0], dtype=torch.float64)
    assert apart(trained, torch.tensor(expected, dtype=torch.float64)) < 1e-12
    assert found[1][0] is None
    for line, other in zip(rows(out), rows(tmp_path / "alone"), strict=True):
        for one in ("loss", "grad_norm", "count", "learning_rate", "samples"):
            assert line[one] == pytest.approx(other[one], rel=1e-12), one
        assert line["validation"] == pytest.approx(other["validation"], rel=1e-12)
    training = json.loads((out / "result.json").read_text())["training"]
    assert training["validation"] == pytest.approx(alone["training"]["validation"], rel=1e-12)
    plan = found[0][1]["plan"]
    assert (plan["parallel"], plan["shard_sync"]) == ("shard", "each")


SHARD, REPLICATE = {"parallel": "shard"}, {"parallel": "replicate"}
RUN = {"max_micro_batch": 2, "max_grad_norm": 0.2, "ema": 0.5, "checkpoint_every": 2, "keep_last": 9}


@pytest.mark.program
def test_a_resume_is_bit_exact_on_as_many_ranks_and_exact_in_one_process(
    server: RankServer, tmp_path: Path
) -> None:
    first = server.values(fit, "blocks", str(tmp_path), {**RUN, **SHARD})[0][0]
    averages = (tmp_path / AVERAGED_WEIGHTS).read_bytes()
    keep_only(tmp_path, 2)
    again = server.values(fit, "blocks", str(tmp_path), {**RUN, "resume": True})  # shared as before
    assert again[0][0] == first
    assert (tmp_path / AVERAGED_WEIGHTS).read_bytes() == averages
    assert again[0][1]["plan"]["parallel"] == "shard"
    assert not any(path.suffix in (".metadata", ".distcp", ".pkl") for path in tmp_path.rglob("*"))
    keep_only(tmp_path, 2)
    alone, _ = fit("blocks", str(tmp_path), {**RUN, "resume": True})
    assert apart(torch.tensor(alone), torch.tensor(first)) < 1e-12


@pytest.mark.slow
def test_a_run_moves_between_ranks_that_share_and_others(server: RankServer, tmp_path: Path) -> None:
    kinds = ((3, REPLICATE), (1, {}), (2, SHARD))
    options = {**RUN, "steps": 6}
    expected, _ = fit("blocks", str(tmp_path / "alone"), options)
    out = tmp_path / "run"
    found = None
    for number, (world, how) in enumerate(kinds):
        own = {**options, **how, "resume": number > 0}
        if world == 1:
            found, _ = fit("blocks", str(out), own)
        else:
            found = server.values(fit, "blocks", str(out), own, world=world)[0][0]
        if number < 2:
            keep_only(out, 2 * number + 2)
    assert apart(torch.tensor(found), torch.tensor(expected)) < 1e-12
    for name in (WEIGHTS, AVERAGED_WEIGHTS):
        exported, whole = load_file(out / name), load_file(tmp_path / "alone" / name)
        assert exported.keys() == whole.keys()
        assert max(apart(exported[one], whole[one]) for one in whole) < 1e-12
    assert len(rows(out)) == 6
