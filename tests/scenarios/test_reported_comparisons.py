"""Comparisons of runs that users have reported."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autobatch.cli import main as cli
from tests.support.sample_run import a_run


def write_run(folder: Path, seconds: int, **changes: Any) -> Path:
    """Write the result of a run that ended this many seconds after 1970."""
    folder.mkdir(parents=True)
    path = folder / "result.json"
    path.write_bytes(msgspec.json.encode(a_run(**changes)))
    os.utime(path, (seconds, seconds))
    return path


@pytest.mark.parametrize("content", [b"", b'{"schema": 2, "dev', b"[]", b"\xff\xfe"])
def test_the_newest_two_runs_are_compared_past_a_damaged_one(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for seconds, name in ((1, "digits/1"), (3, "digits/2")):
        write_run(tmp_path / "runs" / name, seconds)
    damaged = write_run(tmp_path / "runs/other/1", 2)
    damaged.write_bytes(content)
    os.utime(damaged, (2, 2))
    code = cli.run(["compare", "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert sorted(Path(name).name for name in json.loads(out)["runs"]) == ["1", "2"]
    assert sorted(Path(name).parent.name for name in json.loads(out)["runs"]) == ["digits"] * 2


def test_another_choice_of_the_tuner_is_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = a_run().plan
    assert plan is not None
    for number, precision in enumerate(("fp32", "bf16")):
        write_run(
            tmp_path / "runs/digits" / str(number),
            number,
            plan=msgspec.structs.replace(plan, precision=precision),
        )
    assert cli.run(["compare", "--json"]) == 0
    assert "precision" in json.loads(capsys.readouterr().out)["differs"]
