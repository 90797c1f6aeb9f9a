"""Opening devices by the names that users give them."""

from __future__ import annotations

import pytest
import torch

from autobatch import InputError
from autobatch.device import host
from autobatch.device.host import HostMemory
from autobatch.device.select import device_kind, open_device

ALPHA = host.NvmlGpu(uuid="GPU-a1", name="Alpha", free_bytes=None, used_bytes=None, holders=[])


def test_a_name_opens_a_device_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    for spec, kind in (("cpu", "cpu"), ("sim:t4", "sim")):
        device = open_device(spec, "64MiB")
        assert (device.kind, device.budget_bytes, device_kind(spec)) == (kind, 64 * 2**20, kind)
    opened = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("autobatch.device.select.CudaDevice", lambda **given: opened.append(given["index"]))
    for spec in ("auto", "cuda", "cuda:2"):
        assert device_kind(spec) == "cuda"
        open_device(spec, "64MiB")
    assert opened == [0, 0, 2]


@pytest.mark.parametrize("spec", ["gpu", "cpu:0", "cuda:x", "cuda:-1", "sim:", "sim", "", "sim:no-such-card"])
def test_other_names_are_refused(spec: str) -> None:
    with pytest.raises(InputError, match=r"names no device|no-such-card"):
        open_device(spec, None)


def test_a_gpu_that_torch_cannot_use_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build for CUDA 13 finds no GPU under an older driver, and ``auto`` is the CPU then."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for spec, visible, gpus, is_noted in (
        ("auto", "0", [ALPHA], True),
        ("auto", "0", [], False),
        # The user hides the GPU, or names the CPU.
        ("auto", "", [ALPHA], False),
        ("cpu", "0", [ALPHA], False),
    ):
        monkeypatch.setattr(host, "read_gpus", lambda gpus=gpus: gpus)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        notes = open_device(spec, "64MiB").describe().notes
        assert ["the driver shows Alpha" in note for note in notes] == [True] * is_noted


def test_ranks_share_the_memory_of_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = HostMemory(64 * 2**30, 32 * 2**30, "a made-up machine")
    monkeypatch.setattr("autobatch.device.select.host_memory", lambda: memory)
    alone = open_device("cpu", None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    shared = open_device("cpu", None)
    assert shared.budget_bytes < alone.budget_bytes / 2
    assert open_device("cpu", "1GiB").budget_bytes == 2**30
