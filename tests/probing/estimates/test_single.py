"""Estimates of steps that follow no rule in the micro-batch, against attempts that really run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from autobatch.core.units import KiB, MiB
from autobatch.device.profiles import load_profile
from autobatch.device.simulated import SimulatedDevice
from autobatch.footprint.fit_sizes import Unpredictable
from autobatch.probing.estimates.layouts import ALONE
from autobatch.probing.estimates.settings import EstimateSettings
from autobatch.probing.estimates.single import predict_single
from autobatch.probing.estimates.traces import Traces
from autobatch.setup.attempt import attempt
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


def test_the_limit_is_that_of_attempts():
    budget = 4 * MiB
    gpu, traces = without_workspaces(), Traces(workload(), EstimateSettings(profiles=["t4"]))
    with pytest.raises(Unpredictable):
        traces.step(ALONE, gpu.compute_capability)
    step, found = predict_single(traces, gpu, budget_bytes=budget, cap=SAMPLES, micro_batch=None)
    one = replace(setup(workload()), device=SimulatedDevice(gpu, memory_budget=budget), max_grad_norm=None)
    ran = {m: attempt(one, m).attempt for m in range(1, SAMPLES + 1)}
    most = max(m for m, each in ran.items() if each.fits)
    assert 1 < most < SAMPLES
    assert (found.micro_batch, found.fits, found.micro_batch_high) == (most, True, most)
    assert found.peak_reserved_bytes == ran[most].peak_reserved_bytes
    assert found.micro_batch_low <= most
    assert {label.kind for label in step.labels} >= {"parameters", "optimizer state", "activations"}


def test_a_given_size_is_predicted():
    gpu, traces = without_workspaces(), Traces(workload(), EstimateSettings(profiles=["t4"]))
    one = replace(setup(workload()), device=SimulatedDevice(gpu), max_grad_norm=None)
    _, found = predict_single(traces, gpu, budget_bytes=64 * MiB, cap=SAMPLES, micro_batch=7)
    assert found.fits
    assert found.peak_reserved_bytes == attempt(one, 7).attempt.peak_reserved_bytes
    assert "single sizes (7)" in "".join(traces.notes())


def test_nothing_fits():
    gpu, traces = without_workspaces(), Traces(workload(), EstimateSettings(profiles=["t4"]))
    _, found = predict_single(traces, gpu, budget_bytes=100 * KiB, cap=SAMPLES, micro_batch=None)
    assert (found.micro_batch, found.fits) == (0, False)
    assert found.peak_allocated_bytes > 0
