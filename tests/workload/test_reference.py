"""Workloads found by their reference, and errors of the user's code with their line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from autobatch import InputError, Workload
from autobatch.workload.reference import check_reference, find_workload, shared_model_notes
from autobatch.workload.user_code import describe
from tests.support.training import make_workload

MAKES = (
    "from autobatch import Workload\ndef make():\n    return Workload(model=max, train_data=[1], loss=max, "
)
MAKES += "optimizer=max, learning_rate=1)\n"


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


def test_a_module_and_a_file_are_found(tmp_path: Path) -> None:
    (tmp_path / "mine_mod.py").write_text(MAKES)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine_file.py").write_text(MAKES + "made = make()\n")
    assert isinstance(find_workload("mine_mod:make"), Workload)
    assert find_workload("mine_mod:make").name == "make"
    assert isinstance(find_workload("sub/mine_file.py:make"), Workload)
    assert find_workload(f"{tmp_path}/sub/mine_file.py:made") is sys.modules["mine_file"].made
    assert str(tmp_path / "sub") in sys.path


def test_a_file_never_takes_the_name_of_another_module(tmp_path: Path) -> None:
    before = sys.modules["json"] if "json" in sys.modules else __import__("json")
    (tmp_path / "json.py").write_text(MAKES)
    assert isinstance(find_workload("json.py:make"), Workload)
    assert sys.modules["json"] is before


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (
            "found_mod",
            "found_mod has no function named workload, and it has make, nothing: write found_mod:FUNCTION",
        ),
        ("two_mod", "two_mod has no function named workload, and it has one, two"),
        (":make", "':make' is not a workload"),
        ("mod:", "'mod:' is not a workload"),
        ("..:make", "'..' is not a module"),
        ("a-b:make", "'a-b' is not a module"),
        ("nowhere_mod.sub:make", "there is no module 'nowhere_mod.sub' to import from "),
        ("nowhere.py:make", "there is no file nowhere.py .looked from "),
        ("found_mod:mak", r"found_mod has no 'mak': did you mean make\?"),
        ("found_mod:workload", r"found_mod has no 'workload': it has make, nothing$"),
        ("found_mod:number", "found_mod:number is an int, not a function or an autobatch.Workload"),
        ("found_mod:nothing", r"found_mod:nothing returned nothing \(None\), not an autobatch.Workload"),
        (3, "must be an autobatch.Workload, a function .* found an int$"),
        (dict, "dict returned a dict, not"),
    ],
)
def test_a_reference_to_nothing_names_what_was_searched(reference: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "found_mod.py").write_text(MAKES + "number = 3\ndef nothing(): pass\n")
    one = MAKES.replace("def make()", "def one() -> Workload")
    (tmp_path / "two_mod.py").write_text(one + "def two() -> Workload: return one()\n")
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
@pytest.mark.parametrize("reference", ["broken_mod:make", "broken_mod.py:make"])
def test_an_error_of_the_users_code_names_its_line(
    content: str, line: int, kind: type[BaseException], reference: str, tmp_path: Path
) -> None:
    (tmp_path / "broken_mod.py").write_text(content)
    with pytest.raises(kind) as found:
        find_workload(reference)
    described = describe(found.value)
    assert described.startswith("the workload's ")
    assert described.endswith(f" ({tmp_path / 'broken_mod.py'}:{line})")
    assert kind is ZeroDivisionError or "broken_mod" not in sys.modules


def test_an_error_in_a_parent_package_is_not_a_missing_module(tmp_path: Path) -> None:
    (tmp_path / "broken_pack").mkdir()
    (tmp_path / "broken_pack" / "__init__.py").write_text("import nowhere_at_all\n")
    (tmp_path / "broken_pack" / "train.py").write_text(MAKES)
    with pytest.raises(ModuleNotFoundError, match="nowhere_at_all") as found:
        find_workload("broken_pack.train:make")
    assert describe(found.value).endswith(f" ({tmp_path / 'broken_pack' / '__init__.py'}:1)")


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (MAKES.replace("def make", "def helper") + "def workload(): return helper()\n", "lone_file"),
        (MAKES.replace("def make()", "def small() -> Workload") + "def helper(): pass\n", "small"),
        ("from __future__ import annotations\n" + MAKES.replace("make()", "big() -> Workload"), "big"),
    ],
)
def test_a_file_alone_is_enough_if_one_function_can_be_meant(content: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "lone_file.py").write_text(content)
    found = find_workload("lone_file.py")
    assert found.name == name
    assert find_workload("lone_file").name == name


def test_a_reference_is_checked_without_running_code(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    for name in ("file.py", "package/__init__.py", "package/inner.py"):
        (tmp_path / name).write_text("raise SystemExit")
    assert check_reference("file.py") == ("file.py", "")
    assert check_reference("package.inner:make") == ("package.inner", "make")
    assert check_reference("sys:make") == ("sys", "make")
    assert "package" not in sys.modules


@pytest.mark.program
def test_a_wrong_reference_is_refused_before_torch_is_imported() -> None:
    code = """
import sys
from autobatch.core.errors import InputError
from autobatch.workload.reference import check_reference
try:
    check_reference("nowhere.py")
except InputError:
    assert not {"torch", "numpy"} & set(sys.modules)
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "refused\n", done.stderr


MODEL = nn.Linear(2, 2)


def test_a_model_that_exists_beside_its_function_is_named() -> None:
    model, width = nn.Linear(2, 2), 3
    holder = SimpleNamespace(net=model)
    for function, name in (
        (lambda: model, "(model)"),
        (lambda: holder.net, "(holder.net)"),
        (lambda: MODEL, "(MODEL)"),
        (lambda: nn.Linear(width, width), None),
        (partial(nn.Linear, 2, 2), None),
        (type("Net", (nn.Linear,), {"__init__": lambda self: nn.Linear.__init__(self, 1, 1)}), None),
    ):
        workload = make_workload(model=function)
        notes = shared_model_notes(workload, workload.model())
        assert [name in note for note in notes] == ([] if name is None else [True])
