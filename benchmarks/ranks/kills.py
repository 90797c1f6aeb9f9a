"""SIGKILL of a random rank at random instants, under ``torchrun --max-restarts``.

    python -m benchmarks.ranks.kills --kills 10 --seed 1    # adds a part to benchmarks/results
    python -m benchmarks.ranks.kills --kills 10 --seed 1 --parallel shard

Two ranks train with dropout and AdamW, and write a checkpoint after every step. Half of the kills come at any
instant after a start, half while batches are trained and checkpoints written. Counted are runs whose final
weights differ from those of an undisturbed run in any bit, and checkpoints that a rank had published and a
restart did not have.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

RESULT = Path(__file__).parents[1] / "results" / "ranks-kills_amd-epyc_2026-11-22.json"
ROOT = Path(__file__).parents[2]
STEPS = {"replicate": 1200, "shard": 300}
"""A sharded checkpoint after every step takes longer."""
WORKLOAD = """
import pathlib, time, torch
from torch.nn.functional import cross_entropy
import autobatch
from tests.support.training import points

def loss(model, batch):
    if pathlib.Path("slow").exists():
        time.sleep(0.02)
    return cross_entropy(model(batch[0]), batch[1])

def workload():
    return autobatch.Workload(
        model=lambda: torch.nn.Sequential(
            torch.nn.Linear(5, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 3)
        ).double(),
        train_data=points(64), validation_data=points(16), loss=loss, learning_rate=0.01,
        optimizer=lambda params, rate: torch.optim.AdamW(params, lr=rate),
    )
"""


class Seen(NamedTuple):
    """The state of a run from outside."""

    workers: tuple[int, ...]
    newest: int
    """Step of the newest published checkpoint; 0 for none."""


def start(folder: Path, restarts: int, parallel: str) -> subprocess.Popen[str]:
    """Start two ranks in a folder, each with a whole model or with a part of one."""
    (folder / "work.py").write_text(WORKLOAD)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("--max-restarts", str(restarts), "-m", "autobatch", "fit", "work.py", "--out", "run"),
        *("--target-batch", "14", "--memory-budget", "1GiB", "--max-micro-batch", "4"),
        *("--steps", str(STEPS[parallel]), "--checkpoint-every", "1", "--json"),
        *("--parallel", parallel, "--trials", "0"),
    ]
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "AUTOBATCH_HOME": str(folder / "home"),
    }
    return subprocess.Popen(
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def look(process: subprocess.Popen[str], folder: Path) -> Seen:
    """Return the ranks that run, and the newest checkpoint."""
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    except OSError:
        children = []
    steps = [int(path.name[5:]) for path in (folder / "run" / "checkpoints").glob("step-" + "[0-9]" * 8)]
    return Seen(tuple(map(int, children)), max(steps, default=0))


def kill_ranks(folder: Path, kills: int, draw: random.Random, parallel: str) -> dict[str, Any]:
    """Run once, kill so many ranks, and return what was seen."""
    (folder / "slow").touch()
    process = start(folder, kills, parallel)
    lost, of_rank = 0, [0, 0]
    newest = 0
    known: tuple[int, ...] = ()
    for number in range(kills):
        while process.poll() is None and (
            len(look(process, folder).workers) < 2 or set(look(process, folder).workers) & set(known)
        ):
            time.sleep(0.02)
        known = look(process, folder).workers
        if number % 2 == 0:
            before = look(process, folder).newest
            while process.poll() is None and look(process, folder).newest <= before:
                time.sleep(0.02)
            delay = draw.uniform(0.0, 1.0)
        else:
            delay = draw.uniform(0.0, 15.0)
        time.sleep(delay)
        seen = look(process, folder)
        lost += seen.newest < newest
        newest = max(newest, seen.newest)
        if process.poll() is not None or seen.newest == STEPS[parallel] or len(known) < 2:
            break
        rank = draw.randrange(2)
        of_rank[rank] += 1
        os.kill(known[rank], signal.SIGKILL)
    (folder / "slow").unlink()
    out, err = process.communicate(timeout=300)
    result = {"exit code": process.returncode, "killed": of_rank, "checkpoints lost": lost}
    if process.returncode == 0:
        json.loads(out)
    else:
        print(err[-3000:], file=sys.stderr)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parallel", choices=STEPS, default="replicate")
    given = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="rank-kills-"))
    try:
        for name in ("whole", "killed"):
            (root / name).mkdir()
        whole = start(root / "whole", 0, given.parallel)
        whole.communicate(timeout=300)
        draw = random.Random(given.seed)
        found = {"parallel": given.parallel, "seed": given.seed}
        found |= kill_ranks(root / "killed", given.kills, draw, given.parallel)
        weights = [(root / name / "run" / "model.safetensors").read_bytes() for name in ("whole", "killed")]
        found["same weights"] = weights[0] == weights[1]
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(json.dumps(found))
    parts = json.loads(RESULT.read_text())["parts"] if RESULT.exists() else []
    parts = [part for part in parts if (part["parallel"], part["seed"]) != (given.parallel, given.seed)]
    parts.append(found)
    RESULT.write_text(
        json.dumps({**{kind: totals(parts, kind) for kind in STEPS}, "parts": parts}, indent=1) + "\n"
    )


def totals(parts: list[dict[str, Any]], parallel: str) -> dict[str, int]:
    """Return the sums over all runs of a kind."""
    own = [part for part in parts if part["parallel"] == parallel]
    return {
        "kills": sum(sum(part["killed"]) for part in own),
        "runs with other weights": sum(not part["same weights"] for part in own),
        "checkpoints lost": sum(part["checkpoints lost"] for part in own),
    }


if __name__ == "__main__":
    main()
