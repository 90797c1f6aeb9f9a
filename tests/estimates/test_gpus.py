"""Settings of an estimate: GPUs, caps and precisions."""

from __future__ import annotations

from pathlib import Path

import pytest

from autobatch.device.profiles import load_profile
from autobatch.estimates.gpus import LARGEST, GpuChoice, precision_on
from tests.support.options import as_options

NOWHERE = Path("nowhere")


def choice(**options) -> GpuChoice:
    return GpuChoice(as_options("estimate", **options), NOWHERE)


@pytest.mark.parametrize("device", ["cuda:9999", "cpu", "sim:t4"])
def test_a_device_that_is_left_out_is_named(device: str):
    (note,) = choice(device=device, profile=["l4"]).notes([])
    assert f"an estimate touches no device, so --device {device} was left out" in note
    assert choice(device="sim:l4").notes([]) == []


@pytest.mark.parametrize(
    ("settings", "cap"),
    [({}, LARGEST), ({"max_micro_batch": 9}, 9), ({"target_batch": 5, "max_micro_batch": 9}, 5)],
)
def test_an_estimate_is_capped_by_options_only(settings, cap):
    assert choice(profile=["a100-80gb"], **settings).cap == cap


def test_a_precision_that_was_asked_for_holds_on_every_gpu():
    assert [precision_on(capability, "fp16") for capability in ((7, 5), (8, 9))] == ["fp16", "fp16"]
    assert [precision_on(capability, "auto") for capability in ((7, 5), (8, 9))] == ["fp32", "bf16"]


def test_a_device_names_the_gpu_if_no_profile_does():
    names = [gpu.name for gpu in choice(device="sim:l4").load()]
    assert names == ["l4"]
    assert len(choice().load()) > 10


def test_larger_gpus_have_more_memory_and_the_same_operators():
    gpu = load_profile("a100-40gb", user_dir=NOWHERE)
    sizes = [other.total_bytes for other in choice().larger(gpu)]
    assert sizes == sorted(sizes)
    assert min(sizes) > gpu.total_bytes
    assert all(other.compute_capability >= (8, 0) for other in choice().larger(gpu))
