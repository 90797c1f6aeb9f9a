"""Settings of an estimate: GPUs, caps and precisions."""

from __future__ import annotations

from pathlib import Path

import pytest

from autobatch.device.profiles import load_profile
from autobatch.probing.estimates.settings import (
    LARGEST,
    EstimateSettings,
    cap_of,
    device_notes,
    larger_gpus,
    named_gpus,
    precision_on,
)

NOWHERE = Path("nowhere")


@pytest.mark.parametrize("device", ["cuda:9999", "cpu", "sim:t4"])
def test_a_device_that_is_left_out_is_named(device: str):
    (note,) = device_notes(EstimateSettings(device=device, profiles=["l4"]))
    assert f"an estimate touches no device, so --device {device} was left out" in note
    assert device_notes(EstimateSettings(device="sim:l4")) == []


@pytest.mark.parametrize(
    ("settings", "cap"),
    [({}, LARGEST), ({"max_micro_batch": 9}, 9), ({"target_batch": 5, "max_micro_batch": 9}, 5)],
)
def test_an_estimate_is_capped_by_options_only(settings, cap):
    assert cap_of(EstimateSettings(profiles=["a100-80gb"], **settings)) == cap


def test_a_precision_that_was_asked_for_holds_on_every_gpu():
    given = EstimateSettings(profiles=["t4", "l4"], precision="fp16")
    assert [precision_on(given, capability) for capability in ((7, 5), (8, 9))] == ["fp16", "fp16"]
    auto = EstimateSettings()
    assert [precision_on(auto, capability) for capability in ((7, 5), (8, 9))] == ["fp32", "bf16"]


def test_a_device_names_the_gpu_if_no_profile_does():
    names = [gpu.name for gpu in named_gpus(EstimateSettings(device="sim:l4"), NOWHERE)]
    assert names == ["l4"]
    assert len(named_gpus(EstimateSettings(), NOWHERE)) > 10


def test_larger_gpus_have_more_memory_and_the_same_operators():
    gpu = load_profile("a100-40gb", user_dir=NOWHERE)
    sizes = [other.total_bytes for other in larger_gpus(gpu, NOWHERE)]
    assert sizes == sorted(sizes)
    assert min(sizes) > gpu.total_bytes
    assert all(other.compute_capability >= (8, 0) for other in larger_gpus(gpu, NOWHERE))
