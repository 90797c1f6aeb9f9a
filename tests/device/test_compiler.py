"""Requirements of torch.compile: each is named if it is missing."""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from pathlib import Path

import pytest

from autobatch.device.compiler import missing_on_cpu, missing_on_gpu

HOPPER = (9, 0)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> set[str]:
    """Programs and packages that are there; the test adds to them. There are no headers."""
    there: set[str] = set()
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name in there else None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in there else None)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    return there


def test_on_the_cpu(programs: set[str], tmp_path: Path) -> None:
    assert missing_on_cpu() == "torch.compile needs a C++ compiler on the CPU"
    programs.add("c++")
    assert str(tmp_path / "Python.h") in str(missing_on_cpu())
    (tmp_path / "Python.h").touch()
    assert missing_on_cpu() is None


def test_on_a_gpu(programs: set[str], tmp_path: Path) -> None:
    old = "torch.compile needs a GPU of compute capability 7.0 or later, found 6.1"
    assert missing_on_gpu((6, 1)) == old
    assert missing_on_gpu(HOPPER) == "torch.compile needs triton on a GPU"
    programs.add("triton")
    assert missing_on_gpu(HOPPER) == "torch.compile needs gcc or clang on a GPU"
    programs.add("gcc")
    assert str(tmp_path / "Python.h") in str(missing_on_gpu(HOPPER))
    (tmp_path / "Python.h").touch()
    assert missing_on_gpu(HOPPER) is missing_on_gpu((7, 0)) is None


def test_a_compiler_that_the_environment_names_counts(
    programs: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "Python.h").touch()
    programs |= {"triton", "my-cc"}
    monkeypatch.setenv("CC", "my-cc")
    assert missing_on_gpu(HOPPER) is None
