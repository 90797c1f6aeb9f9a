"""The real pynvml against a stand-in for the driver's library.

pynvml loads ``libnvidia-ml.so.1`` by name, so readings run in a child whose loader finds the stand-in.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from autobatch.core.units import GiB
from autobatch.device import nvml

ALPHA = "GPU-aaaa1111-0000-0000-0000-000000000000"
BETA = "GPU-bbbb2222-0000-0000-0000-000000000000"
SLICE_1 = "MIG-cccc3333-0000-0000-0000-000000000000"
SLICE_2 = "MIG-dddd4444-0000-0000-0000-000000000000"
CHILD = """
import msgspec, os, sys
from autobatch.device import nvml
answers = []
for asked in sys.argv[1:]:
    os.environ["STUB_MODE"], question = asked.split("|")
    answers.append(eval(question, vars(nvml)))
assert "torch" not in sys.modules
print(msgspec.json.encode([[type(one).__name__, one] for one in answers]).decode())
"""


def ask(*asked: str, said: str = "", **environ: str | Path) -> list[tuple[str, Any]]:
    """Evaluate expressions in a child, each after a mode of the driver; return their types and their JSON.

    ``said`` is what the child must write to its error stream.
    """
    env = {**os.environ, "LD_LIBRARY_PATH": "", **{name: str(value) for name, value in environ.items()}}
    command = [sys.executable, "-W", "error", "-c", CHILD, *asked]
    child = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (child.returncode, child.stderr) == (0, said)
    return [(kind, answer) for kind, answer in json.loads(child.stdout)]


LOUD = (
    "read_gpus()",
    "driver_version()",
    f"read_gpu({BETA!r})",
    f"read_gpu('MIG-none', {BETA!r})",
    "read_gpu('MIG-none', 'GPU-none')",
    f"read_holders({ALPHA!r})",
    f"read_holders({BETA!r})",
)
OTHERS = (
    f"mig|read_gpu({SLICE_1!r})",
    f"private|read_holders({ALPHA!r})",
    f"noprocesses:3|read_holders({ALPHA!r})",
    *(
        f"{mode}|read_gpus()"
        for mode in ("mig", "memory:3", "zero", "old", "latin", "lost", "init:9", "init:999", "init:998")
    ),
)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Any]]:
    """The answers of the stand-in, which a C compiler makes."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler on Linux, to build the stand-in for libnvidia-ml")
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).parents[1] / "support" / "nvml_stub.c"
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source], check=True)
    asked = [*(f"loud|{question}" for question in LOUD), *OTHERS]
    # Each reading opens the driver, and closes it.
    found = ask(*asked, said="open\nclose\n" * len(LOUD), LD_LIBRARY_PATH=folder)
    return dict(zip(asked, found, strict=True))


def test_the_gpus_and_who_holds_their_memory(answers: dict[str, Any]) -> None:
    found = [answers[f"loud|{question}"] for question in LOUD]
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


def test_a_mig_slice_is_a_gpu_of_its_own(answers: dict[str, Any]) -> None:
    (_, reading), (_, piece) = answers["mig|read_gpus()"], answers[f"mig|read_gpu({SLICE_1!r})"]
    assert reading["gpus"][1]["mig_mode"] is True
    assert reading["gpus"][1]["mig_uuids"] == [SLICE_1, SLICE_2]
    assert (piece["total_bytes"], piece["free_bytes"]) == (10 * GiB, 9 * GiB - GiB // 2)


def test_figures_that_cannot_be_read_are_none_and_the_gpu_stays(answers: dict[str, Any]) -> None:
    def read(mode: str) -> Any:
        return answers[f"{mode}|read_gpus()"][1]

    for mode in ("memory:3", "zero"):
        gpus = read(mode)["gpus"]
        assert {gpu[f"{kind}_bytes"] for gpu in gpus for kind in ("total", "free", "used")} == {None}
        assert [gpu["name"] for gpu in gpus] == ["Alpha", "Beta"]
    old, latin, lost = map(read, ("old", "latin", "lost"))
    assert old["gpus"][0]["driver_reserved_bytes"] is None
    assert old["gpus"][0]["total_bytes"] == 24 * GiB
    assert [gpu["name"] for gpu in latin["gpus"]] == [None, "Beta"]
    assert [gpu["uuid"] for gpu in lost["gpus"]] == [ALPHA]
    assert lost["notes"] == ["GPU 1 does not answer: a GPU is lost: it no longer answers on the bus"]


def test_errors_of_the_driver_become_a_reason(answers: dict[str, Any]) -> None:
    reasons = [answers[f"init:{number}|read_gpus()"][1]["reason"] for number in (9, 999, 998)]
    assert "driver is not loaded" in reasons[0]
    assert "unknown error 999" in reasons[1]
    assert reasons[2] == "NVML error 998: stub error"


def test_holders_whose_memory_is_not_reported(answers: dict[str, Any]) -> None:
    holders = answers[f"private|read_holders({ALPHA!r})"][1]
    assert [(one["pid"], one["used_bytes"]) for one in holders] == [(pid, None) for pid in (4711, 4712, 4713)]
    absent = answers[f"noprocesses:3|read_holders({ALPHA!r})"][1]
    assert absent["reason"].startswith("the GPU does not offer this reading")


def test_a_library_that_is_absent_is_a_reason(tmp_path: Path) -> None:
    # A file that is no library: also on a machine with a driver, the loader stops at it.
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"not a library")
    questions = ("read_gpus()", f"read_gpu({ALPHA!r})", f"read_holders({ALPHA!r})", "driver_version()")
    *found, version = ask(*(f"|{one}" for one in questions), LD_LIBRARY_PATH=tmp_path)
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
    ((kind, absent),) = ask("|read_gpus()", PYTHONPATH=path)
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
