"""A whole fit over several ranks, each with a whole model or a part of it: the run of one process."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import Tensor, nn
from torch.utils.data import WeightedRandomSampler

import autobatch
from autobatch.training.checkpoint import load_newest
from tests.support.kinds import Everything, stateful
from tests.support.ragged import ragged_workload
from tests.support.rank_server import RankServer
from tests.support.runs import keep_only, rows
from tests.support.sharded_loops import Blocks
from tests.support.training import (
    adamw,
    apart,
    fingerprint,
    make_workload,
    mean_loss,
    points,
    sgd,
    then,
    weights,
)

pytestmark = pytest.mark.distributed
COMMON: dict[str, Any] = {"target_batch": 7, "device": "cpu", "memory_budget": "1GiB", "seed": 3, "trials": 0}
WATCHED = {"steps": 6, "max_micro_batch": 2, "validate_every": 2, "max_grad_norm": 0.2, "ema": 0.5}
SAVED = {"max_micro_batch": 2, "checkpoint_every": 2, "keep_last": 9}
SHARD, REPLICATE = {"parallel": "shard"}, {"parallel": "replicate"}


def halved(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def accuracy(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).double().mean()}


def part_of(params: Any, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(params)[1:], lr=rate)


@torch.no_grad()
def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.3, 0.3)


MEASURED: dict[str, Any] = {
    "optimizer": then(sgd, clamp),
    "sampler": WeightedRandomSampler([1.0, 3.0] * 12, 18),
    "validation_data": points(11, seed=5),
    "metrics": accuracy,
    "schedule": halved,
    "loss": mean_loss,
}
WORKLOADS = {
    "plain": partial(make_workload, **MEASURED),
    "random": partial(stateful, model=lambda: Everything().body),
    "ragged": ragged_workload,
    "blocks": partial(
        make_workload, **{**MEASURED, "model": lambda: Blocks().double(), "optimizer": then(adamw, clamp)}
    ),
    "stream": partial(make_workload, train_data=lambda: iter(list(points(23))), validation_data=points(11)),
    "default": make_workload,
    # Only one rank has a sample to validate on.
    "part": partial(
        make_workload, **{**MEASURED, "optimizer": then(part_of, clamp), "validation_data": points(1)}
    ),
}
Trained = tuple[str, list[float] | None, dict[str, Any]]


def fit(name: str, out: str, options: dict[str, Any]) -> Trained:
    """Train, and return the fingerprint and the values of the weights, if they are here, and the result."""
    result = autobatch.fit(WORKLOADS[name](), out=out, **{**COMMON, **options})
    model = result.model
    if model is None:  # the ranks share it, and the file has all of it
        model = WORKLOADS[name]().model()
        load_model(model, Path(out) / "model.safetensors")
    return fingerprint(model), weights(model).tolist(), result.to_json()


def assert_same_weights(found: Trained, expected: Trained) -> None:
    assert apart(*(torch.tensor(one[1], dtype=torch.float64) for one in (found, expected))) < 1e-12


def assert_same_run(out: Path, alone: Path) -> None:
    """Compare all steps and the last validation of two runs."""
    for line, other in zip(rows(out), rows(alone), strict=True):
        for name in ("loss", "grad_norm", "count", "learning_rate", "samples"):
            assert line[name] == pytest.approx(other[name], rel=1e-12), name
        assert line["validation"] == pytest.approx(other["validation"], rel=1e-12)
    one, other = (json.loads((at / "result.json").read_text())["training"] for at in (out, alone))
    assert one["validation"] == pytest.approx(other["validation"], rel=1e-12)


@pytest.mark.parametrize(
    ("name", "world", "how"),
    [
        ("plain", 3, REPLICATE),
        ("blocks", 4, SHARD),  # the head has 3 rows
        ("part", 2, SHARD),
        ("stream", 2, REPLICATE),
    ],
)
def test_a_run_does_not_depend_on_the_ranks(
    server: RankServer, tmp_path: Path, name: str, world: int, how: dict[str, Any]
) -> None:
    expected = fit(name, str(tmp_path / "alone"), {**WATCHED, **how, "parallel": "auto"})
    out = tmp_path / "run"
    found = server.values(fit, name, str(out), {**WATCHED, **how}, world=world)
    assert_same_weights(found[0], expected)
    assert_same_run(out, tmp_path / "alone")
    averages, others = (load_file(at / "model-ema.safetensors") for at in (out, tmp_path / "alone"))
    assert averages.keys() == others.keys()
    assert max(apart(averages[one], others[one]) for one in others) < 1e-12
    assert len({one[0] for one in found}) == 1
    plan = found[0][2]["plan"]
    assert (plan["world_size"], plan["parallel"]) == (world, how["parallel"])
    assert {path.name for path in out.iterdir()} >= {"model.safetensors", "result.json", "report.html"}


@pytest.mark.parametrize("how", [REPLICATE, SHARD], ids=str)
def test_a_resume_on_as_many_ranks_is_bit_exact(
    server: RankServer, tmp_path: Path, how: dict[str, str]
) -> None:
    # No rank has a micro-batch of one sample, which BatchNorm cannot train on.
    options = {**SAVED, **how, "steps": 6, "target_batch": 16, "max_micro_batch": 4, "ema": 0.5}
    found = server.values(fit, "random", str(tmp_path / "run"), options)
    assert found[0][0] == found[1][0]
    newest = load_newest(tmp_path / "run" / "checkpoints")
    first, second = newest.state["random"]
    assert not torch.equal(first["torch"], second["torch"]), "ranks draw other numbers"
    averages = (tmp_path / "run" / "model-ema.safetensors").read_bytes()
    keep_only(tmp_path / "run", 4)
    again = server.values(fit, "random", str(tmp_path / "run"), {**options, "resume": True})
    assert [one[0] for one in again] == [one[0] for one in found]
    assert (tmp_path / "run" / "model-ema.safetensors").read_bytes() == averages
    assert len(rows(tmp_path / "run")) == 6


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("plain", ((2, REPLICATE), (3, {}), (1, {}))),
        pytest.param("stream", ((3, REPLICATE), (2, {}), (1, {})), marks=pytest.mark.slow),
        pytest.param("blocks", ((2, SHARD), (4, SHARD), (3, {}), (1, {})), marks=pytest.mark.program),
    ],
)
def test_a_run_moves_between_ranks(server: RankServer, tmp_path: Path, name: str, kinds: Any) -> None:
    steps = 2 * len(kinds)
    options = {**SAVED, "steps": steps, "ema": 0.5}
    expected = fit(name, str(tmp_path / "alone"), options)
    out = tmp_path / "run"
    for number, (world, how) in enumerate(kinds):
        own = {**options, **how, "resume": number > 0}
        run = partial(fit, name, str(out), own)
        found = run() if world == 1 else server.values(fit, name, str(out), own, world=world)[0]
        if number < len(kinds) - 1:
            keep_only(out, 2 * number + 2)
    assert_same_weights(found, expected)
    for file in ("model.safetensors", "model-ema.safetensors"):
        exported, whole = load_file(out / file), load_file(tmp_path / "alone" / file)
        assert exported.keys() == whole.keys()
        assert max(apart(exported[one], whole[one]) for one in whole) < 1e-12
    assert [line["samples"] for line in rows(out)] == [7 * step for step in range(1, steps + 1)]


def test_ranks_cut_a_batch_by_size_together(server: RankServer, tmp_path: Path) -> None:
    options = {**SAVED, "steps": 4, "max_micro_batch": 5, "target_batch": 20, "split_check": "off"}
    expected = fit("ragged", str(tmp_path / "alone"), {**options, "split": "count"})
    found = server.values(fit, "ragged", str(tmp_path / "run"), {**options, "split": "size"})
    assert found[0][2]["plan"]["split"] == "size"
    assert_same_weights(found[0], expected)
    assert len({one[0] for one in found}) == 1
    keep_only(tmp_path / "run", 2)
    again = server.values(fit, "ragged", str(tmp_path / "run"), {**options, "split": "size", "resume": True})
    assert [one[0] for one in again] == [one[0] for one in found]


def plan_probe_and_fit(out: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    options = {"device": "cpu", "memory_budget": "1GiB", "max_micro_batch": 3}
    plan = autobatch.plan(make_workload(), target_batch=14, **options)
    probe = autobatch.probe(make_workload(), **options)
    found = fit("default", out, {"target_batch": 14, "steps": 1, "max_micro_batch": 3, "seed": 0})
    return msgspec.to_builtins(plan), msgspec.to_builtins(probe), found[2]["plan"]


def test_a_probe_and_a_plan_over_ranks_answer_as_a_fit_does(server: RankServer, tmp_path: Path) -> None:
    (plan, probe, fitted), (other, *_) = server.values(plan_probe_and_fit, str(tmp_path / "run"))
    for same in (other, fitted):
        assert {name: same[name] for name in fitted} == {name: plan[name] for name in fitted}
    assert (plan["world_size"], plan["micro_batches"]) == (2, [3, 2, 2])
    assert plan["parallel_reason"] == "a whole model fits on each rank, so each has its own"
    assert (probe["micro_batch"], probe["parallel"], probe["world_size"]) == (3, "replicate", 2)
