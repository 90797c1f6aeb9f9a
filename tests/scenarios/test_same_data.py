"""Every process of a run sees the same training data, or the run is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import autobatch
from tests.support.commandline import autobatch as command
from tests.support.runs import rows
from tests.support.training import make_workload

HEAD = """
import os, random, torch
import numpy as np
from torch.utils.data import TensorDataset, random_split
from autobatch import Workload

def of(data):
    return Workload(
        name="same",
        model=lambda: torch.nn.Linear(1, 1),
        train_data=data,
        loss=lambda model, batch: model(batch[0]).sub(batch[0]).pow(2).mean(),
        optimizer=lambda params, learning_rate: torch.optim.SGD(params, lr=learning_rate),
        learning_rate=0.1,
    )
"""
OF_A_SET = """
WORDS = {str(number) for number in range(64)}

def workload():
    return of(TensorDataset(torch.tensor([[float(word) / 64] for word in WORDS])))
"""
DRAWN = """
NUMBERS = [number / 64 for number in range(64)]
random.shuffle(NUMBERS)
ORDER = np.random.permutation(64)

def workload():
    data = TensorDataset(torch.tensor([[NUMBERS[place]] for place in ORDER]))
    return of(random_split(data, [40, 24])[0])
"""
FIT = ("fit", "file.py", "--device", "cpu", "--target-batch", 8, "--trials", 0)


def write(folder: Path, code: str) -> None:
    (folder / "file.py").write_text(HEAD + code)


@pytest.mark.program
def test_the_order_of_a_set_is_refused_on_resume(tmp_path: Path) -> None:
    write(tmp_path, OF_A_SET)
    whole = (*FIT, "--out", "run", "--steps", 2)
    assert command(tmp_path, *whole, PYTHONHASHSEED="1").code == 0
    ended = command(tmp_path, *whole, "--resume", PYTHONHASHSEED="2")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "this run are not those of the checkpoint run" in ended.err
    assert "PYTHONHASHSEED=0" in ended.err


@pytest.mark.program
@pytest.mark.distributed
def test_the_order_of_a_set_is_refused_over_ranks(tmp_path: Path) -> None:
    write(tmp_path, OF_A_SET)
    ended = command(tmp_path, *FIT, "--steps", 2, "--ranks", 2, PYTHONHASHSEED="random")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "training data of rank 1 are not those of rank 0" in ended.err


@pytest.mark.program
@pytest.mark.distributed
def test_draws_at_import_and_in_the_function_are_alike_in_every_process(tmp_path: Path) -> None:
    write(tmp_path, DRAWN)
    ranks = command(tmp_path, *FIT, "--out", "run", "--steps", 2, "--ranks", 2)
    assert ranks.code == 0, ranks.err
    alone = command(tmp_path, *FIT, "--out", "run", "--steps", 4, "--resume")
    assert alone.code == 0, alone.err
    assert "with another number of ranks" in alone.out


def test_a_function_that_returns_the_workload_is_called_with_seeded_generators(tmp_path: Path) -> None:
    drawn = []

    def made() -> autobatch.Workload:
        drawn.append(torch.rand(()).item())
        return make_workload()

    for _ in range(2):
        autobatch.probe(made, device="cpu", max_micro_batch=2)
    assert drawn[0] == drawn[1]


VARYING = {"created", "resumed_from", "checkpoints"}


@pytest.mark.program
def test_the_result_of_a_resumed_run_is_that_of_the_whole_run(tmp_path: Path) -> None:
    def run(steps: int, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        options = {
            "target_batch": 8,
            "trials": 2,
            "device": "cpu",
            "checkpoint_every": 2,
            "knobs": "optimizer",
        }
        autobatch.fit(make_workload(), **options, steps=steps, out=tmp_path / "run", **more)
        result = json.loads((tmp_path / "run" / "result.json").read_text())
        return result, result.pop("training")

    before, trained = run(3)
    again, trained_again = run(3, resume=True)
    differing = {name for name in before if before[name] != again[name]}
    assert differing <= {"created", "options"}
    assert {name for name in trained if trained[name] != trained_again[name]} <= VARYING
    assert again["command"] == before["command"]
    assert "--resume" not in (tmp_path / "run" / "report.html").read_text()
    longer, trained_longer = run(6, resume=True)
    for part in ("probe", "tuning", "memory_curve", "plan", "profile", "title"):
        assert longer[part] == before[part], part
    assert (trained_longer["samples"], trained_longer["first_loss"]) == (48, trained["first_loss"])
    assert trained_longer["seconds"] == pytest.approx(sum(row["seconds"] for row in rows(tmp_path / "run")))
