"""What torch and NVML say of GPUs, against a stand-in for both."""

from __future__ import annotations

import pytest
import torch

from autobatch import InputError
from autobatch.core.units import GiB, MiB
from autobatch.device.cuda_gpus import context_growth, others_bytes, read_nvml, require_gpu, visible_gpus
from autobatch.device.nvml import NvmlAbsent
from tests.support.fake_cuda import FakeCuda, answer_nvml, gpu_reading


def test_memory_of_other_processes() -> None:
    assert others_bytes(gpu_reading(20 * GiB), held_bytes=GiB) == 3 * GiB
    assert others_bytes(gpu_reading(20 * GiB, reserved=512 * MiB), held_bytes=GiB) == 3 * GiB - 512 * MiB
    assert others_bytes(gpu_reading(20 * GiB), held_bytes=5 * GiB) == 0
    assert others_bytes(gpu_reading(None), held_bytes=0) is None


def test_a_context_takes_the_memory_that_is_no_longer_free() -> None:
    assert context_growth(gpu_reading(20 * GiB), gpu_reading(20 * GiB - 500 * MiB)) == 500 * MiB
    assert context_growth(gpu_reading(20 * GiB), gpu_reading(20 * GiB)) is None
    assert context_growth(gpu_reading(None), gpu_reading(20 * GiB)) is None
    assert context_growth(NvmlAbsent(reason="none"), gpu_reading(20 * GiB)) is None


def test_a_slice_is_found_before_its_gpu(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"MIG-a1": gpu_reading(9 * GiB, total=10 * GiB), "GPU-a1": gpu_reading(70 * GiB, mig=True)}
    answer_nvml(monkeypatch, known.__getitem__)
    found = read_nvml("a1")
    assert not isinstance(found, NvmlAbsent)
    assert found.free_bytes == 9 * GiB


def test_figures_of_a_gpu_in_slices_are_not_used(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"MIG-a1": NvmlAbsent(reason="none"), "GPU-a1": gpu_reading(70 * GiB, mig=True)}
    answer_nvml(monkeypatch, known.__getitem__)
    for uuid, words in (("a1", "split by MIG"), (None, "UUID")):
        found = read_nvml(uuid)
        assert isinstance(found, NvmlAbsent)
        assert words in found.reason


def test_gpus_are_listed_with_their_free_memory(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = visible_gpus()
    assert (found.index, found.uuid, found.capability, found.free_bytes) == (0, "a1", "8.9", 20 * GiB)
    answer_nvml(monkeypatch, lambda uuid: NvmlAbsent(reason="none"))
    assert visible_gpus()[0].free_bytes is None


def test_there_are_no_gpus_without_cuda(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert visible_gpus() == []
    with pytest.raises(InputError, match=r"cuda:0 was asked for.*autobatch doctor.*--device cpu"):
        require_gpu(0)


def test_a_fork_of_a_process_with_cuda_has_no_gpu(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_isInBadFork", lambda: True, raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InputError, match=r"cuda:0 was asked for, and this process was forked .* spawn"):
        require_gpu(0)


def test_a_missing_gpu_names_those_that_exist(fake: FakeCuda) -> None:
    require_gpu(0)
    for index in (-1, 1):
        with pytest.raises(
            InputError, match=f"cuda:{index} was asked for, and torch finds 1: cuda:0 to cuda:0"
        ):
            require_gpu(index)
