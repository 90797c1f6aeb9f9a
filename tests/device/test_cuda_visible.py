"""``CUDA_VISIBLE_DEVICES`` resolved as CUDA does."""

from __future__ import annotations

from pathlib import Path

import pytest

from autobatch.core.units import GiB
from autobatch.device.cuda_visible import VisibleGpus, visible_gpus
from autobatch.device.nvml import NvmlGpu
from tests.support.nvml_driver import ALPHA, BETA, SLICE_2, read


def test_gpus_resolved_against_the_driver(driver: Path) -> None:
    question = "visible_gpus(dict(CUDA_VISIBLE_DEVICES={!r}), read_gpus().gpus)"
    assert read(driver, "alike", question.format("1,0"))[1]["uuids"] == [BETA, ALPHA]
    assert read(driver, "", question.format("GPU-bbbb"))[1]["uuids"] == [BETA]
    assert read(driver, "mig", question.format(SLICE_2))[1]["uuids"] == [SLICE_2]


def gpu(uuid: str, name: str | None, bus: int, mig_uuids: tuple[str, ...] = ()) -> NvmlGpu:
    return NvmlGpu(
        uuid=uuid,
        name=name,
        total_bytes=GiB,
        free_bytes=GiB,
        used_bytes=0,
        driver_reserved_bytes=None,
        pci_bus_id=f"00000000:{bus:02X}:00.0",
        mig_mode=bool(mig_uuids),
        mig_uuids=list(mig_uuids),
        driver_version=None,
    )


# Not in the order of the bus, on purpose.
ALIKE = [gpu("GPU-b2", "H", 2), gpu("GPU-a1", "H", 1), gpu("GPU-b3", "H", 3)]
ONE, TWO, THREE = "GPU-a1", "GPU-b2", "GPU-b3"


@pytest.mark.parametrize(
    ("asked", "uuids"),
    [
        (None, [ONE, TWO, THREE]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0", [ONE]),
        ("2,0", [THREE, ONE]),
        (" 1 , 2", [TWO, THREE]),
        ("1gpu2,+2", [TWO, THREE]),
        ("0,-1,2", [ONE]),
        ("0,7,1", [ONE]),
        ("0,x,1", [ONE]),
        ("0,,1", [ONE]),
        ("0,GPU-b2", [ONE]),
        ("1,1", []),
        ("GPU-b3,GPU-a", [THREE, ONE]),
        ("GPU-b", []),
        ("GPU-a1,GPU-b,GPU-b2", [ONE]),
        ("GPU-a1,0", [ONE]),
        ("GPU-a1,GPU-zz", [ONE]),
        ("GPU-a1,GPU-a", []),
        ("gpu-a1", []),
        ("MIG-hidden", ["MIG-hidden"]),
        ("MIG-GPU-a1/1/0,MIG-GPU-a1/2/0,GPU-b2", ["MIG-GPU-a1/1/0", "MIG-GPU-a1/2/0"]),
    ],
)
def test_visible_gpus_as_cuda_reads_it(asked: str | None, uuids: list[str]) -> None:
    environ = {} if asked is None else {"CUDA_VISIBLE_DEVICES": asked}
    for order in ({}, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}):
        assert visible_gpus({**environ, **order}, ALIKE).uuids == uuids


@pytest.mark.parametrize("names", [("Alpha", "Beta"), (None, None), ("Alpha", None)])
@pytest.mark.parametrize("asked", [{}, {"CUDA_VISIBLE_DEVICES": "0"}])
def test_different_gpus_are_not_guessed_by_index(
    names: tuple[str | None, str | None], asked: dict[str, str]
) -> None:
    gpus = [gpu("GPU-a1", names[0], 1), gpu("GPU-b2", names[1], 2)]
    unknown = visible_gpus(asked, gpus)
    assert unknown.uuids is None
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in (unknown.note or "")
    by_bus = visible_gpus({**asked, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, gpus)
    assert by_bus == VisibleGpus(uuids=["GPU-a1"] if asked else ["GPU-a1", "GPU-b2"])
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-b"}, gpus).uuids == ["GPU-b2"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, gpus).uuids == []


def test_slices_must_be_named() -> None:
    gpus = [gpu("GPU-a1", "H", 1), gpu("GPU-b2", "H", 2, ("MIG-c3", "MIG-d4"))]
    for asked in ("1", "GPU-b2", "0,1"):
        found = visible_gpus({"CUDA_VISIBLE_DEVICES": asked}, gpus)
        assert (found.uuids, "MIG" in (found.note or "")) == (None, True)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0"}, gpus).uuids == ["GPU-a1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "MIG-d4,MIG-c"}, gpus).uuids == ["MIG-d4", "MIG-c3"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "MIG-d4,MIG-x"}, gpus).uuids == ["MIG-d4"]


def test_no_gpus_at_all() -> None:
    assert visible_gpus({}, []).uuids == []
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0"}, []).uuids == []
