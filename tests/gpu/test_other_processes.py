"""Memory that other processes hold, and take while a model trains."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import autobatch
from autobatch import Progress
from tests.gpu.conftest import WORKLOAD
from tests.support.kernels import only_stub

pytestmark = pytest.mark.gpu
MIB = 1 << 20


@only_stub
def test_holders_are_named_and_their_memory_is_not_spent(on_gpu, hog, tmp_path: Path) -> None:
    table = {"STUB_GPU_STATE": str(tmp_path / "table")}
    pid = hog(1000, **table)
    done = on_gpu("probe", "train.py", "--device", "cuda", "--max-micro-batch", 64, "--json", **table)
    device = done.json["device"]
    assert [one["pid"] for one in device["holders"] if one["used_bytes"] > 900 * MIB] == [pid]
    assert device["other_processes_bytes"] == 1256 * MIB  # with the hog's context
    assert device["budget_bytes"] < (8192 - 1256 - 256) * MIB


class Taking(Progress):
    """Lets another process take memory between the plan and the training."""

    def __init__(self, take, leave_mib: int) -> None:
        self.take, self.leave_mib = take, leave_mib

    def doing(self, act: str) -> None:
        if act == "preparing the training":
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info()
            self.take(free // MIB - 256 - self.leave_mib)


@only_stub
def test_training_goes_on_smaller_if_another_process_takes_memory(hog, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    workload = {}
    exec(WORKLOAD, workload)
    result = autobatch.fit(
        workload["workload"](),
        device="cuda",
        memory_budget="300MiB",
        target_batch=16384,
        steps=2,
        trials=0,
        split_check="off",
        progress=Taking(hog, leave_mib=100),
    )
    assert result.training.oom_recoveries >= 1
    assert result.training.optimizer_steps == 2
    assert result.training.samples == 2 * 16384


@only_stub
@pytest.mark.parametrize(
    "machine", [{"STUB_NVML": "absent"}, {"STUB_GPU_KIND": "mig"}, {"STUB_GPU_KIND": "integrated"}]
)
def test_a_gpu_whose_figures_nvml_lacks_or_splits_is_read_by_the_driver(on_gpu, machine) -> None:
    more = ("--device", "cuda", "--max-micro-batch", 8, "--json")
    done = on_gpu("probe", "train.py", *more, **machine)
    device = done.json["device"]
    assert device["total_bytes"] == 8192 * MIB
    assert 6 << 30 < device["budget_bytes"] < 8192 * MIB
    assert device["other_processes_bytes"] == (0 if "mig" in machine.values() else None)
    assert any("no figures from NVML" in note for note in device["notes"]) == ("STUB_NVML" in machine)
    assert str(os.getpid()) not in str(device["holders"])
