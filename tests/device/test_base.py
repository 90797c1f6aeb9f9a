"""The contract of devices: each answers all of it, and nothing else depends on the kind of a device."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import autobatch
from autobatch.device.allocator.tracker import StorageMeter
from autobatch.device.base import Device, Meter
from autobatch.device.cpu import CpuDevice, SilentMeter
from autobatch.device.cuda import CudaDevice
from autobatch.device.cuda_allocator import CudaMeter
from autobatch.device.simulated import SimulatedDevice

PACKAGE = Path(autobatch.__file__).parent
KINDS = {"cuda", "cpu", "sim"}


def members_of(protocol: type) -> set[str]:
    return {name for name in vars(protocol) if not name.startswith("_")}


@pytest.mark.parametrize("device", [CpuDevice, SimulatedDevice, CudaDevice])
def test_every_device_answers_the_whole_contract(device: type) -> None:
    members = members_of(Device)
    assert "default_precision" in members
    assert [name for name in sorted(members) if not hasattr(device, name)] == []
    properties = {name for name in members if isinstance(vars(Device)[name], property)}
    assert {name for name in members if isinstance(getattr(device, name), property)} == properties


@pytest.mark.parametrize("meter", [SilentMeter, StorageMeter, CudaMeter])
def test_every_meter_answers_the_whole_contract(meter: type) -> None:
    assert [name for name in sorted(members_of(Meter)) if not hasattr(meter, name)] == []


def comparisons_with_a_kind(source: str) -> list[int]:
    """Return the lines that compare something called ``kind`` with the name of a kind of device."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            names = {getattr(each, "attr", getattr(each, "id", "")) for each in ast.walk(node)}
            texts = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
            if any("kind" in str(name) for name in names) and KINDS & texts:
                found.append(node.lineno)
    return found


def test_the_search_for_comparisons_finds_them() -> None:
    for source in ('device.kind == "cuda"', 'device_kind not in ("cpu", "sim")', 'if kind == "sim": pass'):
        assert comparisons_with_a_kind(source) == [1]
    assert comparisons_with_a_kind('device.kind == other.kind; kind == "error"') == []


def test_nothing_outside_the_devices_compares_their_kinds() -> None:
    found = {
        str(path.relative_to(PACKAGE)): lines
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] != "device"
        and (lines := comparisons_with_a_kind(path.read_text(encoding="utf-8")))
    }
    assert found == {}
