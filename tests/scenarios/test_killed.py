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


@pytest.mark.program
@pytest.mark.parametrize(("kills", "words"), [(20, ()), (6, ("fed",))])
def test_kills_lose_no_acknowledged_checkpoint_whatever_the_number_of_loader_workers(
    kills: int, words: tuple[str, ...], tmp_path: Path
) -> None:
    result = run(tmp_path, kills, *words)
    assert result["killed"] >= kills
    assert result["finished"] >= 1
