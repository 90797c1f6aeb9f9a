"""Workloads found by their reference, and errors of the user's code with their line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autobatch.core.errors import InputError
from autobatch.workload.contract import Workload
from autobatch.workload.reference import load_workload
from autobatch.workload.user_code import describe, failed_part, user_frame

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
    assert isinstance(load_workload("mine_mod:make"), Workload)
    assert load_workload("mine_mod:make").name == "make"
    assert isinstance(load_workload("sub/mine_file.py:make"), Workload)
    assert load_workload(f"{tmp_path}/sub/mine_file.py:made") is sys.modules["mine_file"].made
    assert str(tmp_path / "sub") in sys.path


def test_a_file_never_takes_the_name_of_another_module(tmp_path: Path) -> None:
    before = sys.modules["json"] if "json" in sys.modules else __import__("json")
    (tmp_path / "json.py").write_text(MAKES)
    assert isinstance(load_workload("json.py:make"), Workload)
    assert sys.modules["json"] is before


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("train", "'train' is not a workload: write module:function or path/to/file.py:function"),
        ("train.py", "'train.py' is not a workload"),
        (":make", "':make' is not a workload"),
        ("mod:", "'mod:' is not a workload"),
        ("..:make", "'..' is not a module"),
        ("a-b:make", "'a-b' is not a module"),
        ("nowhere_mod:make", "there is no module 'nowhere_mod' to import from "),
        ("nowhere_mod.sub:make", "there is no module 'nowhere_mod.sub'"),
        ("nowhere.py:make", "there is no file nowhere.py .looked from "),
        (".:make", "'.' is not a module"),
        ("found_mod:mak", r"found_mod has no 'mak': did you mean make\?"),
        ("found_mod:workload", r"found_mod has no 'workload': it has make, nothing$"),
        ("found_mod:number", "found_mod:number is an int, not a function or an autobatch.Workload"),
        ("found_mod:nothing", r"found_mod:nothing returned nothing \(None\), not an autobatch.Workload"),
    ],
)
def test_a_reference_to_nothing_names_what_was_searched(reference: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "found_mod.py").write_text(MAKES + "number = 3\ndef nothing(): pass\n")
    with pytest.raises(InputError, match=message):
        load_workload(reference)


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
        load_workload(reference)
    assert user_frame(found.value) == f"{tmp_path / 'broken_mod.py'}:{line}"
    assert failed_part(found.value) is not None
    assert describe(found.value).endswith(f"broken_mod.py:{line})")
    assert kind is ZeroDivisionError or "broken_mod" not in sys.modules


def test_an_error_in_a_parent_package_is_not_a_missing_module(tmp_path: Path) -> None:
    (tmp_path / "broken_pack").mkdir()
    (tmp_path / "broken_pack" / "__init__.py").write_text("import nowhere_at_all\n")
    (tmp_path / "broken_pack" / "train.py").write_text(MAKES)
    with pytest.raises(ModuleNotFoundError, match="nowhere_at_all") as found:
        load_workload("broken_pack.train:make")
    assert user_frame(found.value) == f"{tmp_path / 'broken_pack' / '__init__.py'}:1"
