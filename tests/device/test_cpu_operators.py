"""What devices with tensors on the CPU answer of precisions, optimizers and the compiler."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch

from autobatch.device.base import Device
from autobatch.device.cpu import CpuDevice
from autobatch.device.select import open_device


@pytest.fixture(params=["cpu", "sim:t4"])
def device(request: pytest.FixtureRequest) -> Device:
    return open_device(request.param, memory_budget="64MiB", environ={})


def test_no_property_of_a_gpu_is_claimed(device: Device) -> None:
    assert device.torch_device == torch.device("cpu")
    assert device.compute_capability is None
    assert device.libraries is None
    assert not device.may_spill
    assert not device.reads_pinned_memory
    assert not device.gains_from_compile


def test_a_device_names_the_allocator_that_it_models(device: Device) -> None:
    made = device.new_allocator()
    assert device.allocator_config == getattr(made, "config", None)
    assert (device.allocator_config is None) == isinstance(device, CpuDevice)


@pytest.mark.parametrize(
    ("supported", "precisions"),
    [
        ((), ("fp32",)),
        (("_is_avx512_bf16_supported",), ("fp32", "bf16")),
        (("_is_amx_tile_supported",), ("fp32", "bf16")),
    ],
)
def test_bf16_is_a_choice_on_cpus_that_compute_in_it(
    device: Device,
    supported: tuple[str, ...],
    precisions: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda found=name in supported: found, raising=False)
    assert device.native_precisions() == precisions
    assert device.default_precision() == precisions[0]


def test_the_default_optimizer_steps_one_parameter_at_a_time(device: Device) -> None:
    """Then torch's lists are another choice; the oracle is torch's own rule for its default."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    rules = importlib.import_module("torch.optim.optimizer")
    _, foreach = rules._default_to_fused_or_foreach([parameter], False, False)
    assert not foreach
    assert device.optimizer_implementations() == ("default", "foreach", "fused")
