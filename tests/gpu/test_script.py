"""A plain program of torch, searched as it is, against the same program under a limit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu.test_snapshots import PROGRAM, call

pytestmark = pytest.mark.gpu


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return path


def runs_under(program: Path, size: int, limit_mib: int) -> bool:
    done = call(program.parent, program, size, limit_mib)
    return done.returncode == 0 and json.loads(done.stdout)["num_alloc_retries"] == 0


@pytest.mark.parametrize("limit", [400, 1000])
@pytest.mark.parametrize("empties", [False, True])
def test_the_limit_runs_and_one_more_does_not(program: Path, limit: int, empties: bool) -> None:
    if empties:  # as a search of cuDNN for its fastest kernels does
        emptying = PROGRAM.replace("loss.backward()", "torch.cuda.empty_cache()\n    loss.backward()")
        program.write_text(emptying, encoding="utf-8")
    words = ("--memory-budget", f"{limit}MiB", "--json", "--", "python", program, "{}", "0")
    done = call(program.parent, "-m", "autobatch", "probe", *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["probe"]
    size = found["micro_batch"]
    assert found["oom_count"] <= empties  # small runs have an empty cache, whose emptying leaves no event
    assert runs_under(program, size, limit)
    assert not runs_under(program, size + 1, limit)


def test_fit_becomes_the_command(program: Path) -> None:
    words = (
        "--target-batch",
        "96",
        "--memory-budget",
        "400MiB",
        "--",
        "python",
        program,
        "{}",
        "0",
        "{steps}",
    )
    done = call(program.parent, "-m", "autobatch", "fit", *words)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert json.loads(last)["reserved_bytes.all.peak"] <= 400 << 20
    size, steps = (int(word) for word in lines[-1].split()[-3::2])
    assert size * steps == 96
