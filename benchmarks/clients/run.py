"""The probe on models of other libraries: runs, out-of-memory errors, and the evidence for the limit.

python -m benchmarks.clients.run [--out FILE]
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import autobatch
from benchmarks.clients.models import clients

DEVICES = ("cpu", "sim:t4")
ROW = "| {} | {} | {} | {} | {} | {} | {} |"
HEAD = ("workload", "device", "micro-batch", "predicted", "runs", "out of memory", "next size fails by")


def measure(workload: autobatch.Workload, device: str) -> str:
    """Probe a workload within four times the memory of 8 samples, at most 200 of them, and return a row."""
    with tempfile.TemporaryDirectory() as home:
        os.environ["AUTOBATCH_HOME"] = home
        options = {"device": device, "precision": "fp32", "progress": False}
        one = autobatch.probe(workload, micro_batch=8, **options).attempts[-1]
        budget = 4 * (one.peak_reserved_bytes or one.peak_allocated_bytes or 0)
        found = autobatch.probe(workload, memory_budget=budget, max_micro_batch=200, **options)
    cells = (found.micro_batch, found.predicted_micro_batch, len(found.attempts), found.oom_count)
    return ROW.format(workload.name, device, *cells, found.upper_bound_by)


def main() -> None:
    """Print the table, and write it to a file if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    lines = [ROW.format(*HEAD), "|---" * len(HEAD) + "|"]
    for workload in clients():
        for device in DEVICES:
            lines.append(measure(workload, device))
            print(lines[-1], flush=True)
            if out is not None:
                out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
