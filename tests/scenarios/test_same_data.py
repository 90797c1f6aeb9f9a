"""The data of all processes of a run are the same: refused if not, and alike whatever draws them."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import autobatch
from autobatch import InputError
from tests.support.commandline import SMALL
from tests.support.probes import Listener
from tests.support.rank_server import RankServer
from tests.support.runs import rows
from tests.support.training import Rows, make_workload, points

RUN: dict[str, Any] = {"target_batch": 8, "device": "cpu", "memory_budget": "64MiB", "trials": 0}


def in_an_order() -> autobatch.Workload:
    """Return a workload whose samples have the order of a set of words, which changes with a variable."""
    order = random.Random(os.environ["PYTHONHASHSEED"]).sample(range(24), 24)
    return make_workload(train_data=Rows(*(column[order] for column in points().columns)))


def fit_in_an_order(out: Path) -> str:
    try:
        autobatch.fit(in_an_order, **RUN, steps=2, out=out)
    except InputError as error:
        return str(error)
    return "trained"


@pytest.mark.distributed
def test_the_order_of_a_set_is_refused_over_ranks(tmp_path: Path, server: RankServer) -> None:
    orders = {rank: {"PYTHONHASHSEED": str(rank)} for rank in range(2)}
    for said in server.values(fit_in_an_order, tmp_path / "run", of_rank=orders):
        assert "training data of rank 1 are not those of rank 0" in said
    same = {rank: {"PYTHONHASHSEED": "0"} for rank in range(2)}
    assert server.values(fit_in_an_order, tmp_path / "same", of_rank=same) == ["trained"] * 2


DRAWN = """
import random
import numpy as np
from torch.utils.data import Subset

ORDER = random.sample(range(32), 32)
KEPT = np.random.permutation(32)

def workload():
    places = [ORDER[KEPT[place]] for place in torch.randperm(32)[:20]]
    return small(train_data=Subset(data(), places))
"""


def fit_drawn(folder: Path, steps: int, resume: bool = False) -> list[str]:
    """Train a file in a process with draws of its own; return the notes."""
    os.chdir(folder)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(os.getpid())
    heard = Listener()
    autobatch.fit("file.py", **RUN, out="run", progress=heard, steps=steps, resume=resume)
    return heard.notes


@pytest.mark.distributed
def test_draws_at_import_and_in_the_function_are_alike_in_every_process(
    tmp_path: Path, server: RankServer
) -> None:
    (tmp_path / "file.py").write_text(SMALL + DRAWN)
    server.values(fit_drawn, tmp_path, 2)
    (notes,) = server.values(fit_drawn, tmp_path, 4, True, world=1)
    assert any("with another number of ranks" in note for note in notes)


VARYING = {"created", "resumed_from", "checkpoints"}


@pytest.mark.program
def test_the_result_of_a_resumed_run_is_that_of_the_whole_run(tmp_path: Path) -> None:
    def run(steps: int, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        options = {**RUN, "trials": 2, "checkpoint_every": 2, "knobs": "optimizer"}
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
