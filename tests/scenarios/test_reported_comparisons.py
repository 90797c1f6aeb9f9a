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


def write_run(folder: Path, seconds: int, content: bytes | None = None, **changes: Any) -> None:
    """Write the result of a run that ended this many seconds after 1970."""
    folder.mkdir(parents=True)
    path = folder / "result.json"
    path.write_bytes(msgspec.json.encode(a_run(**changes)) if content is None else content)
    os.utime(path, (seconds, seconds))


def compared(capsys: pytest.CaptureFixture[str]) -> Any:
    code = cli.run(["compare", "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize("content", [b'{"schema": 2, "dev', b"[]", b"\xff\xfe"])
def test_the_newest_two_runs_are_compared_past_a_damaged_one(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for seconds, name, written in ((1, "digits/1", None), (2, "other/1", content), (3, "digits/2", None)):
        write_run(tmp_path / "runs" / name, seconds, written)
    names = [Path(name) for name in compared(capsys)["runs"]]
    assert sorted((name.parent.name, name.name) for name in names) == [("digits", "1"), ("digits", "2")]


def test_another_choice_of_the_tuner_is_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = a_run().plan
    assert plan is not None
    for number, precision in enumerate(("fp32", "bf16")):
        changed = msgspec.structs.replace(plan, precision=precision)
        write_run(tmp_path / "runs/digits" / str(number), number, plan=changed)
    assert "precision" in compared(capsys)["differs"]
