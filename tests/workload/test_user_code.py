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


def raised_by(file: str) -> BaseException:
    action: Callable[[], object] = eval(compile("lambda: 1 / 0", file, "eval"))
    with pytest.raises(ZeroDivisionError) as caught:
        action()
    return caught.value


def test_the_line_is_outside_autobatch_and_installed_packages() -> None:
    package = Path(sys.modules["autobatch"].__file__ or "").parent
    # A neighbour whose path only begins like the package is user code.
    for own in ("/site/mine-packages/train.py", f"{package}_examples/train.py"):
        assert user_frame(raised_by(own)) == f"{own}:1"
    for foreign in (f"{package}/step.py", "/venv/lib/site-packages/torch/nn.py", "<frozen importlib>"):
        assert foreign not in str(user_frame(raised_by(foreign)))


def test_an_error_is_described_in_one_line() -> None:
    with pytest.raises(KeyError) as caught, user_code("model"), user_code("loss"):
        raise KeyError("first\nsecond")
    error = caught.value
    error.add_note("a remark")
    error.add_note("Traceback\n of somewhere")
    assert failed_part(error) == "loss"
    assert remarks_on(error) == ["a remark"]
    assert describe(ValueError("two\nlines")) == "the workload raised ValueError: two"
    assert describe(SystemExit()) == "the workload called sys.exit()"


def test_an_error_is_carried_to_another_process_with_its_traceback() -> None:
    class Unknown(Exception):  # cannot be pickled
        pass

    with pytest.raises(Unknown) as caught, user_code("loss"):
        raise Unknown("odd")
    carried = pickle.loads(pickle.dumps(to_picklable(caught.value)))
    assert isinstance(carried, UserCodeError)
    assert str(carried).startswith("the workload's loss raised Unknown: odd (")
    assert any("Unknown: odd" in note for note in carried.__notes__)


def test_errors_of_autobatch_are_not_marked_and_stay_what_they_are() -> None:
    class Theirs(InputError):
        pass

    with pytest.raises(InputError) as caught, user_code("loss"):
        raise InputError("ours")
    assert failed_part(caught.value) is None
    assert type(to_picklable(caught.value)) is InputError
    for error in (Theirs("a"), ZeroDivisionError("b"), SystemExit(2)):
        assert type(to_picklable(error)) is UserCodeError
