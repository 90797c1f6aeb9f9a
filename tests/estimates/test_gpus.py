"""Settings of an estimate: GPUs, caps and precisions."""

from __future__ import annotations

from pathlib import Path

import pytest

from autobatch.device.profiles import load_profile
from autobatch.estimates.gpus import (
    LARGEST,
    cap_of,
    larger_gpus,
    named_gpus,
    option_notes,
    precision_on,
)
from tests.support.options import as_options

NOWHERE = Path("nowhere")


@pytest.mark.parametrize("device", ["cuda:9999", "cpu", "sim:t4"])
def test_a_device_that_is_left_out_is_named(device: str):
    (note,) = option_notes([], as_options("estimate", device=device, profile=["l4"]))
    assert f"an estimate touches no device, so --device {device} was left out" in note
    assert option_notes([], as_options("estimate", device="sim:l4")) == []


@pytest.mark.parametrize(
    ("settings", "cap"),
    [({}, LARGEST), ({"max_micro_batch": 9}, 9), ({"target_batch": 5, "max_micro_batch": 9}, 5)],
)
def test_an_estimate_is_capped_by_options_only(settings, cap):
    assert cap_of(as_options("estimate", profile=["a100-80gb"], **settings)) == cap


def test_a_precision_that_was_asked_for_holds_on_every_gpu():
    given = as_options("estimate", profile=["t4", "l4"], precision="fp16")
    assert [precision_on(capability, given) for capability in ((7, 5), (8, 9))] == ["fp16", "fp16"]
    auto = as_options("estimate")
    assert [precision_on(capability, auto) for capability in ((7, 5), (8, 9))] == ["fp32", "bf16"]


def test_a_device_names_the_gpu_if_no_profile_does():
    names = [gpu.name for gpu in named_gpus(as_options("estimate", device="sim:l4"), NOWHERE)]
    assert names == ["l4"]
    assert len(named_gpus(as_options("estimate"), NOWHERE)) > 10


def test_larger_gpus_have_more_memory_and_the_same_operators():
    gpu = load_profile("a100-40gb", user_dir=NOWHERE)
    sizes = [other.total_bytes for other in larger_gpus(gpu, NOWHERE)]
    assert sizes == sorted(sizes)
    assert min(sizes) > gpu.total_bytes
    assert all(other.compute_capability >= (8, 0) for other in larger_gpus(gpu, NOWHERE))
