"""The real pynvml against a stand-in for the driver's library."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest

from autobatch.core.units import GiB
from autobatch.device import nvml
from tests.support.nvml_driver import ALPHA, BETA, SLICE_1, SLICE_2, ask, read


def test_two_gpus_with_all_figures(driver: Path) -> None:
    kind, reading = read(driver, "")
    assert (kind, reading["driver_version"], reading["notes"]) == ("NvmlReading", "580.65.06", [])
    assert reading["gpus"] == [
        {
            "uuid": ALPHA,
            "name": "Alpha",
            "total_bytes": 24 * GiB,
            "free_bytes": 24 * GiB - 4 * GiB - GiB // 2,
            "used_bytes": 4 * GiB + GiB // 2,
            "driver_reserved_bytes": GiB // 2,
            "pci_bus_id": "00000000:01:00.0",
            "mig_mode": None,
            "mig_uuids": [],
            "driver_version": "580.65.06",
        },
        reading["gpus"][1],
    ]
    second = reading["gpus"][1]
    assert (second["uuid"], second["total_bytes"], second["mig_mode"]) == (BETA, 80 * GiB, False)


def test_the_version_of_the_driver(driver: Path) -> None:
    assert read(driver, "", "driver_version()") == ("str", "580.65.06")


def test_gpu_by_uuid(driver: Path) -> None:
    kind, gpu = read(driver, "", f"read_gpu({BETA!r})")
    assert (kind, gpu["uuid"], gpu["free_bytes"]) == ("NvmlGpu", BETA, 80 * GiB - GiB // 2)
    kind, absent = read(driver, "", "read_gpu('GPU-none')")
    assert (kind, absent["reason"]) == ("NvmlAbsent", "no GPU with that UUID")


def test_the_first_uuid_that_exists_is_read_at_one_opening_of_the_driver(driver: Path) -> None:
    kind, gpu = read(driver, "", f"read_gpu('MIG-none', {BETA!r})")
    assert (kind, gpu["uuid"]) == ("NvmlGpu", BETA)
    kind, absent = read(driver, "", "read_gpu('MIG-none', 'GPU-none')")
    assert (kind, absent["reason"]) == ("NvmlAbsent", "no GPU with that UUID")


def test_mig_slice_by_uuid(driver: Path) -> None:
    _, reading = read(driver, "mig")
    assert reading["gpus"][1]["mig_mode"] is True
    assert reading["gpus"][1]["mig_uuids"] == [SLICE_1, SLICE_2]
    _, gpu = read(driver, "mig", f"read_gpu({SLICE_1!r})")
    assert (gpu["total_bytes"], gpu["free_bytes"]) == (10 * GiB, 9 * GiB - GiB // 2)


def test_every_reading_is_closed(driver: Path) -> None:
    """The stand-in says when it is opened and closed, and `ask` asserts that nothing else is said."""
    for question, answer in (
        ("read_gpus()", "NvmlReading"),
        (f"read_gpu({ALPHA!r})", "NvmlGpu"),
        ("read_gpu('GPU-none')", "NvmlAbsent"),
        (f"read_holders({BETA!r})", "list"),
    ):
        kind, _ = ask(question, said="open\nclose\n", LD_LIBRARY_PATH=driver, STUB_MODE="loud")
        assert kind == answer


@pytest.mark.parametrize("mode", ["memory:3", "memory:4", "zero"])
def test_memory_that_cannot_be_read_is_none_and_the_gpu_stays(driver: Path, mode: str) -> None:
    _, reading = read(driver, mode)
    figures = {(gpu["total_bytes"], gpu["free_bytes"], gpu["used_bytes"]) for gpu in reading["gpus"]}
    assert figures == {(None, None, None)}
    assert [gpu["name"] for gpu in reading["gpus"]] == ["Alpha", "Beta"]


def test_old_driver_and_odd_name_cost_one_figure_each(driver: Path) -> None:
    _, reading = read(driver, "old")
    assert (reading["gpus"][0]["driver_reserved_bytes"], reading["gpus"][0]["total_bytes"]) == (
        None,
        24 * GiB,
    )
    _, reading = read(driver, "latin")
    assert [gpu["name"] for gpu in reading["gpus"]] == [None, "Beta"]


def test_lost_gpu_leaves_a_note(driver: Path) -> None:
    _, reading = read(driver, "lost")
    assert [gpu["uuid"] for gpu in reading["gpus"]] == [ALPHA]
    assert reading["notes"] == ["GPU 1 does not answer: a GPU is lost: it no longer answers on the bus"]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (4, "no permission"),
        (9, "driver is not loaded"),
        (15, "lost"),
        (18, "different versions"),
        (999, "unknown error 999"),
        (20, "NVML error 20: Insufficient Memory"),
        (998, "NVML error 998: stub error"),
    ],
)
def test_errors_of_the_driver_become_a_reason(driver: Path, number: int, words: str) -> None:
    kind, absent = read(driver, f"init:{number}")
    assert kind == "NvmlAbsent"
    assert words in absent["reason"]
    assert "\n" not in absent["reason"]


def test_holders_largest_first_and_counted_once(driver: Path) -> None:
    kind, holders = read(driver, "", f"read_holders({ALPHA!r})")
    assert kind == "list"
    assert holders == [
        {"pid": 4712, "name": "Xorg", "used_bytes": 2 * GiB},
        {"pid": 4711, "name": "python", "used_bytes": GiB},
        {"pid": 4713, "name": None, "used_bytes": 64},
    ]
    assert read(driver, "", f"read_holders({BETA!r})") == ("list", [])


def test_holders_whose_memory_is_not_reported(driver: Path) -> None:
    _, holders = read(driver, "private", f"read_holders({ALPHA!r})")
    assert [(holder["pid"], holder["used_bytes"]) for holder in holders] == [
        (4711, None),
        (4712, None),
        (4713, None),
    ]
    kind, absent = read(driver, "noprocesses:3", f"read_holders({ALPHA!r})")
    assert (kind, absent["reason"].split(" (")[0]) == ("NvmlAbsent", "the GPU does not offer this reading")


@pytest.mark.parametrize("question", ["read_gpus()", f"read_gpu({ALPHA!r})", f"read_holders({ALPHA!r})"])
def test_absent_library(question: str, tmp_path: Path) -> None:
    # A file that is no library: also on a machine with a driver, the loader stops at it.
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"not a library")
    kind, absent = ask(question, LD_LIBRARY_PATH=tmp_path)
    assert (kind, "libnvidia-ml" in absent["reason"]) == ("NvmlAbsent", True)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"pynvml/__init__.py": "", "pynvml-11.5.3.dist-info/METADATA": "Name: pynvml"},
            "pip uninstall pynvml",
        ),
        ({"pynvml.py": "VERSION = 1"}, "not the one of nvidia-ml-py"),
        ({"pynvml.py": "raise OSError('broken')"}, "cannot be imported (OSError)"),
        ({"pynvml.py": "raise ModuleNotFoundError('gone')"}, "pip install nvidia-ml-py"),
    ],
)
def test_wrong_module_of_that_name(tmp_path: Path, files: dict[str, str], words: str) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    path = os.pathsep.join([str(tmp_path), *sys.path[1:]])
    kind, absent = ask("read_gpus()", PYTHONPATH=path)
    assert kind == "NvmlAbsent"
    assert words in absent["reason"]


FAKE = """
class NVMLError(Exception): value = 3
class NVMLLibraryMismatchError(Exception): pass
def nvmlInit(): INIT
def nvmlShutdown(): raise TypeError("off")
def nvmlDeviceGetCount(): COUNT
def nvmlDeviceGetHandleByIndex(index): raise AttributeError("lost\\x1b")
"""


@pytest.mark.parametrize(
    ("init", "count", "kind", "words"),
    [
        ("raise TypeError('odd\\x1b')", "return 1", "NvmlAbsent", r"TypeError: odd\x1b"),
        ("raise KeyError(3)", "return 1", "NvmlAbsent", "KeyError: 3"),
        ("pass", "raise AttributeError('old')", "NvmlAbsent", "AttributeError: old"),
        ("pass", "return None", "NvmlAbsent", "TypeError: 'NoneType'"),
        ("pass", "return 1", "NvmlReading", r"GPU 0 does not answer: AttributeError: lost\x1b"),
    ],
)
def test_bindings_that_raise_anything_are_a_reason(
    init: str, count: str, kind: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("pynvml")
    exec(FAKE.replace("INIT", init).replace("COUNT", count), vars(module))
    monkeypatch.setitem(sys.modules, "pynvml", module)
    found = nvml.read_gpus()
    assert type(found).__name__ == kind
    assert words in (found.reason if isinstance(found, nvml.NvmlAbsent) else found.notes[0])
