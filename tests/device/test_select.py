"""Opening devices by the names that users give them."""

from __future__ import annotations

import pytest
import torch

from autobatch import InputError
from autobatch.device import nvml
from autobatch.device.host import HostMemory
from autobatch.device.select import device_kind, device_of_rank, gpu_uuid, open_device
from tests.support.fake_cuda import gpu_reading


@pytest.mark.parametrize(("spec", "kind"), [("cpu", "cpu"), ("sim:t4", "sim"), ("sim:l4", "sim")])
def test_a_name_opens_a_device_of_its_kind(spec: str, kind: str) -> None:
    device = open_device(spec, memory_budget="64MiB", environ={})
    assert (device.kind, device.budget_bytes) == (kind, 64 * 2**20)
    assert device.describe().total_bytes > device.budget_bytes
    assert device_kind(spec) == kind


@pytest.mark.parametrize(
    ("spec", "visible", "is_noted"),
    [
        ("auto", {}, True),
        # The user hides the GPU, or names the CPU.
        ("auto", {"CUDA_VISIBLE_DEVICES": ""}, False),
        ("auto", {"CUDA_VISIBLE_DEVICES": "-1"}, False),
        ("cpu", {}, False),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_noted(
    monkeypatch: pytest.MonkeyPatch, spec: str, visible: dict[str, str], is_noted: bool
) -> None:
    """A build for CUDA 13 finds no GPU under an older driver, and ``auto`` is the CPU then."""
    monkeypatch.setattr(nvml, "read_gpus", lambda: [gpu_reading()])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    notes = open_device(spec, memory_budget="64MiB", environ=visible).describe().notes
    assert [note[:49] for note in notes] == ["this runs on the CPU: the driver shows Alpha, whi"] * is_noted
    monkeypatch.setattr(nvml, "read_gpus", list)
    assert open_device(spec, memory_budget="64MiB", environ=visible).describe().notes == []


def test_ranks_share_the_memory_of_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = HostMemory(64 * 2**30, 32 * 2**30, "a made-up machine")
    monkeypatch.setattr("autobatch.device.select.host_memory", lambda: memory)
    alone = open_device("cpu", memory_budget=None, environ={})
    shared = open_device("cpu", memory_budget=None, environ={"LOCAL_WORLD_SIZE": "4"})
    assert shared.budget_bytes < alone.budget_bytes / 2
    assert "shared by 4 ranks" in shared.describe().budget_source
    assert open_device("cpu", memory_budget="1GiB", environ={"LOCAL_WORLD_SIZE": "4"}).budget_bytes == 2**30


@pytest.mark.parametrize(
    ("spec", "budget", "words"),
    [
        *(
            (spec, None, "names no device")
            for spec in ("gpu", "cpu:0", "cuda:x", "cuda:-1", "sim:", "sim", "")
        ),
        ("sim:no-such-card", None, "no-such-card"),
        ("sim:t4", "900GiB", "900"),
    ],
)
def test_other_names_and_impossible_budgets_are_refused(spec: str, budget: str | None, words: str) -> None:
    with pytest.raises(InputError, match=words):
        open_device(spec, memory_budget=budget, environ={})


def test_auto_is_the_first_gpu_if_there_is_one(monkeypatch) -> None:
    opened = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("autobatch.device.select.CudaDevice", lambda **given: opened.append(given))
    for spec in ("auto", "cuda", "cuda:2"):
        assert device_kind(spec) == "cuda"
        open_device(spec, memory_budget="64MiB", environ={})
    assert [given["index"] for given in opened] == [0, 0, 2]
    assert {given["memory_budget"] for given in opened} == {"64MiB"}


@pytest.mark.parametrize(
    ("spec", "gpus", "expected"),
    [
        ("auto", 4, "cuda:1"),
        ("cuda", 4, "cuda:1"),
        ("cuda", 1, "cuda:0"),
        ("auto", 0, "auto"),
        ("cpu", 4, "cpu"),
        ("sim:t4", 4, "sim:t4"),
    ],
)
def test_a_rank_opens_the_gpu_of_its_place(spec: str, gpus: int, expected: str) -> None:
    assert device_of_rank(spec, local_rank=1, local_world=4, gpus=gpus) == expected
    assert gpu_uuid("cpu") is None


def test_a_gpu_is_not_given_to_several_ranks() -> None:
    with pytest.raises(InputError, match=r"--device cuda:0 is one GPU, and 4 ranks run on this host"):
        device_of_rank("cuda:0", local_rank=3, local_world=4, gpus=4)
    with pytest.raises(InputError, match=r"which shows 3 GPUs: start one rank per GPU"):
        device_of_rank("cuda", local_rank=3, local_world=4, gpus=3)
    assert device_of_rank("cuda:2", local_rank=0, local_world=1, gpus=4) == "cuda:2"
