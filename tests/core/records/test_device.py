"""The records of the device: the keys of the JSON that users rely on."""

from __future__ import annotations

from autobatch.core.records.device import DeviceRecord


def test_the_keys_of_device() -> None:
    assert {
        "kind",
        "name",
        "total_bytes",
        "budget_bytes",
        "other_processes_bytes",
    } <= set(DeviceRecord.__struct_fields__)
