"""Predicted memory of a step against the tensors of steps that ran.

    python -m benchmarks.footprint [--only gpt lstm] [--save]

Predictions and runs are replayed through the same model of CUDA's caching allocator. A run is one on the CPU,
whose tensors a budget counts. Scratch space in the CPU's operators is not part of it.
"""

from __future__ import annotations

import torch

from autobatch.core.options import Options
from autobatch.device.allocator import CachingAllocator
from autobatch.device.trace import Trace, replay
from autobatch.estimates.traced_step import footprint
from autobatch.rehearsal.rehearsal import ATTEMPT_STEPS, attempt
from autobatch.rehearsal.setup import open_setup
from benchmarks.report import arguments, markdown, save
from benchmarks.workloads import WORKLOADS
from tests.support.step_workloads import traced_step

SIZES = (7, 40, 100, 250)
"""Micro-batches up to fifty times the largest traced one; 2, 3 and 5 are traced."""
PRECISIONS = ("fp32", "bf16")
Peaks = tuple[int, int | None]


def peaks(trace: Trace) -> Peaks:
    """Return the most bytes allocated and reserved in a replay."""
    found = replay(trace, CachingAllocator())
    return found.peak_allocated_bytes, found.peak_reserved_bytes


def measure(name: str, precision: str) -> list[tuple[Peaks, Peaks]]:
    """Return predicted and real peaks of a workload at every size."""
    options = Options(device="cpu", memory_budget="8GiB", precision=precision)
    setup = open_setup(WORKLOADS[name](), options)
    program = footprint(traced_step(setup, steps=ATTEMPT_STEPS)).program
    return [(peaks(program.at(size)), peaks(attempt(setup, size).trace)) for size in SIZES]


def main() -> None:
    """Print the worst error of each workload."""
    options = arguments(__doc__, only=[*WORKLOADS], save=False)
    torch.set_num_threads(1)
    rows, equal, count = [], 0, 0
    for name in options.only:
        found = [pair for precision in PRECISIONS for pair in measure(name, precision)]
        errors = [[mine / real - 1 for mine, real in zip(*pair, strict=True)] for pair in found]
        equal += sum(error == 0 for pair in errors for error in pair)
        count += 2 * len(found)
        rows.append([name, *(f"{max(kind, key=abs):+.2%}" for kind in zip(*errors, strict=True))])
        print(*rows[-1], flush=True)
    table = markdown(("workload", "worst error: allocated", "reserved"), rows)
    text = f"{equal} of {count} predicted peaks are equal to the byte.\n\n{table}"
    print(text)
    if options.save:
        print(save("footprint", text))


if __name__ == "__main__":
    main()
