"""BatchNorm in micro-batches: the momentum that the note names, and micro-batches of a single sample."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from autobatch import InputError
from autobatch.planning import make_plan, micro_batches
from autobatch.training.split_check import check_batch_norms, statistics_notes
from autobatch.workload.order import GlobalBatchSampler
from tests.support.runs import fit
from tests.support.training import apart, make_loop, make_workload, network, points

TARGET = 512


def averages(micro_batch: int, momentum: float) -> tuple[torch.Tensor, list[str]]:
    data = points(1024)
    data.columns[0].mul_(2.0).add_(3.0)
    workload = make_workload(
        model=lambda: nn.Sequential(nn.BatchNorm1d(5, momentum=momentum), network()).double(),
        train_data=data,
        learning_rate=1e-6,
    )
    loop = make_loop(workload, target_batch=TARGET, micro_batch=micro_batch, steps=4)
    notes = statistics_notes([momentum], micro_batches(TARGET, micro_batch))
    list(loop.run())
    norm = loop.train_state.model[0]
    return torch.cat([norm.running_mean, norm.running_var]), notes


def test_the_named_momentum_moves_the_averages_as_a_whole_batch_does() -> None:
    whole, notes = averages(TARGET, 0.1)
    assert notes == []
    split, (note,) = averages(60, 0.1)
    named = float(re.findall(r"a momentum of ([\d.]+) instead of 0\.1", note)[0])
    assert apart(averages(60, named)[0], whole) < 0.02 < 0.1 < apart(split, whole)


def test_a_batch_norm_of_one_sample_is_refused_before_training(tmp_path: Path) -> None:
    """The last batch of the epoch has one."""
    workload = make_workload(model=lambda: nn.Sequential(nn.BatchNorm1d(5), network()).double())
    with pytest.raises(InputError, match="this run has a micro-batch of 1"):
        fit(workload, tmp_path, epochs=1, target_batch=23, max_micro_batch=8)
    assert not (tmp_path / "checkpoints").exists()


def test_a_batch_norm_of_one_sample_is_refused_on_whatever_rank() -> None:
    plan = make_plan(target_batch=3, micro_batch_limit=8, learning_rate=0.1, world_size=2)
    with pytest.raises(InputError, match="this run has a micro-batch of 1"):
        check_batch_norms(
            nn.BatchNorm1d(5), plan, GlobalBatchSampler(samples=6, target_batch=3, seed=0, steps=2)
        )
