"""Time of whole processes: the help, the demo in an empty directory, and a small run to its first step.

python -m benchmarks.startup [--first-step]
"""

from __future__ import annotations

import compileall
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import arguments, markdown, save

ROUNDS = 15
FRESH = 5
"""Runs of a small task to its first step, each with an empty data directory."""
FIRST_STEP = "the first step of a small task"
PLAIN = """
import torch
from benchmarks.startup import workload
task = workload()
model = task.model()
optimizer = task.optimizer(model.parameters(), 1e-3)
batch = torch.utils.data.default_collate([task.train_data[n] for n in range(64)])
task.loss(model, batch).backward()
optimizer.step()
print("step", flush=True)
"""
"""A loop of torch up to its first step."""


def workload():
    """Build the small task: a perceptron of 64 by 64 on vectors."""
    from benchmarks.workloads import WORKLOADS

    return WORKLOADS["mlp"]()


def to_first_step(command: list[str]) -> tuple[float, float]:
    """Run a command that prints its steps in an empty directory, up to the first of them.

    The package has its bytecode, as an installed one has.

    Returns:
        Seconds of wall time, and of the processor with child processes that have ended (Linux).
    """
    root = str(Path(__file__).parents[1])
    with tempfile.TemporaryDirectory() as folder:
        environ = dict(os.environ) | {"AUTOBATCH_HOME": f"{folder}/home", "PYTHONPATH": root}
        start = time.perf_counter()
        with subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            next(line for line in process.stdout if line.startswith("step"))
            seconds = time.perf_counter() - start
            ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:15]
            process.stdout.read()
    return seconds, sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def wall(command: list[str], *, folder: Path | None = None, home: Path | None = None) -> float:
    environ = dict(os.environ) | ({"AUTOBATCH_HOME": str(home)} if home else {})
    start = time.perf_counter()
    subprocess.run(command, check=True, cwd=folder, env=environ, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def whole_processes() -> dict[str, list[float]]:
    """Time the help and the demo."""
    program = [sys.executable, "-m", "autobatch"]
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "autobatch --help": [*program, "--help"],
        "autobatch fit --help": [*program, "fit", "--help"],
    }
    times = {name: [wall(command) for _ in range(ROUNDS)] for name, command in commands.items()}
    fit = [*program, "fit", "--target-batch", "1024", "--quiet"]
    with tempfile.TemporaryDirectory() as folder:
        for which in ("first", "second"):
            times[f"the demo, {which} run"] = [wall(fit, folder=Path(folder), home=Path(folder) / "home")]
    return times


def first_steps() -> dict[str, list[float]]:
    """Time the first step of a small task in a loop of torch, on the CPU and on a simulated GPU, in turn."""
    small = [
        *[
            "-u",
            "-m",
            "autobatch",
            "fit",
            "benchmarks.startup:workload",
            "--target-batch",
            "64",
            "--steps",
            "1",
        ]
    ]
    kinds = {
        "a loop of torch": ["-c", PLAIN],
        **{device: [*small, "--device", device] for device in ("cpu", "sim:rtx-4090")},
    }
    compileall.compile_dir(Path(__file__).parents[1] / "autobatch", quiet=1)
    times: dict[str, list[float]] = {}
    for _ in range(FRESH):
        for name, command in kinds.items():
            for clock, taken in zip(("wall", "CPU"), to_first_step([sys.executable, *command]), strict=True):
                times.setdefault(f"{FIRST_STEP}, {name} ({clock})", []).append(taken)
    return times


def main() -> None:
    """Time each process, print and save the table."""
    only = arguments(__doc__, first_step=False).first_step
    times = first_steps() if only else whole_processes() | first_steps()
    table = markdown(
        ("process", "least, s", "median, s"),
        [[name, f"{min(own):.3f}", f"{statistics.median(own):.3f}"] for name, own in times.items()],
    )
    print(table)
    print(save("startup-first-step" if only else "startup", table, "optuna"))


if __name__ == "__main__":
    main()
