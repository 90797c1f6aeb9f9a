"""Errors of the user's code: whose line they name, and how they are described and carried."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autobatch import InputError
from autobatch.core.errors import UserCodeError
from autobatch.workload.user_code import (
    describe,
    failed_part,
    remarks_on,
    to_picklable,
    user_code,
    user_frame,
)


class Silent(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def raised_by(code: str, file: str) -> BaseException:
    action: Callable[[], object] = eval(compile(code, file, "eval"))
    with pytest.raises(ZeroDivisionError) as found:
        action()
    return found.value


def test_the_line_is_outside_autobatch_and_installed_packages() -> None:
    # A neighbour whose path only begins like the package is user code.
    package = Path(sys.modules["autobatch"].__file__ or "").parent
    here = user_frame(raised_by("lambda: 1 / 0", "/site/mine-packages/train.py"))
    assert here == "/site/mine-packages/train.py:1"
    for foreign in (package / "step.py", "/venv/lib/site-packages/torch/nn.py", "<frozen importlib>"):
        assert str(foreign) not in str(user_frame(raised_by("lambda: 1 / 0", str(foreign))))
    neighbour = f"{package}_examples/train.py"
    assert user_frame(raised_by("lambda: 1 / 0", neighbour)) == f"{neighbour}:1"


def test_an_error_is_described_in_one_line() -> None:
    with pytest.raises(KeyError) as found, user_code("model"), user_code("loss"):
        raise KeyError("first\nsecond")
    error = found.value
    error.add_note("a remark")
    error.add_note("Traceback\n of somewhere")
    assert failed_part(error) == "loss"
    assert remarks_on(error) == ["a remark"]
    assert describe(ValueError("two\nlines")) == "the workload raised ValueError: two"
    alone = describe(ValueError("Default process group has not been initialized, please make sure …"))
    assert alone.endswith("Attempts run on one rank alone, so a loss must not call torch.distributed")
    assert describe(ValueError()) == "the workload raised ValueError"
    assert describe(SystemExit()) == "the workload called sys.exit()"
    assert describe(Silent()) == "the workload raised Silent"


def test_an_error_is_carried_to_another_process_with_its_traceback() -> None:
    class Unknown(Exception):  # cannot be pickled
        pass

    with pytest.raises(Unknown) as found, user_code("loss"):
        raise Unknown("odd")
    carried = pickle.loads(pickle.dumps(to_picklable(found.value)))
    assert isinstance(carried, UserCodeError)
    assert str(carried).startswith("the workload's loss raised Unknown: odd (")
    assert any("Unknown: odd" in note for note in carried.__notes__)


def test_errors_of_autobatch_are_not_marked_and_stay_what_they_are() -> None:
    class Theirs(InputError):
        pass

    with pytest.raises(InputError) as found, user_code("loss"):
        raise InputError("ours")
    assert failed_part(found.value) is None
    assert type(to_picklable(found.value)) is InputError
    for error in (Theirs("a"), ZeroDivisionError("b"), SystemExit(2)):
        assert type(to_picklable(error)) is UserCodeError
