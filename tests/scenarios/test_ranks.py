"""A whole fit over several ranks: the same batches, weights and figures as in one process."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autobatch
from autobatch.training.checkpoints.load import load_newest
from autobatch.training.run_folder import CHECKPOINTS
from tests.support.ragged import ragged_workload
from tests.support.rank_server import RankServer
from tests.support.runs import keep_only, rows
from tests.support.training import Rows, apart, fingerprint, make_workload, mean_loss, points, weights

pytestmark = pytest.mark.distributed
COMMON: dict[str, Any] = {"target_batch": 7, "device": "cpu", "memory_budget": "1GiB", "seed": 3, "trials": 0}
STEPS = 6
RANDOM = {"target_batch": 16, "max_micro_batch": 4}
"""No rank has a micro-batch of one sample, which BatchNorm cannot train on."""


def accuracy(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).double().mean()}


def plain() -> autobatch.Workload:
    return make_workload(
        loss=mean_loss, validation_data=points(11, seed=5), metrics=accuracy, schedule=halved, name="plain"
    )


def halved(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


class Noisy(Rows):
    """Data with an augmentation."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        inputs, label = super().__getitem__(index)
        return inputs + 0.1 * torch.randn(inputs.shape, dtype=inputs.dtype), label


def random() -> autobatch.Workload:
    """Make a workload with draws of all kinds, running statistics and an optimizer with state."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)).double()

    return make_workload(
        model=model,
        train_data=Noisy(*points(24).columns),
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda params, rate: torch.optim.AdamW(params, lr=rate),
        learning_rate=0.01,
        name="random",
    )


WORKLOADS = {"plain": plain, "random": random, "ragged": lambda: ragged_workload(name="ragged")}


def fit(
    name: str, out: str, options: dict[str, Any], *, report: bool = False
) -> tuple[str, list[float], dict[str, Any]]:
    """Train, and return the fingerprint and the values of the weights, and the result.

    Charts take longer to draw than these runs to train, so only one test has a report.
    """
    torch.set_num_threads(1)
    with nullcontext() if report else patch("autobatch.report.page.write_report"):
        result = autobatch.fit(WORKLOADS[name](), out=out, **{**COMMON, **options})
    assert result.model is not None
    return fingerprint(result.model), weights(result.model).tolist(), result.to_json()


def fit_with_report(out: str, options: dict[str, Any]) -> tuple[str, list[float], dict[str, Any]]:
    return fit("plain", out, options, report=True)


def test_a_run_does_not_depend_on_the_ranks(server: RankServer, tmp_path: Path) -> None:
    options = {"steps": STEPS, "max_micro_batch": 2, "validate_every": 2, "max_grad_norm": 0.2, "ema": 0.5}
    _, expected, alone = fit("plain", str(tmp_path / "alone"), options)
    for world, train in ((2, fit_with_report), (3, partial(fit, "plain"))):
        out = tmp_path / str(world)
        found = server.values(train, str(out), options, world=world)
        assert len({one[0] for one in found}) == 1
        assert apart(torch.tensor(found[0][1]), torch.tensor(expected)) < 1e-12
        for line, other in zip(rows(out), rows(tmp_path / "alone"), strict=True):
            for name in ("loss", "grad_norm", "count", "learning_rate", "samples"):
                assert line[name] == pytest.approx(other[name], rel=1e-12), name
            assert line["validation"] == pytest.approx(other["validation"], rel=1e-12)
        training = json.loads((out / "result.json").read_text())["training"]
        assert training["validation"] == pytest.approx(alone["training"]["validation"], rel=1e-12)
        plan = found[0][2]["plan"]
        assert plan["world_size"] == world
        assert sum(one["samples"] for one in plan["ranks"]) == 7
        assert {path.name for path in out.iterdir()} >= {"model.safetensors", "result.json"}
        assert (out / "report.html").exists() == (world == 2)


def test_a_resume_on_as_many_ranks_is_bit_exact(server: RankServer, tmp_path: Path) -> None:
    options = {**RANDOM, "steps": STEPS, "checkpoint_every": 2, "keep_last": 9}
    found = server.values(fit, "random", str(tmp_path / "run"), options)
    assert found[0][0] == found[1][0]
    newest = load_newest(tmp_path / "run" / CHECKPOINTS)
    assert newest is not None
    first, second = newest.state["random"]
    assert first["torch"] != second["torch"], "ranks draw other numbers"
    keep_only(tmp_path / "run", 4)
    again = server.values(fit, "random", str(tmp_path / "run"), {**options, "resume": True})
    assert [one[0] for one in again] == [one[0] for one in found]
    assert len(rows(tmp_path / "run")) == STEPS


def test_a_resume_on_other_ranks_trains_the_same_batches(server: RankServer, tmp_path: Path) -> None:
    options = {"steps": STEPS, "max_micro_batch": 2, "checkpoint_every": 2, "keep_last": 9}
    _, expected, _ = fit("plain", str(tmp_path / "alone"), options)
    out = tmp_path / "run"
    server.values(fit, "plain", str(out), options, world=2)
    keep_only(out, 2)
    server.values(fit, "plain", str(out), {**options, "resume": True}, world=3)
    keep_only(out, 4)
    _, found, _ = fit("plain", str(out), {**options, "resume": True})
    assert apart(torch.tensor(found), torch.tensor(expected)) < 1e-12
    assert [line["samples"] for line in rows(out)] == [7 * step for step in range(1, STEPS + 1)]


def fit_within(budgets: dict[int, str], out: str) -> tuple[str, list[float], dict[str, Any]]:
    """Train with a budget of its own on each rank."""
    budget = budgets[int(os.environ["RANK"])]
    return fit("plain", out, {"steps": 3, "target_batch": 24, "memory_budget": budget})


def test_unlike_ranks_take_what_fits_on_each(server: RankServer, tmp_path: Path) -> None:
    budgets = {0: "100KiB", 1: "4KiB", 2: "100KiB"}
    found = server.values(fit_within, budgets, str(tmp_path / "run"), world=3)
    ranks = found[0][2]["plan"]["ranks"]
    assert [one["kind"] for one in ranks] == [0, 1, 0]
    assert ranks[1]["limit"] < ranks[0]["limit"] == ranks[2]["limit"]
    assert [sum(one["micro_batches"]) for one in ranks] == [one["samples"] for one in ranks]
    assert sum(one["samples"] for one in ranks) == 24
    _, expected, _ = fit("plain", str(tmp_path / "alone"), {"steps": 3, "target_batch": 24})
    assert apart(torch.tensor(found[0][1]), torch.tensor(expected)) < 1e-12


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_cut_a_batch_by_size_together(server: RankServer, tmp_path: Path, world: int) -> None:
    options = {"steps": 4, "max_micro_batch": 5, "target_batch": 20, "split_check": "off"}
    _, expected, _ = fit("ragged", str(tmp_path / "alone"), {**options, "split": "count", "trials": 0})
    by_size = {**options, "split": "size", "checkpoint_every": 2, "keep_last": 9}
    out = tmp_path / "run"
    found = server.values(fit, "ragged", str(out), by_size, world=world)
    assert found[0][2]["plan"]["split"] == "size"
    assert apart(torch.tensor(found[0][1]), torch.tensor(expected)) < 1e-12
    assert len({one[0] for one in found}) == 1
    if world == 2:
        return
    keep_only(out, 2)
    resumed = server.values(fit, "ragged", str(out), {**by_size, "resume": True}, world=world)
    assert [one[0] for one in resumed] == [one[0] for one in found]
    assert resumed[0][2]["plan"]["split"] == "size"
