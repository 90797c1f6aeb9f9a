"""Every command on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from autobatch.core.units import MiB
from tests.support.kernels import needs_kernels, only_stub
from tests.support.training import apart

pytestmark = pytest.mark.gpu
WITHIN = ("--device", "cuda", "--memory-budget", "200MiB")


def test_doctor_lists_the_gpu(on_gpu) -> None:
    done = on_gpu("doctor")
    assert torch.cuda.get_device_name(0) in done.out


@only_stub
def test_estimate_opens_no_context(on_gpu, contexts) -> None:
    done = on_gpu("estimate", "train.py", "--profile", "h100-80gb", "--json")
    assert done.json["estimates"][0]["micro_batch"] > 1000
    assert contexts() == {}


def test_a_limit_takes_few_runs_and_its_whole_estimate_is_exact_but_for_workspaces(on_gpu) -> None:
    """The estimate sees the profile alone, and the limit was found by runs, with cuBLAS's two workspaces."""
    # Too little for all samples even where no workspace of cuBLAS is kept.
    within = (*WITHIN[:-1], "120MiB")
    done = on_gpu("probe", "train.py", *within, "--json")
    found = done.json["probe"]
    assert found["limited_by"] == "memory"
    assert found["oom_count"] <= 2
    assert len(found["attempts"]) <= 8
    size = found["micro_batch"]
    words = ("--profile", "h100-80gb", "--micro-batch", size, "--json")
    guess = on_gpu("estimate", "train.py", *words).json["estimates"][0]
    peak = next(ran["peak_allocated_bytes"] for ran in found["attempts"] if ran["micro_batch"] == size)
    missing = peak - guess["peak_allocated_bytes"]
    assert abs(missing) < 0.01 * peak or missing == pytest.approx(64 * MiB, rel=0.01)


@needs_kernels
def test_a_fit_has_the_weights_of_the_cpu(on_gpu, tmp_path: Path) -> None:
    words = ("--trials", 0, "--target-batch", 64, "--max-micro-batch", 24, "--steps", 3)
    for device in ("cpu", "cuda"):
        on_gpu("fit", "train.py", "--device", device, *words, "--out", device)
    expected, found = (load_file(tmp_path / device / "model.safetensors") for device in ("cpu", "cuda"))
    assert all(apart(found[name], expected[name]) < 1e-3 for name in expected), "a step moves them by 0.1"
