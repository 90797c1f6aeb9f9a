"""What users rely on: records that stay as they are, the exit codes and bases of errors, the version."""

from __future__ import annotations

import pickle
import tomllib
from pathlib import Path

import msgspec
import pytest

import autobatch
from tests.support.sample_run import a_run

ERRORS: dict[str, tuple[type[Exception], int]] = {
    "AutobatchError": (Exception, 1),
    "InputError": (ValueError, 2),
    "DoesNotFitError": (RuntimeError, 3),
    "RestartSmallerError": (RuntimeError, 77),
    "CheckpointError": (OSError, 1),
    "NonFiniteError": (ArithmeticError, 1),
}


def test_a_run_is_immutable_and_the_same_after_a_trip_through_json() -> None:
    run = a_run()
    assert msgspec.json.decode(msgspec.json.encode(run), type=type(run)) == run
    assert '"training":null' in msgspec.json.encode(a_run(training=None)).decode()
    with pytest.raises(AttributeError, match="immutable"):
        run.device = None
    with pytest.raises(TypeError):
        type(run)(run.device)


def test_every_error_has_its_base_and_exit_code_and_survives_a_pickle() -> None:
    public = [getattr(autobatch, name) for name in autobatch.__all__]
    kinds = {one.__name__ for one in public if isinstance(one, type) and issubclass(one, Exception)}
    assert kinds == {*ERRORS, "Interrupted"}
    for name, (base, code) in ERRORS.items():
        error = getattr(autobatch, name)("one line")
        assert isinstance(error, base)
        assert isinstance(error, autobatch.AutobatchError)
        assert (error.exit_code, str(pickle.loads(pickle.dumps(error)))) == (code, "one line")
    codes = [autobatch.Interrupted("stopped", signal_number=number).exit_code for number in (2, 15)]
    assert codes == [130, 143]


def test_the_build_and_the_package_have_one_version() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    path = Path(__file__).parents[2] / project["tool"]["hatch"]["version"]["path"]
    assert f'__version__ = "{autobatch.__version__}"' in path.read_text()
