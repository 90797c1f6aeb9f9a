"""The scripts of the page on several hosts, on two hosts: they stop with a checkpoint, and continue."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from benchmarks.ranks.silence import Runs
from tests.support.hosts import INTERFACE, NAMES, TwoHosts, can_make_hosts, two_hosts

pytestmark = [
    pytest.mark.program,
    pytest.mark.distributed,
    pytest.mark.skipif(not can_make_hosts(), reason="hosts are network namespaces, which root may make"),
]
PAGE = (Path(__file__).parents[2] / "docs" / "several-gpus.md").read_text(encoding="utf-8")
STEPS = 60


def script() -> str:
    """Return the batch script of the page, for a small model on CPUs."""
    (found,) = (one for one in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) if "#SBATCH" in one)
    small = f"--target-batch 14 --memory-budget 1GiB --max-micro-batch 4 --trials 0 --steps {STEPS}"
    return found.replace("--target-batch 4096", f"{small} --checkpoint-every 1").replace(
        "--nproc-per-node 8", "--nproc-per-node 1"
    )


def prepare_slurm(hosts: TwoHosts, runs: Runs) -> list[str]:
    """Return the command that runs the batch script, with stand-ins for SLURM's commands."""
    folder = runs.folder
    (folder / "job.sh").write_text(script())
    subprocess.run(["bash", "-n", "job.sh"], cwd=folder, check=True)
    (folder / "bin").mkdir(exist_ok=True)
    on_hosts = " & ".join(f'{shlex.join(hosts.on(host, []))} "$@"' for host in range(2))
    for name, lines in {
        "srun": f'shift\n{on_hosts} & wait -n; code=$?; wait; exit "$code"',
        "scontrol": f'[ "$1" = show ] && printf "{NAMES[0]}\\n{NAMES[1]}\\n" || echo "$@" >> requeued',
    }.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{lines}\n")
        (folder / "bin" / name).chmod(0o755)
    runs.environ |= {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        **{"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n"},
    }
    return ["bash", "job.sh"]


def test_the_batch_script_stops_with_a_checkpoint_and_continues(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "job", STEPS)
    runs.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    (runs.folder / "work.py").rename(runs.folder / "train.py")
    out = runs.folder / "runs" / "main"
    with two_hosts() as hosts:
        command = prepare_slurm(hosts, runs)
        for expected in (143, 0):
            job = subprocess.Popen(command, cwd=runs.folder, env=runs.environ, start_new_session=True)
            if expected:
                runs.wait_until(lambda: len([*out.glob("checkpoints/step-*[0-9]")]) > 1, 240, "no checkpoint")
                for pid in hosts.pids(0) + hosts.pids(1):  # SLURM signals all processes of a step
                    os.kill(pid, signal.SIGTERM)
            assert job.wait(240) == expected
            assert (out / "verdict.json").exists() == bool(expected)
            (runs.folder / "slow").unlink(missing_ok=True)
    training = json.loads((out / "result.json").read_bytes())["training"]
    assert (training["optimizer_steps"], training["resumed_from"] is None) == (STEPS, False)
    assert (runs.folder / "requeued").read_text() == "requeue 7\n"
