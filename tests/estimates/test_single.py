"""Estimates of steps that follow no rule in the micro-batch, against attempts that really run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from autobatch.core.units import MiB
from autobatch.device.profiles import load_profile
from autobatch.device.simulated import SimulatedDevice
from autobatch.estimates.estimator import Estimator
from autobatch.estimates.traces import ALONE
from autobatch.footprint.fit import Unpredictable
from autobatch.setup.attempt import attempt
from tests.support.options import as_options
from tests.support.step_workloads import make, setup

NOWHERE = Path("nowhere")
SAMPLES = 40


class Joined(torch.utils.data.Dataset):
    """Samples of many lengths that are joined end to end, as graphs are."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(300 + index * index % 97, 16)


def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).square().mean()


def workload():
    made = make(
        lambda: nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)), data=Joined(), loss=loss
    )
    return replace(made, collate=torch.cat, size_of=len)


def without_workspaces():
    """A GPU whose libraries take no memory, as a simulated one."""
    return msgspec.structs.replace(load_profile("t4", user_dir=NOWHERE), cublas_workspaces=None)


def estimator(home, **options):
    options = as_options("estimate", profile=["t4"], precision="fp32", **options)
    return Estimator(workload(), options, home)


def test_the_limit_is_that_of_attempts(tmp_path):
    budget, gpu = 4 * MiB, without_workspaces()
    made = estimator(tmp_path, memory_budget="4MiB", max_micro_batch=SAMPLES)
    with pytest.raises(Unpredictable):
        made.traces.step(ALONE, gpu.compute_capability)
    found = made.limit(gpu)
    one = replace(setup(workload()), device=SimulatedDevice(gpu, memory_budget=budget), max_grad_norm=None)
    ran = {m: attempt(one, m).attempt for m in range(1, SAMPLES + 1)}
    most = max(m for m, each in ran.items() if each.fits)
    assert 1 < most < SAMPLES
    assert (found.micro_batch, found.fits, found.micro_batch_high) == (most, True, most)
    assert found.micro_batch_low <= most
    assert set(found.memory) >= {"parameters", "optimizer state", "activations"}


def test_a_given_size_is_predicted(tmp_path):
    made = estimator(tmp_path, memory_budget="64MiB", micro_batch=7)
    found = made.limit(without_workspaces())
    assert found.fits
    assert "single sizes (7)" in "".join(made.notes([found]))


def test_nothing_fits(tmp_path):
    found = estimator(tmp_path, memory_budget="100KiB", max_micro_batch=SAMPLES).limit(without_workspaces())
    assert (found.micro_batch, found.fits) == (0, False)
    assert found.peak_allocated_bytes > 0
