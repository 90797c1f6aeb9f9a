"""Every command on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.kernels import needs_kernels, only_stub
from tests.support.training import apart

pytestmark = pytest.mark.gpu


def test_doctor_lists_the_gpu(on_gpu) -> None:
    done = on_gpu("doctor")
    assert torch.cuda.get_device_name(0) in done.out


@only_stub
def test_estimate_opens_no_context(on_gpu, contexts) -> None:
    done = on_gpu("estimate", "train.py", "--profile", "h100-80gb", "--json")
    assert done.json["estimates"][0]["micro_batch"] > 1000
    assert contexts() == {}


@needs_kernels
def test_a_fit_has_the_weights_of_the_cpu(on_gpu, tmp_path: Path) -> None:
    words = ("--trials", 0, "--target-batch", 64, "--max-micro-batch", 24, "--steps", 3)
    for device in ("cpu", "cuda"):
        on_gpu("fit", "train.py", "--device", device, *words, "--out", device)
    expected, found = (load_file(tmp_path / device / "model.safetensors") for device in ("cpu", "cuda"))
    assert all(apart(found[name], expected[name]) < 1e-3 for name in expected), "a step moves them by 0.1"
