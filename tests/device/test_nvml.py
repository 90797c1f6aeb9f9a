"""The real pynvml against a stand-in for the driver's library."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from autobatch.core.units import GiB
from autobatch.device import nvml
from tests.support.nvml_driver import ALPHA, BETA, SLICE_1, SLICE_2, ask, build_driver


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the stand-in for the driver's library."""
    folder = tmp_path_factory.mktemp("driver")
    build_driver(folder)
    return folder


def test_the_gpus_and_who_holds_their_memory(driver: Path) -> None:
    questions = (
        "read_gpus()",
        "driver_version()",
        f"read_gpu({BETA!r})",
        f"read_gpu('MIG-none', {BETA!r})",
        "read_gpu('MIG-none', 'GPU-none')",
        f"read_holders({ALPHA!r})",
        f"read_holders({BETA!r})",
    )
    # Each reading opens the driver, and closes it.
    found = ask(*questions, said="open\nclose\n" * 7, LD_LIBRARY_PATH=driver, STUB_MODE="loud")
    (kind, reading), version, beta, second_name, absent, holders, none = found
    assert (kind, reading["driver_version"], reading["notes"]) == ("NvmlReading", "580.65.06", [])
    alpha, other = reading["gpus"]
    assert alpha == {
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
    }
    assert (other["uuid"], other["total_bytes"], other["mig_mode"]) == (BETA, 80 * GiB, False)
    assert version == ("str", "580.65.06")
    assert beta == second_name == ("NvmlGpu", other)
    assert absent == ("NvmlAbsent", {"reason": "no GPU with that UUID"})
    assert holders[1] == [
        {"pid": 4712, "name": "Xorg", "used_bytes": 2 * GiB},
        {"pid": 4711, "name": "python", "used_bytes": GiB},
        {"pid": 4713, "name": None, "used_bytes": 64},
    ]
    assert none == ("list", [])


def asked(driver: Path, mode: str, question: str = "read_gpus()") -> Any:
    ((_, answer),) = ask(question, LD_LIBRARY_PATH=driver, STUB_MODE=mode)
    return answer


def test_a_mig_slice_is_a_gpu_of_its_own(driver: Path) -> None:
    (_, reading), (_, piece) = ask(
        "read_gpus()", f"read_gpu({SLICE_1!r})", LD_LIBRARY_PATH=driver, STUB_MODE="mig"
    )
    assert reading["gpus"][1]["mig_mode"] is True
    assert reading["gpus"][1]["mig_uuids"] == [SLICE_1, SLICE_2]
    assert (piece["total_bytes"], piece["free_bytes"]) == (10 * GiB, 9 * GiB - GiB // 2)


@pytest.mark.parametrize("mode", ["memory:3", "zero"])
def test_memory_that_cannot_be_read_is_none_and_the_gpu_stays(driver: Path, mode: str) -> None:
    gpus = asked(driver, mode)["gpus"]
    figures = {(gpu["total_bytes"], gpu["free_bytes"], gpu["used_bytes"]) for gpu in gpus}
    assert figures == {(None, None, None)}
    assert [gpu["name"] for gpu in gpus] == ["Alpha", "Beta"]


def test_old_driver_odd_name_and_lost_gpu_cost_one_figure_each(driver: Path) -> None:
    old, latin, lost = (asked(driver, mode) for mode in ("old", "latin", "lost"))
    assert old["gpus"][0]["driver_reserved_bytes"] is None
    assert old["gpus"][0]["total_bytes"] == 24 * GiB
    assert [gpu["name"] for gpu in latin["gpus"]] == [None, "Beta"]
    assert [gpu["uuid"] for gpu in lost["gpus"]] == [ALPHA]
    assert lost["notes"] == ["GPU 1 does not answer: a GPU is lost: it no longer answers on the bus"]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (9, "driver is not loaded"),
        (999, "unknown error 999"),
        (20, "NVML error 20: Insufficient Memory"),
        (998, "NVML error 998: stub error"),
    ],
)
def test_errors_of_the_driver_become_a_reason(driver: Path, number: int, words: str) -> None:
    reason = asked(driver, f"init:{number}")["reason"]
    assert words in reason
    assert "\n" not in reason


def test_holders_whose_memory_is_not_reported(driver: Path) -> None:
    holders = asked(driver, "private", f"read_holders({ALPHA!r})")
    assert [(holder["pid"], holder["used_bytes"]) for holder in holders] == [
        (4711, None),
        (4712, None),
        (4713, None),
    ]
    absent = asked(driver, "noprocesses:3", f"read_holders({ALPHA!r})")
    assert absent["reason"].startswith("the GPU does not offer this reading")


def test_a_library_that_is_absent_is_a_reason(tmp_path: Path) -> None:
    # A file that is no library: also on a machine with a driver, the loader stops at it.
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"not a library")
    questions = ("read_gpus()", f"read_gpu({ALPHA!r})", f"read_holders({ALPHA!r})", "driver_version()")
    *found, version = ask(*questions, LD_LIBRARY_PATH=tmp_path)
    assert {(kind, "libnvidia-ml" in absent["reason"]) for kind, absent in found} == {("NvmlAbsent", True)}
    assert version == ("NoneType", None)


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
    ((kind, absent),) = ask("read_gpus()", PYTHONPATH=path)
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
