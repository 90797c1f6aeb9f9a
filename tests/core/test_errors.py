"""The tree of errors: exit codes, built-in bases, and the docstring that shows it."""

from __future__ import annotations

import pickle

import pytest

from autobatch.core import errors
from autobatch.core.errors import AutobatchError, Interrupted

TREE: dict[str, tuple[type[Exception], int]] = {
    "AutobatchError": (Exception, 1),
    "InputError": (ValueError, 2),
    "UserCodeError": (errors.InputError, 2),
    "DoesNotFitError": (RuntimeError, 3),
    "RestartSmallerError": (RuntimeError, 77),
    "CheckpointError": (OSError, 1),
    "NonFiniteError": (ArithmeticError, 1),
}


def test_every_error_is_in_the_tree_and_in_the_docstring() -> None:
    found = {name for name, one in vars(errors).items() if isinstance(one, type)}
    assert found == {*TREE, "Interrupted"}
    for name in found:
        assert name in (errors.__doc__ or "")


@pytest.mark.parametrize("name", TREE)
def test_an_error_has_its_base_and_its_exit_code(name: str) -> None:
    base, code = TREE[name]
    error = getattr(errors, name)("one line")
    assert isinstance(error, AutobatchError)
    assert isinstance(error, base)
    assert (error.exit_code, str(error)) == (code, "one line")
    assert str(pickle.loads(pickle.dumps(error))) == "one line"


@pytest.mark.parametrize(("number", "code"), [(2, 130), (15, 143)])
def test_an_interrupted_run_exits_as_shells_expect(number: int, code: int) -> None:
    error = Interrupted("stopped", signal_number=number)
    assert (error.exit_code, str(error)) == (code, "stopped")
