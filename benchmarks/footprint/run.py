"""Accuracy of the predicted memory of a step, against steps that ran.

    python -m benchmarks.footprint.run

It takes about six minutes on two cores. Two truths are measured for every micro-batch, and replayed through
the model of CUDA's caching allocator as the prediction is:

- the tensors of a real run, which a budget counts on the CPU and on simulated GPUs;
- everything that the process allocated in a run without autobatch's modes, from torch's profiler. The
  difference is scratch space in the CPU's operators (oneDNN), which no prediction sees.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from autobatch.core.units import GiB
from autobatch.device.allocator.caching import CachingAllocator
from autobatch.device.allocator.trace import Trace, replay
from autobatch.device.cpu import CpuDevice
from autobatch.device.host import cpu_name
from autobatch.device.profiles import load_profile
from autobatch.device.simulated import SimulatedDevice
from autobatch.footprint.largest import largest_micro_batch
from autobatch.footprint.predict import footprint
from autobatch.footprint.program import Program
from autobatch.footprint.tracing.trace_step import Setting
from autobatch.setup.attempt import ATTEMPT_STEPS, attempt
from autobatch.setup.setup import Setup
from autobatch.workload.data import WorstCaseSampler
from autobatch.workload.rng import preserved_random_state
from benchmarks.footprint.memtracker import tracked
from benchmarks.footprint.table import markdown, summary
from benchmarks.footprint.truth import profiled, train
from benchmarks.workloads import WORKLOADS

RESULTS = Path(__file__).parents[1] / "results"
COMMAND = "python -m benchmarks.footprint.run"
SIZES = (7, 40, 100, 250)
"""Micro-batches up to fifty times the largest traced one; 2, 3 and 5 are traced."""
TRACKED_SIZE = 100
"""The size at which MemTracker runs as well; it needs a trace of its own for every size."""
LIMITED_SIZES = (33, 90, 180)
"""Sizes whose predicted reserved memory is a budget; a larger size may fit in it."""
PRECISIONS = ("fp32", "bf16")
CASES = (("gpt2", ("h100-80gb", "rtx-4090")), ("7b", ("h200", "b200")), ("gpt2", ("rtx-4090",)))
"""Two GPUs of one generation share a trace; a single GPU also gets remedies."""


def setup_of(name: str, precision: str) -> Setup:
    workload = WORKLOADS[name]()
    torch.manual_seed(0)
    return Setup(
        workload=workload,
        model=workload.model(),
        device=CpuDevice(memory_budget=8 * GiB),
        worst_case=WorstCaseSampler(workload),
        precision=precision,
        max_grad_norm=1.0,
    )


def peaks(trace: Trace) -> dict[str, int]:
    found = replay(trace, CachingAllocator())
    return {"allocated": found.peak_allocated_bytes, "reserved": found.peak_reserved_bytes}


def measure(name: str, precision: str) -> dict[str, Any]:
    """Measure one workload in one precision: the peaks at every size, and the largest under some budgets."""
    setup = setup_of(name, precision)
    start = time.process_time()
    step = footprint(
        Setting(
            workload=setup.workload,
            model=setup.model,
            batch_of=setup.worst_case.batch,
            precision=setup.precision,
            capability=None,
            steps=ATTEMPT_STEPS,
            max_grad_norm=1.0,
        )
    )
    seconds = time.process_time() - start
    rows = []
    for size in SIZES:
        ran = attempt(setup, size)
        rows.append(
            {
                "micro_batch": size,
                "predicted": peaks(step.program.at(size)),
                "tensors": peaks(ran.trace),
                "process": peaks(profiled(setup, size)),
            }
        )
    theirs = tracked(setup, TRACKED_SIZE)._asdict()
    theirs["live_bytes"] = attempt(setup, TRACKED_SIZE).attempt.peak_allocated_bytes
    return {
        "workload": name,
        "precision": precision,
        "cpu_seconds": seconds,
        "notes": list(step.notes),
        "sizes": rows,
        "memtracker": theirs | {"micro_batch": TRACKED_SIZE},
        "limits": [limit(setup, step.program, size) for size in LIMITED_SIZES],
    }


def limit(setup: Setup, program: Program, size: int) -> dict[str, Any]:
    """Return the predicted largest micro-batch under a budget, and if real runs confirm it."""
    budget = replay(program.at(size), CachingAllocator()).peak_reserved_bytes
    found = largest_micro_batch(program, lambda: CachingAllocator(budget), 4096)
    gpu = Setup(
        workload=setup.workload,
        model=setup.model,
        device=SimulatedDevice(load_profile("h200", user_dir=RESULTS), budget),
        worst_case=setup.worst_case,
        precision=setup.precision,
        max_grad_norm=1.0,
    )
    return {
        "budget_bytes": budget,
        "predicted": found,
        "it_runs": runs(gpu, found),
        "one_more_runs": runs(gpu, found + 1),
        "a_probe_agrees": attempt(gpu, found).attempt.fits,
    }


def runs(gpu: Setup, size: int) -> bool:
    """Check if the traced steps run within the budget; a probe also tries another order."""
    with preserved_random_state(), gpu.device.enforced() as meter:
        try:
            train(gpu, size, meter)
        except torch.OutOfMemoryError:
            return False
    return True


def costs() -> list[dict[str, Any]]:
    """Return the time of estimates, each in a process of its own."""
    rows = []
    for which, gpus in CASES:
        command = [sys.executable, "-m", "benchmarks.footprint.seconds", which, *gpus]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            rows.append({"model": which, "failure": lines[-1]})
        else:
            rows.append(json.loads(done.stdout))
        rows[-1]["load_before"] = os.getloadavg()[0]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="names of workloads")
    parser.add_argument("--out", type=Path, help="path of the result, without suffix")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    estimates = costs()
    measured = []
    for name in options.only or WORKLOADS:
        for precision in PRECISIONS:
            measured.append(measure(name, precision))
            print(f"{name:<18} {precision}", file=sys.stderr, flush=True)
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    content = {
        "benchmark": "footprint",
        "command": COMMAND,
        "date": today,
        "hardware": f"{cpu_name()}, {os.cpu_count()} cores",
        "versions": {"torch": str(torch.__version__), "python": platform.python_version()},
        "wall_seconds": round(time.perf_counter() - start),
        "summary": summary(measured),
        "estimates": estimates,
        "workloads": measured,
    }
    slug = re.sub(r"[^a-z0-9]+", "-", content["hardware"].lower()).strip("-")
    out = options.out or RESULTS / f"footprint_{slug}_{today}"
    out.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    out.with_suffix(".md").write_text(markdown(content))
    print(markdown(content))


if __name__ == "__main__":
    main()
