"""A signal to one rank or to all: one checkpoint at one common step, and one exit code."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from autobatch import Interrupted
from autobatch.training.checkpoint import list_checkpoints, load_newest
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group, ranked_loop
from tests.support.runs import ActingAfter, settings, train
from tests.support.training import make_workload, points

pytestmark = pytest.mark.distributed
STEPS = 500


def stop_in_step(out: str, of_rank: dict[int, str], in_validation: bool) -> tuple[int, int]:
    """Send signals to some ranks in the third step; return the exit code and the steps that were trained."""
    group = open_group()
    own = of_rank.get(group.rank)
    asked: list[bool] = []

    def loss(model: Any, batch: Any) -> torch.Tensor:
        if asked and own is not None and (model.training or not in_validation):
            os.kill(os.getpid(), getattr(signal, own))
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    workload = make_workload(loss=loss, validation_data=points(9))
    loop = ranked_loop(group, workload, [4, 4], target_batch=14, steps=STEPS)
    try:
        train(loop, settings(Path(out), validate_every=1), ActingAfter(2, lambda: asked.append(True)))
    except Interrupted as error:
        group.close()
        return error.exit_code, loop.batches_seen
    return 0, loop.batches_seen


@pytest.mark.parametrize(
    ("of_rank", "code", "in_validation"),
    [
        ({0: "SIGINT"}, 130, True),
        ({0: "SIGTERM", 1: "SIGTERM"}, 143, False),
        ({1: "SIGTERM"}, 143, False),
    ],
    ids=str,
)
def test_all_ranks_stop_at_one_step(
    server: RankServer, tmp_path: Path, of_rank: dict[int, str], code: int, in_validation: bool
) -> None:
    found = server.values(stop_in_step, str(tmp_path), of_rank, in_validation)
    assert found == [(code, 2)] * 2, "the open step is dropped"
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000002"]
    newest = load_newest(tmp_path / "checkpoints")
    assert newest.state["counters"]["batches_seen"] == 2
