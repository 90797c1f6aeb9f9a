"""A stand-in for the driver's NVML library, and the real pynvml asked in a child process.

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

ALPHA = "GPU-aaaa1111-0000-0000-0000-000000000000"
BETA = "GPU-bbbb2222-0000-0000-0000-000000000000"
SLICE_1 = "MIG-cccc3333-0000-0000-0000-000000000000"
SLICE_2 = "MIG-dddd4444-0000-0000-0000-000000000000"
CHILD = """
import msgspec, sys
from autobatch.device import nvml
answers = [eval(question, vars(nvml)) for question in sys.argv[1:]]
assert "torch" not in sys.modules
print(msgspec.json.encode([[type(one).__name__, one] for one in answers]).decode())
"""


def build_driver(folder: Path) -> None:
    """Compile the stand-in into a folder; skip the test without a C compiler."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler on Linux, to build the stand-in for libnvidia-ml")
    source = Path(__file__).with_name("nvml_stub.c")
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source], check=True)


def ask(*questions: str, said: str = "", **environ: str | Path) -> list[tuple[str, Any]]:
    """Evaluate expressions of `autobatch.device.nvml` in a child; return their types and their JSON.

    ``said`` is what the child must write to its error stream.
    """
    env = {**os.environ, "LD_LIBRARY_PATH": "", **{name: str(value) for name, value in environ.items()}}
    command = [sys.executable, "-W", "error", "-c", CHILD, *questions]
    child = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (child.returncode, child.stderr) == (0, said)
    return [(kind, answer) for kind, answer in json.loads(child.stdout)]
