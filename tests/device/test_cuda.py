"""The CUDA device where there is no GPU: what is refused, and the settings and the cap of its allocator."""

from __future__ import annotations

import pytest
import torch

from autobatch import InputError
from autobatch.core.units import GiB, MiB
from autobatch.device.cuda import CudaDevice, allocator_options, fraction_of

ON, OFF = "expandable_segments:True", "expandable_segments:False"


def test_the_first_variable_that_is_set_counts() -> None:
    for environ, asks in (
        ({}, False),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments : True"}, True),
        ({"PYTORCH_HIP_ALLOC_CONF": ON}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": ON}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": ON, "PYTORCH_ALLOC_CONF": OFF}, True),
    ):
        assert (ON.lower() in allocator_options(environ)) is asks


@pytest.mark.parametrize("total", [8 * GiB, 25_282_281_472, 150_109_880_320])
def test_a_share_of_the_memory_allows_the_budget_to_the_byte(total: int) -> None:
    """The allocator computes ``static_cast<size_t>(fraction * double(total))``."""
    for limit in (1_580_363_928, 2 * MiB, 3 * 20 * MiB, total // 3, total // 2, total - 2 * MiB, total):
        assert limit <= int(fraction_of(limit, total) * float(total)) <= limit + 1


@pytest.mark.parametrize(
    ("change", "index", "words"),
    [
        ({}, 3, "no cuda:3: .* finds: 1"),
        ({}, -1, "no cuda:-1"),
        ({"is_available": False}, 0, "finds: 0.*autobatch doctor"),
        ({"get_allocator_backend": "pluggable"}, 0, r"replaced \(pluggable\)"),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": ""}, 0, "unset the variable"),  # it need not have a value
    ],
)
def test_a_gpu_that_cannot_be_used_is_refused(
    monkeypatch: pytest.MonkeyPatch, change: dict, index: int, words: str
) -> None:
    answers = {"is_available": True, "device_count": 1, "get_allocator_backend": "native", **change}
    for name, value in answers.items():
        if name.islower():
            monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=words):
        CudaDevice(index=index, memory_budget="6GiB")
