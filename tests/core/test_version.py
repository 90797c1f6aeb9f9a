"""The version: one place, which the package and the command line read."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import tomllib
from pathlib import Path

import pytest

import autobatch
from autobatch.cli.main import run
from autobatch.core import version

ROOT = Path(__file__).parents[2]


def test_the_version_is_three_numbers() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", version.__version__)
    assert autobatch.__version__ == version.__version__


def test_a_run_depends_on_these_versions() -> None:
    assert version.versions() == {
        "autobatch": version.__version__,
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
    }


def test_the_build_and_the_command_read_this_file(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["version"]["path"] == "autobatch/core/version.py"
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"autobatch {version.__version__}\n"
