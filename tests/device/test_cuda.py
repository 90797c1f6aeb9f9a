"""The CUDA device on a stand-in for ``torch.cuda`` and NVML: what it finds, enforces and refuses."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from autobatch import AutobatchError, DoesNotFitError, InputError
from autobatch.core.units import GiB, MiB
from autobatch.device.allocator.ledger import MemoryStats
from autobatch.device.cuda import CudaDevice
from tests.support.fake_cuda import FakeCuda


def opened(memory_budget: str | None = "6GiB", index: int = 0) -> CudaDevice:
    return CudaDevice(index=index, memory_budget=memory_budget)


def test_the_budget_comes_from_what_the_driver_has_free(fake: FakeCuda) -> None:
    device = opened(None)
    assert device.budget_bytes == 22 * GiB - int(1.2 * GiB)
    record = device.describe()
    assert (record.kind, record.name, record.total_bytes) == ("cuda", "Alpha", 24 * GiB)
    assert record.budget_source.startswith("20.0 GiB free (the CUDA driver) + 2.00 GiB held by this process")
    assert device.torch_device == torch.device("cuda:0")
    assert device.native_precisions() == ("bf16", "fp32")
    fake.capability = (7, 5)
    assert opened().native_precisions() == ("fp32", "fp16")


def test_cleaning_up_does_not_hide_the_error_that_lost_the_context(fake: FakeCuda) -> None:
    """After a device-side assert, also the restoring of the cap and the freeing of the cache fail."""
    device = opened()
    error = RuntimeError("CUDA error: device-side assert triggered")

    def step() -> None:
        fake.lost = str(error)
        raise error

    with pytest.raises(RuntimeError) as caught, device.enforced():
        step()
    device.release()
    assert caught.value is error


@pytest.mark.parametrize("total", [8 * GiB, 25_282_281_472, 150_109_880_320])
def test_a_cap_allows_the_budget_to_the_byte_and_so_does_the_restored_one(fake: FakeCuda, total: int) -> None:
    """Of 25,282,281,472 bytes, the share of the first of these would lose a byte if it were set as read."""
    fake.total = total
    for limit in (1_580_363_928, 2 * MiB, 3 * 20 * MiB, total // 3, total // 2, total - 2 * MiB, total):
        fake.allowed = former = min(1_580_376_275 + limit // 7, total)
        device = opened().budgeted(6 * GiB)
        device.budget_bytes = limit
        with suppress(KeyError), device.training():
            assert limit <= fake.allowed <= limit + 1
            raise KeyError("in the step")
        assert fake.allowed == former


def test_training_has_the_budget_of_the_probe_where_that_much_is_free(fake: FakeCuda) -> None:
    """The same share of what is free is some MiB less a minute later, and an answer may need every byte."""
    fake.figures["reserved_bytes.all.current"] = 0
    probed = opened(None).budget_bytes
    # Not even the headroom makes up for 3 GiB.
    for change, expected in ((0, probed), (-GiB, probed), (GiB, probed), (-3 * GiB, 17 * GiB)):
        fake.driver_free = 20 * GiB + change
        device = opened(None)
        assert (device.budget_bytes == probed) == (change == 0)
        training = device.budgeted(probed)
        assert training.budget_bytes == expected
        with training.training():
            assert fake.allowed == expected
        assert device.budget_bytes != training.budget_bytes or change == 0
    assert opened("24GiB").budgeted(24 * GiB).budget_bytes == 24 * GiB


def test_options_of_the_allocator_that_are_not_modelled_are_noted_and_nothing_is_recorded(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value, is_recorded in (("max_split_size_mb:64", False), ("expandable_segments:True", True)):
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", value)
        device = opened()
        assert device.allocator_config.expandable_segments is is_recorded
        with device.enforced():
            assert fake.is_recording is is_recorded
        assert not fake.is_recording
        assert bool([note for note in device.describe().notes if "max_split_size_mb" in note]) != is_recorded


def test_a_step_that_needed_retries_or_more_than_the_budget_does_not_fit(fake: FakeCuda) -> None:
    device = opened()
    with device.training() as meter:
        meter.count([torch.zeros(1)])
        fake.waits = 0
        read = meter.stats()
        assert (read, meter.trace(), fake.waits) == (MemoryStats(1, 2 * GiB, 3, 4 * GiB, 0), None, 0)
        assert device.refuses(read) is None
        fake.figures["num_alloc_retries"] = 9
        assert device.refuses(meter.stats()) == "the allocator freed its cache 2 times to find memory"
    assert device.refuses(MemoryStats()) is None
    over = device.refuses(MemoryStats(peak_reserved_bytes=8 * GiB))
    assert over == "the allocator held 8.00 GiB, over the budget of 6.00 GiB"
    with device.enforced() as meter:
        fake.waits = 0
        meter.stats()
        assert fake.waits == 1, "a probe waits for the GPU"


@pytest.mark.parametrize(
    ("change", "index", "words"),
    [
        ({}, 3, "cuda:3 was asked for, .* finds 1 CUDA GPUs"),
        ({}, -1, "cuda:-1 was asked for"),
        ({"torch.cuda.is_available": lambda: False}, 0, "finds 0 .*autobatch doctor.*--device cpu"),
        ({"torch.cuda.get_allocator_backend": lambda: "pluggable"}, 0, r"replaced \(pluggable\)"),
        # The variable need not have a value.
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": ""}, 0, "unset the variable"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_refused(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, change: dict, index: int, words: str
) -> None:
    for name, value in change.items():
        if callable(value):
            monkeypatch.setattr(name, value, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=words):
        opened(index=index)


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        ("out of memory", DoesNotFitError, "has no memory for a CUDA context"),
        ("CUDA-capable device(s) is/are busy", InputError, "cannot be opened.*: CUDA error: .*compute mode"),
    ],
)
def test_a_context_that_the_driver_refuses_is_one_line(
    fake: FakeCuda, said: str, kind: type[AutobatchError], words: str
) -> None:
    fake.refused = f"CUDA error: {said}\nSearch for `cudaError' in https://docs.nvidia.com"
    with pytest.raises(kind, match=f"cuda:0 {words}") as caught:
        opened()
    assert "\n" not in str(caught.value)
