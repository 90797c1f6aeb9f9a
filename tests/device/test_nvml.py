"""The real pynvml against a stand-in for the driver's library, and the pure resolution of visible cards.

pynvml loads ``libnvidia-ml.so.1`` by name, so each reading runs in a child whose loader finds the stand-in.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autobatch.device.nvml import NvmlGpu, VisibleGpus, visible_gpus

GIB = 1 << 30
ALPHA = "GPU-aaaa1111-0000-0000-0000-000000000000"
BETA = "GPU-bbbb2222-0000-0000-0000-000000000000"
SLICE_1 = "MIG-cccc3333-0000-0000-0000-000000000000"
SLICE_2 = "MIG-dddd4444-0000-0000-0000-000000000000"
CHILD = """
import msgspec, sys
from autobatch.device import nvml
answer = eval(sys.argv[1], vars(nvml))
assert "torch" not in sys.modules
print(msgspec.json.encode([type(answer).__name__, answer]).decode())
"""


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the stand-in library."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler on Linux, to build the stand-in for libnvidia-ml")
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("nvml_stub.c")
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source], check=True)
    return folder


def ask(question: str, *, said: str = "", **environ: str | Path) -> tuple[str, Any]:
    """Evaluate a question to `autobatch.device.nvml` in a child; the answer's type and its JSON.

    ``said`` is what must stand on the child's error stream, nothing as a rule.
    """
    env = {**os.environ, "LD_LIBRARY_PATH": "", **{name: str(value) for name, value in environ.items()}}
    command = [sys.executable, "-W", "error", "-c", CHILD, question]
    child = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (child.returncode, child.stderr) == (0, said)
    kind, answer = json.loads(child.stdout)
    return kind, answer


def read(driver: Path, mode: str, question: str = "read_gpus()") -> tuple[str, Any]:
    return ask(question, LD_LIBRARY_PATH=driver, STUB_MODE=mode)


def test_two_gpus_with_all_figures(driver: Path) -> None:
    kind, reading = read(driver, "")
    assert (kind, reading["driver_version"], reading["notes"]) == ("NvmlReading", "580.65.06", [])
    assert reading["gpus"] == [
        {
            "uuid": ALPHA,
            "name": "Alpha",
            "total_bytes": 24 * GIB,
            "free_bytes": 24 * GIB - 4 * GIB - GIB // 2,
            "used_bytes": 4 * GIB + GIB // 2,
            "driver_reserved_bytes": GIB // 2,
            "pci_bus_id": "00000000:01:00.0",
            "mig_mode": None,
            "mig_uuids": [],
            "driver_version": "580.65.06",
        },
        reading["gpus"][1],
    ]
    second = reading["gpus"][1]
    assert (second["uuid"], second["total_bytes"], second["mig_mode"]) == (BETA, 80 * GIB, False)


def test_gpu_by_uuid(driver: Path) -> None:
    kind, gpu = read(driver, "", f"read_gpu({BETA!r})")
    assert (kind, gpu["uuid"], gpu["free_bytes"]) == ("NvmlGpu", BETA, 80 * GIB - GIB // 2)
    kind, absent = read(driver, "", "read_gpu('GPU-none')")
    assert (kind, absent["reason"]) == ("NvmlAbsent", "no card of that name here")


def test_mig_slice_by_uuid(driver: Path) -> None:
    _, reading = read(driver, "mig")
    assert reading["gpus"][1]["mig_mode"] is True
    assert reading["gpus"][1]["mig_uuids"] == [SLICE_1, SLICE_2]
    _, gpu = read(driver, "mig", f"read_gpu({SLICE_1!r})")
    assert (gpu["total_bytes"], gpu["free_bytes"]) == (10 * GIB, 9 * GIB - GIB // 2)


def test_every_reading_is_closed(driver: Path) -> None:
    for question in (
        "read_gpus()",
        f"read_gpu({ALPHA!r})",
        "read_gpu('GPU-none')",
        f"read_holders({BETA!r})",
    ):
        ask(question, said="open\nclose\n", LD_LIBRARY_PATH=driver, STUB_MODE="loud")


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
        24 * GIB,
    )
    _, reading = read(driver, "latin")
    assert [gpu["name"] for gpu in reading["gpus"]] == [None, "Beta"]


def test_lost_gpu_leaves_a_note(driver: Path) -> None:
    _, reading = read(driver, "lost")
    assert [gpu["uuid"] for gpu in reading["gpus"]] == [ALPHA]
    assert reading["notes"] == ["card 1 does not answer: a card is lost: it no longer answers on the bus"]


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
        {"pid": 4712, "name": "Xorg", "used_bytes": 2 * GIB},
        {"pid": 4711, "name": "python", "used_bytes": GIB},
        {"pid": 4713, "name": None, "used_bytes": 64},
    ]
    assert read(driver, "", f"read_holders({BETA!r})") == ("list", [])


def test_holders_whose_memory_is_not_told(driver: Path) -> None:
    _, holders = read(driver, "private", f"read_holders({ALPHA!r})")
    assert [(holder["pid"], holder["used_bytes"]) for holder in holders] == [
        (4711, None),
        (4712, None),
        (4713, None),
    ]
    kind, absent = read(driver, "noprocesses:3", f"read_holders({ALPHA!r})")
    assert (kind, absent["reason"].split(" (")[0]) == ("NvmlAbsent", "the card does not offer this reading")


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


def test_gpus_resolved_against_the_driver(driver: Path) -> None:
    question = "visible_gpus(dict(CUDA_VISIBLE_DEVICES={!r}), read_gpus().gpus)"
    assert read(driver, "alike", question.format("1,0"))[1]["uuids"] == [BETA, ALPHA]
    assert read(driver, "", question.format("GPU-bbbb"))[1]["uuids"] == [BETA]
    assert read(driver, "mig", question.format(SLICE_2))[1]["uuids"] == [SLICE_2]


def gpu(uuid: str, name: str | None, bus: int, mig_uuids: tuple[str, ...] = ()) -> NvmlGpu:
    return NvmlGpu(
        uuid=uuid,
        name=name,
        total_bytes=GIB,
        free_bytes=GIB,
        used_bytes=0,
        driver_reserved_bytes=None,
        pci_bus_id=f"00000000:{bus:02X}:00.0",
        mig_mode=bool(mig_uuids),
        mig_uuids=list(mig_uuids),
        driver_version=None,
    )


# Out of the order of the bus on purpose.
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
def test_unlike_gpus_are_not_guessed_by_index(
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
    cut = [gpu("GPU-a1", "H", 1), gpu("GPU-b2", "H", 2, ("MIG-c3", "MIG-d4"))]
    for asked in ("1", "GPU-b2", "0,1"):
        found = visible_gpus({"CUDA_VISIBLE_DEVICES": asked}, cut)
        assert (found.uuids, "MIG" in (found.note or "")) == (None, True)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0"}, cut).uuids == ["GPU-a1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "MIG-d4,MIG-c"}, cut).uuids == ["MIG-d4", "MIG-c3"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "MIG-d4,MIG-x"}, cut).uuids == ["MIG-d4"]


def test_no_gpus_at_all() -> None:
    assert visible_gpus({}, []).uuids == []
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0"}, []).uuids == []
