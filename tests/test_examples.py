"""The examples run as a user runs them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(folder: Path, *command: str) -> str:
    environ = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_workload_is_planned_from_the_command_line(tmp_path: Path) -> None:
    words = ("--target-batch", "256", "--memory-budget", "300KiB", "--device", "cpu", "--json")
    found = json.loads(run(tmp_path, "-m", "autobatch", "plan", f"{EXAMPLES / 'train.py'}:workload", *words))
    sizes = found["plan"]["micro_batches"]
    assert sum(sizes) == 256
    assert len(sizes) > 1, "the budget of the example makes the batch accumulate"


def test_the_own_loop_takes_exact_batches(tmp_path: Path) -> None:
    printed = run(tmp_path, str(EXAMPLES / "own_loop.py"))
    samples = [int(one) for one in re.findall(r"^step \d+: (\d+) samples", printed, re.MULTILINE)]
    assert samples[:-1] == [256] * (len(samples) - 1)
    assert sum(samples) == 2000, "two epochs of 1,000 samples"
    losses = [float(one) for one in re.findall(r"loss ([\d.]+)$", printed, re.MULTILINE)]
    assert losses[-1] < losses[0]
