"""What the user hands over: checked when it is made, found by name, blamed by file and line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autobatch.core.errors import InputError
from autobatch.workload.contract import Workload
from autobatch.workload.reference import load_workload
from autobatch.workload.user_code import (
    describe,
    failed_part,
    mark_user_error,
    remarks_on,
    user_code,
    user_frame,
)

FIELDS: dict[str, Any] = {
    "model": lambda: None,
    "train_data": [1, 2],
    "loss": lambda model, batch: None,
    "optimizer": lambda params, learning_rate: None,
    "learning_rate": 0.1,
}
MAKES = (
    "from autobatch import Workload\ndef make():\n    return Workload(model=max, train_data=[1], loss=max, "
)
MAKES += "optimizer=max, learning_rate=1)\n"


@pytest.fixture(autouse=True)
def modules_are_forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("model", 3, r"Workload\(model=…\) must be a function, found a int"),
        ("loss", None, r"Workload\(loss=…\) must be a function, found nothing"),
        ("optimizer", "adam", r"Workload\(optimizer=…\) must be a function, found a str"),
        ("collate", 3, r"Workload\(collate=…\) must be a function or None, found a int"),
        ("schedule", [], r"Workload\(schedule=…\) must be a function or None, found a list"),
        ("metrics", 3, r"Workload\(metrics=…\) must be a function or None"),
        ("size_of", 3, r"Workload\(size_of=…\) must be a function or None"),
        ("train_data", iter([1]), r"must have __getitem__ and __len__ \(map-style\), found a list_iterator"),
        ("train_data", None, r"Workload\(train_data=…\) must have .* found nothing"),
        ("train_data", [], r"Workload\(train_data=…\) has 0 samples: at least 1 is needed"),
        ("validation_data", [], r"Workload\(validation_data=…\) has 0 samples: at least 1 is needed"),
        ("validation_data", 3, r"Workload\(validation_data=…\) must have __getitem__"),
        ("learning_rate", 0, "must be a finite number over 0, found 0"),
        ("learning_rate", "1e-3", "must be a finite number over 0, found '1e-3'"),
        ("learning_rate", True, "must be a finite number over 0, found True"),
        ("learning_rate", float("nan"), "must be a finite number over 0, found nan"),
        ("learning_rate", float("inf"), "must be a finite number over 0, found inf"),
        ("base_batch", 0, r"Workload\(base_batch=…\) must be 1 or more, or None, found 0"),
        ("base_batch", 2.5, r"Workload\(base_batch=…\) must be 1 or more, or None, found 2.5"),
        ("base_batch", True, r"Workload\(base_batch=…\) must be 1 or more, or None, found True"),
        ("name", "", r"Workload\(name=…\) must be text that can name a folder, found ''"),
        ("name", "../up", r"Workload\(name=…\) must be text that can name a folder, found '../up'"),
        ("name", "a\0b", r"Workload\(name=…\) must be text that can name a folder"),
        ("name", 3, r"Workload\(name=…\) must be text that can name a folder, found 3"),
    ],
)
def test_a_field_that_cannot_be_is_named(field: str, value: object, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Workload(**FIELDS | {field: value})


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
    ("reference", "said"),
    [
        ("train", "'train' names no workload: write module:function or path/to/file.py:function"),
        ("train.py", "'train.py' names no workload"),
        (":make", "':make' names no workload"),
        ("mod:", "'mod:' names no workload"),
        ("..:make", "'..' names no module"),
        ("a-b:make", "'a-b' names no module"),
        ("nowhere_mod:make", "there is no module 'nowhere_mod' to import from "),
        ("nowhere_mod.sub:make", "there is no module 'nowhere_mod.sub'"),
        ("nowhere.py:make", "there is no file nowhere.py .looked from "),
        (".:make", "'.' names no module"),
        ("found_mod:mak", r"found_mod has no 'mak'; did you mean make\?"),
        ("found_mod:workload", r"found_mod has no 'workload'; it has: make, nothing$"),
        ("found_mod:number", "found_mod:number is a int, not a function or an autobatch.Workload"),
        ("found_mod:nothing", r"found_mod:nothing returned nothing \(None\), not an autobatch.Workload"),
    ],
)
def test_a_reference_that_leads_nowhere_says_where_it_looked(
    reference: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "found_mod.py").write_text(MAKES + "number = 3\ndef nothing(): pass\n")
    with pytest.raises(InputError, match=said):
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
def test_what_their_code_raises_is_blamed_on_its_line(
    content: str, line: int, kind: type[BaseException], reference: str, tmp_path: Path
) -> None:
    (tmp_path / "broken_mod.py").write_text(content)
    with pytest.raises(kind) as found:
        load_workload(reference)
    assert user_frame(found.value) == f"{tmp_path / 'broken_mod.py'}:{line}"
    assert failed_part(found.value) is not None
    assert describe(found.value).endswith(f"broken_mod.py:{line})")
    assert kind is ZeroDivisionError or "broken_mod" not in sys.modules


def test_a_model_that_is_built_already_is_no_function() -> None:
    from torch import nn

    with pytest.raises(InputError, match=r"found a Linear that is built already: write model=lambda: …"):
        Workload(**FIELDS | {"model": nn.Linear(1, 1)})
    assert Workload(**FIELDS | {"model": nn.Identity}).model is nn.Identity


def test_an_error_in_the_package_above_is_not_taken_for_a_missing_module(tmp_path: Path) -> None:
    (tmp_path / "broken_pack").mkdir()
    (tmp_path / "broken_pack" / "__init__.py").write_text("import nowhere_at_all\n")
    (tmp_path / "broken_pack" / "train.py").write_text(MAKES)
    with pytest.raises(ModuleNotFoundError, match="nowhere_at_all") as found:
        load_workload("broken_pack.train:make")
    assert user_frame(found.value) == f"{tmp_path / 'broken_pack' / '__init__.py'}:1"


def raised_by(code: str, file: str) -> BaseException:
    action: Callable[[], object] = eval(compile(code, file, "eval"))
    with pytest.raises(ZeroDivisionError) as found:
        action()
    return found.value


def test_whose_line_it_is() -> None:
    # Ours, and that of an installed package, is not theirs; a neighbour that only sounds like ours is.
    house = Path(sys.modules["autobatch"].__file__ or "").parent
    here = user_frame(raised_by("lambda: 1 / 0", "/site/mine-packages/train.py"))
    assert here == "/site/mine-packages/train.py:1"
    for foreign in (house / "step.py", "/venv/lib/site-packages/torch/nn.py", "<frozen importlib>"):
        assert str(foreign) not in str(user_frame(raised_by("lambda: 1 / 0", str(foreign))))
    neighbour = f"{house}_examples/train.py"
    assert user_frame(raised_by("lambda: 1 / 0", neighbour)) == f"{neighbour}:1"


def test_an_error_is_described_in_one_line() -> None:
    error = KeyError("first\nsecond")
    mark_user_error(error, "loss")
    mark_user_error(error, "model")
    error.add_note("a remark")
    error.add_note("Traceback\n of somewhere")
    assert failed_part(error) == "loss"
    assert remarks_on(error) == ["a remark"]
    assert describe(ValueError("two\nlines")) == "the workload raised ValueError: two"
    assert describe(ValueError()) == "the workload raised ValueError"
    assert describe(SystemExit()) == "the workload called sys.exit()"


def test_our_own_errors_are_not_blamed_on_them() -> None:
    with pytest.raises(InputError) as found, user_code("loss"):
        raise InputError("ours")
    assert failed_part(found.value) is None
