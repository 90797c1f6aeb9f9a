"""GPUs that cannot be used: no memory counted, no kernels, no context."""

from __future__ import annotations

import pytest
import torch

from autobatch import AutobatchError, DoesNotFitError, InputError
from autobatch.core.units import GiB
from autobatch.device.cuda import CudaDevice
from autobatch.device.cuda_gpus import UNCACHED, has_kernels, open_context
from autobatch.device.nvml import NvmlAbsent, NvmlGpu
from tests.support.fake_cuda import FakeCuda, gpu_reading

WHEEL = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
"""Architectures of the wheels of torch 2.11 to 2.15 for CUDA 13 (``PYTORCH_RELEASES_CODE_CC``)."""


@pytest.mark.parametrize(
    ("built_for", "capability", "runs"),
    [
        (WHEEL, (7, 5), True),
        (WHEEL, (8, 9), True),
        (WHEEL, (9, 0), True),
        (WHEEL, (12, 1), True),
        # V100, whose kernels CUDA 13 no longer has.
        (WHEEL, (7, 0), False),
        (WHEEL, (6, 1), False),
        # A GPU of the future compiles the PTX.
        (WHEEL, (13, 0), True),
        (WHEEL[:-1], (13, 0), False),
        (("sm_90a",), (9, 0), True),
        (("sm_100a",), (10, 3), False),
        (("gfx942",), (9, 4), True),
    ],
)
def test_machine_code_runs_on_its_major_capability_and_ptx_on_later_ones(
    built_for: tuple[str, ...], capability: tuple[int, int], runs: bool
) -> None:
    assert has_kernels(built_for, capability) is runs


def test_a_torch_without_kernels_for_the_gpu_is_refused_before_anything_runs(fake: FakeCuda) -> None:
    fake.capability = (7, 0)
    with pytest.raises(
        InputError, match=r"cuda:0 has compute capability 7\.0, and torch .* has kernels for sm_75"
    ):
        CudaDevice(index=0, memory_budget=None)
    assert not fake.initialized


def test_memory_that_is_not_counted_is_refused(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.backend = "pluggable"
    with pytest.raises(InputError, match=r"replaced \(pluggable\).*change_current_allocator"):
        CudaDevice(index=0, memory_budget="6GiB")
    fake.backend = "cudaMallocAsync"
    assert CudaDevice(index=0, memory_budget="6GiB").budget_bytes == 6 * GiB
    # The variable need not have a value.
    monkeypatch.setenv(UNCACHED, "")
    with pytest.raises(InputError, match="unset it"):
        CudaDevice(index=0, memory_budget="6GiB")


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        ("out of memory", DoesNotFitError, "has no memory for a CUDA context"),
        (
            "CUDA-capable device(s) is/are busy or unavailable",
            InputError,
            "cannot be opened.*: CUDA error: CUDA-capable device.*compute mode",
        ),
    ],
)
@pytest.mark.parametrize(
    ("reading", "free"),
    [(gpu_reading(GiB // 4), r" \(256 MiB of 24\.0 GiB are free\)"), (NvmlAbsent(reason="none"), "")],
)
def test_a_context_that_the_driver_refuses_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    kind: type[AutobatchError],
    words: str,
    reading: NvmlGpu | NvmlAbsent,
    free: str,
) -> None:
    def refuse(index: int) -> None:
        raise torch.AcceleratorError(f"CUDA error: {said}\nSearch for `cudaError' in https://docs.nvidia.com")

    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    with pytest.raises(kind, match=f"cuda:2 {words}") as caught:
        open_context(2, reading)
    assert caught.match(free)
    assert "\n" not in str(caught.value)
