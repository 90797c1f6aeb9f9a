"""A run that is killed again and again ends with the same weights as an uninterrupted run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def run(folder: Path, kills: int, *words: str) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.killing", str(folder), str(kills), "1", *words],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_thirty_kills_lose_no_acknowledged_checkpoint(tmp_path: Path) -> None:
    result = run(tmp_path, 30)
    assert result["killed"] >= 30
    assert result["finished"] >= 1


def test_kills_and_other_numbers_of_loader_workers_change_nothing(tmp_path: Path) -> None:
    result = run(tmp_path, 8, "fed")
    assert result["killed"] >= 8
    assert result["finished"] >= 1


@pytest.mark.slow
def test_two_hundred_kills_lose_no_acknowledged_checkpoint(tmp_path: Path) -> None:
    assert run(tmp_path, 200)["killed"] >= 200
