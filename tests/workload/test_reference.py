"""Workloads found by their reference, and errors of the user's code with their line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from autobatch import InputError
from autobatch.workload.user_code import describe, find_workload

MAKES = (
    "from autobatch import Workload\ndef make():\n    return Workload(model=max, train_data=[1], loss=max, "
    "optimizer=max, learning_rate=1)\n"
)


@pytest.fixture(autouse=True)
def forget_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_a_module_and_a_file_are_found_and_take_the_name_of_no_other_module(tmp_path: Path) -> None:
    before = sys.modules["json"] if "json" in sys.modules else __import__("json")
    (tmp_path / "sub").mkdir()
    for name in ("mine_mod.py", "sub/mine_file.py", "json.py"):
        (tmp_path / name).write_text(MAKES + "made = make()\n")
    for reference in ("mine_mod:make", "sub/mine_file.py:make", "json.py:make"):
        assert find_workload(reference).name == "make"
    assert find_workload(f"{tmp_path}/sub/mine_file.py:made").name == "made"
    assert str(tmp_path / "sub") in sys.path
    assert sys.modules["json"] is before


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("found_mod", "has no function 'workload', found make, nothing: write found_mod:FUNCTION"),
        *[(wrong, f"'{wrong}' is not a workload") for wrong in (":make", "mod:", "..:make", "a-b:make")],
        ("nowhere_mod.sub:make", "there is no module 'nowhere_mod.sub' to import from "),
        ("nowhere.py:make", "there is no file nowhere.py .looked from "),
        ("found_mod:mak", "has no function 'mak', found make, nothing"),
        ("found_mod:number", "number in found_mod must be an autobatch.Workload, .* found an int"),
        ("found_mod:nothing", r"nothing in found_mod returned nothing \(None\), not an autobatch.Workload"),
        (3, "the workload must be an autobatch.Workload, .* found an int"),
        (dict, "dict returned a dict, not"),
        (nn.Linear(1, 1), "is a model: give a function"),
    ],
)
def test_a_reference_to_nothing_names_what_was_searched(reference: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "found_mod.py").write_text(
        MAKES + "number = 3\nfrom shutil import copy\ndef nothing(): pass\n"
    )
    with pytest.raises(InputError, match=message):
        find_workload(reference)


@pytest.mark.parametrize(
    ("content", "line", "kind"),
    [
        ("x = 1\nraise ValueError('odd')", 2, ValueError),
        ("import nowhere_at_all", 1, ModuleNotFoundError),
        ("def make(:\n    pass", 1, SyntaxError),
        (f"{MAKES}\ndef make():\n    return 1 / 0", 6, ZeroDivisionError),
        ("import sys\nsys.exit(4)", 2, SystemExit),
    ],
)
@pytest.mark.parametrize("reference", ["odd_module:make", "odd_module.py:make"])
def test_an_error_of_the_users_code_names_its_line(
    content: str, line: int, kind: type[BaseException], reference: str, tmp_path: Path
) -> None:
    (tmp_path / "odd_module.py").write_text(content)
    with pytest.raises(kind) as caught:
        find_workload(reference)
    described = describe(caught.value)
    assert described.startswith("the workload's ")
    assert described.endswith(f" ({tmp_path / 'odd_module.py'}:{line})")
    assert kind is ZeroDivisionError or "odd_module" not in sys.modules


def test_a_file_alone_is_enough_if_its_function_is_called_workload(tmp_path: Path) -> None:
    (tmp_path / "lone_file.py").write_text(MAKES.replace("make", "workload"))
    assert find_workload("lone_file.py").name == find_workload("lone_file").name == "lone_file"


@pytest.mark.program
def test_a_reference_is_checked_without_running_code_or_importing_torch(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    for name in ("file.py", "package/__init__.py", "package/inner.py"):
        (tmp_path / name).write_text("raise SystemExit")
    code = """
import sys
from autobatch.core.errors import InputError
from autobatch.workload.user_code import check_reference
found = [check_reference(reference) for reference in ("file.py", "package.inner:make", "sys:make")]
assert found == [("file.py", ""), ("package.inner", "make"), ("sys", "make")]
try:
    check_reference("nowhere.py")
except InputError:
    assert not {"torch", "numpy", "package"} & set(sys.modules)
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "refused\n", done.stderr
