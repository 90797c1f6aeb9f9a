"""A command that opens a workload: where its lines and its JSON go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autobatch.cli.failures import RunLog
from autobatch.cli.parser import parse
from autobatch.cli.run_workload import PARTS, run_workload
from autobatch.core.errors import InputError
from autobatch.distributed.ranks import Ranks

DEMO = "autobatch.workload.demo:workload"


def estimate(folder: Path, *words: str, workload: str = DEMO) -> int:
    found, options = parse("estimate", [workload, "--profile", "t4", *words], folder=folder, environ={})
    return run_workload("estimate", found, options, RunLog(lambda: folder, "autobatch estimate"), Ranks())


def test_json_is_all_of_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert estimate(tmp_path, "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["estimates"][0]["profile"] == "t4"
    assert "t4" in err


def test_a_wrong_reference_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no file nowhere\.py"):
        estimate(tmp_path, workload="nowhere.py")


def test_each_command_that_opens_a_workload_has_its_parts() -> None:
    assert set(PARTS) == {"fit", "plan", "probe", "tune", "estimate"}
