"""Predicted memory of a step against the tensors of steps that ran, and the time of an estimate.

    python -m benchmarks.footprint.run [--only gpt lstm] [--save]

Predictions and runs are replayed through the same model of CUDA's caching allocator. A run is one on the CPU,
whose tensors a budget counts. Scratch space in the CPU's operators is not part of it.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from typing import Any

import torch

from autobatch import DoesNotFitError
from autobatch.core.options import Options
from autobatch.device.allocator.caching import CachingAllocator
from autobatch.device.allocator.trace import Trace, replay
from autobatch.estimates.footprints import footprint
from autobatch.estimates.traced_step import TracedStep
from autobatch.rehearsal.attempt import ATTEMPT_STEPS, attempt
from autobatch.rehearsal.setup import open_setup
from benchmarks.report import arguments, markdown, save
from benchmarks.workloads import WORKLOADS

SIZES = (7, 40, 100, 250)
"""Micro-batches up to fifty times the largest traced one; 2, 3 and 5 are traced."""
PRECISIONS = ("fp32", "bf16")
ESTIMATES = {
    "GPT-2 small, two GPUs": "gpt2_small --profile h100-80gb --profile rtx-4090",
    "GPT-2 small, one GPU, with what would help": "gpt2_small --profile rtx-4090",
    "GPT-2 small, 8 ranks": "gpt2_small --ranks 8 --profile a100-40gb",
    "GPT-2 small, 8 ranks share it": "gpt2_small --ranks 8 --parallel shard --profile a100-40gb",
    "Llama 2 7B, 8 ranks share it": "llama2_7b --ranks 8 --parallel shard --profile a100-40gb",
}
"""Arguments of ``autobatch estimate``, after the file of the models."""


def peaks(trace: Trace) -> dict[str, int]:
    """Return the peaks of a replay, in bytes."""
    found = replay(trace, CachingAllocator())
    return {"allocated": found.peak_allocated_bytes, "reserved": found.peak_reserved_bytes}


def measure(name: str, precision: str) -> list[dict[str, Any]]:
    """Return predicted and real peaks of a workload at every size."""
    options = Options().with_values(device="cpu", memory_budget="8GiB", precision=precision)
    setup = open_setup(WORKLOADS[name](), options)
    step = footprint(
        TracedStep(
            workload=setup.workload,
            model=setup.model,
            batch_of=setup.worst_case.batch,
            precision=setup.precision,
            capability=None,
            steps=ATTEMPT_STEPS,
            max_grad_norm=setup.max_grad_norm,
        )
    )
    return [
        {
            "workload": name,
            "precision": precision,
            "micro_batch": size,
            "predicted": peaks(step.program.at(size)),
            "real": peaks(attempt(setup, size).trace),
        }
        for size in SIZES
    ]


def seconds_of(arguments: str) -> tuple[float, float]:
    """Return wall and CPU seconds of the whole process of an estimate."""
    model, *more = arguments.split()
    reference = f"benchmarks/footprint/decoders.py:{model}"
    command = [sys.executable, "-m", "autobatch", "estimate", reference, *more]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode not in (0, DoesNotFitError.exit_code):
        raise RuntimeError(done.stderr)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - start, used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime


def table(rows: list[dict[str, Any]], seconds: dict[str, tuple[float, float]]) -> str:
    """Return the worst error of each workload, and the seconds of the estimates."""
    kinds = ("allocated", "reserved")
    equal = sum(row["predicted"][kind] == row["real"][kind] for row in rows for kind in kinds)
    errors = []
    for name in dict.fromkeys(row["workload"] for row in rows):
        own = [row for row in rows if row["workload"] == name]
        worst = (max((r["predicted"][kind] / r["real"][kind] - 1 for r in own), key=abs) for kind in kinds)
        errors.append([name, ", ".join(f"{error:+.2%}" for error in worst)])
    times = [[name, f"{wall:.1f}", f"{cpu:.1f}"] for name, (wall, cpu) in seconds.items()]
    return (
        f"{equal} of {2 * len(rows)} predicted peaks are equal to the byte.\n\n"
        + markdown(("workload", "worst error: allocated, reserved"), errors)
        + "\n"
        + markdown(("estimate", "wall, s", "CPU, s"), times)
    )


def main() -> None:
    options = arguments(__doc__, only=[*WORKLOADS], save=False)
    torch.set_num_threads(1)
    seconds = {name: seconds_of(arguments) for name, arguments in ESTIMATES.items()}
    rows = []
    for name in options.only:
        for precision in PRECISIONS:
            rows += measure(name, precision)
            print(f"{name} {precision}", file=sys.stderr, flush=True)
    text = table(rows, seconds)
    print(text)
    if options.save:
        print(save("footprint", text))


if __name__ == "__main__":
    main()
