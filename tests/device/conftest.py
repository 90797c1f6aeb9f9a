"""Fixtures of several tests of devices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autobatch.device import nvml
from autobatch.device.nvml import NvmlAbsent
from tests.support.fake_cuda import FakeCuda, answer_nvml, gpu_reading
from tests.support.nvml_driver import build_driver


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in vars(FakeCuda):
        if not name.startswith("_"):
            monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    # A CUDA build of torch has these, and asks the driver.
    for name in ("_host_emptyCache", "_cuda_clearCublasWorkspaces"):
        monkeypatch.setattr(torch._C, name, lambda: None, raising=False)
    monkeypatch.setattr(nvml, "read_holders", lambda uuid: [])
    answer_nvml(
        monkeypatch,
        lambda uuid: gpu_reading() if uuid == "GPU-a1" else NvmlAbsent(reason="no GPU of that name here"),
    )
    return fake


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the stand-in for the driver's library."""
    folder = tmp_path_factory.mktemp("driver")
    build_driver(folder)
    return folder
