"""The examination of the machine, and its lines on made-up findings."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import msgspec
import pytest
import torch

from autobatch.cli.doctor import PACKAGES, doctor_lines, examine
from autobatch.core.units import GiB
from autobatch.device.cuda_gpus import VisibleGpu

FINDINGS: dict[str, Any] = {
    "host": {
        "name": "AMD EPYC",
        "cores": 8,
        "available_bytes": 3 * GiB,
        "total_bytes": 4 * GiB,
        "source": "cgroup",
    },
    "cuda": {
        "available": True,
        "built_for": "13.0",
        "gpus": [
            {
                "index": 1,
                "name": "NVIDIA L4",
                "total_bytes": 22 * GiB,
                "free_bytes": 20 * GiB,
                "capability": "8.9",
            }
        ],
    },
    "nvml": {
        "available": True,
        "gpus": [
            {
                "name": "NVIDIA L4",
                "free_bytes": 20 * GiB,
                "holders": [{"pid": 7, "name": None, "used_bytes": 2 * GiB}],
            }
        ],
    },
    "versions": {"python": "3.12.4", "torch": "2.13.0", "tensorboard": None},
    "home": "/home/me/autobatch",
    "missing": [],
}


def test_the_lines_name_the_gpu_the_holders_and_the_versions() -> None:
    assert doctor_lines(FINDINGS) == [
        "host     AMD EPYC, 8 cores",
        "memory   3.00 GiB available of 4.00 GiB (cgroup)",
        "cuda     torch built for CUDA 13.0",
        "         cuda:1 NVIDIA L4, 22.0 GiB, 20.0 GiB free, cc 8.9",
        "nvml     available",
        "         NVIDIA L4: 20.0 GiB free",
        "           process 7  2.00 GiB",
        "versions python 3.12.4, torch 2.13.0",
        "home     /home/me/autobatch",
    ]


def test_a_machine_without_a_gpu_gets_the_reasons() -> None:
    changes = {
        "cuda": {"available": False, "built_for": None, "gpus": []},
        "nvml": {"available": False, "reason": "no driver"},
        "missing": ["CUDA: torch was built without it"],
    }
    lines = doctor_lines(FINDINGS | changes)
    assert "cuda     torch built without CUDA" in lines
    assert "nvml     not available: no driver" in lines
    assert lines[-1] == "missing  CUDA: torch was built without it"


def test_the_findings_agree_with_torch_and_the_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    found = examine()
    assert found["cuda"]["available"] == torch.cuda.is_available()
    assert (found["cuda"]["built_for"] is None) == any("built without" in one for one in found["missing"])
    assert found["nvml"]["available"] != any(one.startswith("NVML: ") for one in found["missing"])
    assert found["versions"].keys() == {"python", *PACKAGES}
    assert found["versions"]["numpy"] == importlib.metadata.version("numpy")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert any(one.startswith("a CUDA GPU that torch can use") for one in examine()["missing"])


def test_a_gpu_without_kernels_is_missing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    old = VisibleGpu(index=1, name="V100", uuid=None, total_bytes=16 * GiB, free_bytes=None, capability="7.0")
    new = msgspec.structs.replace(old, index=0, capability="9.0")
    monkeypatch.setattr("autobatch.device.cuda_gpus.visible_gpus", lambda: [new, old])
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90"])
    (line,) = [one for one in examine()["missing"] if one.startswith("kernels: ")]
    assert line.startswith("kernels: cuda:1 has compute capability 7.0, and torch ")
