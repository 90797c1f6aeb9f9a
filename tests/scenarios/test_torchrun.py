"""Whole runs under torchrun, as a user starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
WORKLOAD = """
import os, signal, torch
from torch.nn.functional import cross_entropy
import autobatch
from tests.support.training import points

WORKED = []
RANK, START = os.environ.get("RANK", "0"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")

def model():
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3)).double()

def loss(model, batch):
    EXTRA
    return cross_entropy(model(batch[0]), batch[1])

def workload():
    return autobatch.Workload(
        model=model, train_data=points(64), loss=loss, learning_rate=0.1,
        optimizer=lambda params, rate: torch.optim.AdamW(params, lr=rate),
    )
"""
COMMON = ("--trials", "0", "--target-batch", "14", "--memory-budget", "1GiB", "--max-micro-batch", "4")
FIT = (*COMMON, "--steps", "8", "--json")


def start(folder: Path, *options: str, extra: str = "pass", launch: tuple[str, ...] = ()) -> subprocess.Popen:
    (folder / "work.py").write_text(WORKLOAD.replace("EXTRA", extra))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *launch),
        *("-m", "autobatch", "fit", "work.py", "--out", "run", *options),
    ]
    root = str(Path(__file__).parents[2])
    # It leaves a folder for the logs of ranks.
    (folder / "tmp").mkdir(exist_ok=True)
    environ = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp")}
    return subprocess.Popen(
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def test_a_killed_rank_restarts_all_from_the_newest_checkpoint(tmp_path: Path) -> None:
    options = (*FIT, "--checkpoint-every", "1")
    code, _, err = finish(start(tmp_path, *options))
    assert code == 0, err
    expected = (tmp_path / "run" / "model.safetensors").read_bytes()
    (tmp_path / "run").rename(tmp_path / "first")
    kill = (
        "import pathlib; count = len(list(pathlib.Path('run/checkpoints').glob('step-*[0-9]'))) if "
        "pathlib.Path('run/checkpoints').exists() else 0\n"
        "    if START == '0' and RANK == '1' and count >= 2: os.kill(os.getpid(), signal.SIGKILL)"
    )
    code, out, err = finish(start(tmp_path, *options, extra=kill, launch=("--max-restarts", "2")))
    assert code == 0, err
    result = json.loads(out)
    assert result["plan"]["world_size"] == 2
    assert result["command"].startswith("torchrun --nproc-per-node 2 -m autobatch fit work.py --out run")
    assert result["training"]["resumed_from"] is not None
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == expected
