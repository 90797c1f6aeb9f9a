"""NVML through the real bindings, over a library of the driver that a C compiler makes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autobatch.core.units import GiB

ALPHA = "aaaa1111-0000-0000-0000-000000000000"
BETA = "bbbb2222-0000-0000-0000-000000000000"
SLICE = "cccc3333-0000-0000-0000-000000000000"
CHILD = """
import msgspec, os, sys
from autobatch.device import nvml
answers = []
for asked in sys.argv[1:]:
    os.environ["STUB_MODE"], question = asked.split("|")
    answers.append(eval(question, vars(nvml)))
assert "torch" not in sys.modules
print(msgspec.json.encode(answers).decode())
"""
ASKED = (
    f"loud|read_gpu({BETA!r})",
    "|read_gpus()",
    "|read_gpu('none')",
    f"mig|read_gpu({SLICE!r})",
    f"mig|read_gpu({BETA!r})",
    f"private|read_gpu({ALPHA!r})",
    f"noprocesses:3|read_gpu({ALPHA!r})",
    *(f"{mode}|read_gpus()" for mode in ("memory:3", "zero", "old", "latin", "lost", "init:9")),
)


def ask(*asked: str, said: str = "", **environ: str | Path) -> list[Any]:
    """Evaluate expressions in a child, each after a mode of the driver. Expect what it writes as errors."""
    env = {**os.environ, "LD_LIBRARY_PATH": "", **{name: str(value) for name, value in environ.items()}}
    command = [sys.executable, "-W", "error", "-c", CHILD, *asked]
    child = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (child.returncode, child.stderr) == (0, said)
    return list(json.loads(child.stdout))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answers of the stand-in."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler on Linux, to build the stand-in for libnvidia-ml")
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).parents[1] / "support" / "nvml_stub.c"
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source], check=True)
    found = ask(*ASKED, said="open\nclose\n", LD_LIBRARY_PATH=folder)
    return dict(zip(ASKED, found, strict=True))


def test_the_gpus_and_who_holds_their_memory(answers: dict[str, Any]) -> None:
    alpha, beta = answers["|read_gpus()"]
    assert alpha == {
        "uuid": f"GPU-{ALPHA}",
        "name": "Alpha",
        "free_bytes": 24 * GiB - 4 * GiB - GiB // 2,
        "used_bytes": 4 * GiB,
        "holders": [
            {"pid": 4712, "name": "Xorg", "used_bytes": 2 * GiB},
            {"pid": 4711, "name": "python", "used_bytes": GiB},
            {"pid": 4713, "name": None, "used_bytes": 64},
        ],
    }
    assert beta["holders"] == []
    assert answers[f"loud|read_gpu({BETA!r})"] == beta
    assert "Not Found" in answers["|read_gpu('none')"]["reason"]


def test_a_mig_slice_is_a_gpu_of_its_own_and_figures_that_cannot_be_read_are_none(
    answers: dict[str, Any],
) -> None:
    part = answers[f"mig|read_gpu({SLICE!r})"]
    assert (part["used_bytes"], part["free_bytes"]) == (GiB, 9 * GiB - GiB // 2)
    assert "split by MIG" in answers[f"mig|read_gpu({BETA!r})"]["reason"]
    for mode in ("memory:3", "zero", "old"):
        gpus = answers[f"{mode}|read_gpus()"]
        assert [(gpu["name"], gpu["free_bytes"]) for gpu in gpus] == [("Alpha", None), ("Beta", None)]
    assert [gpu["name"] for gpu in answers["latin|read_gpus()"]] == [None, "Beta"]
    private = answers[f"private|read_gpu({ALPHA!r})"]["holders"]
    assert [holder["used_bytes"] for holder in private] == [None] * 3
    assert answers[f"noprocesses:3|read_gpu({ALPHA!r})"]["holders"] == []


def test_an_error_of_the_driver_becomes_a_reason(answers: dict[str, Any], tmp_path: Path) -> None:
    assert "Driver Not Loaded" in answers["init:9|read_gpus()"]["reason"]
    assert "lost" in answers["lost|read_gpus()"]["reason"]
    # A file that is no library: also on a machine with a driver, the loader stops at it.
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"not a library")
    (absent,) = ask("|read_gpus()", LD_LIBRARY_PATH=tmp_path)
    assert "Library Not Found" in absent["reason"]
