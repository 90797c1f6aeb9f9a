"""The probe on models of other libraries: runs, out-of-memory errors, and the evidence for the limit.

python -m benchmarks.clients.run [--out FILE]
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import autobatch
from benchmarks.clients.models import Client, clients

SIZE = 48
"""Samples whose memory is the budget, nearly."""
ROOM = 1.02
"""Budget as a share of that memory."""
DEVICES = ("cpu", "sim:t4")
ROW = "| {} | {} | {} | {} | {} | {} | {} | {} |"
HEAD = (
    "workload",
    "device",
    "micro-batch",
    "predicted",
    "runs",
    "out of memory",
    "next size fails by",
    "next size in a run",
)


def measure(workload: autobatch.Workload, device: str) -> str:
    """Probe a workload within the memory of 48 samples and 2 % more, run the next size, and return a row."""
    with tempfile.TemporaryDirectory() as home:
        os.environ["AUTOBATCH_HOME"] = home
        options: dict[str, Any] = {"device": device, "precision": "fp32", "progress": False}
        one = autobatch.probe(workload, micro_batch=SIZE, **options).attempts[-1]
        budget = int(ROOM * (one.peak_reserved_bytes or one.peak_allocated_bytes or 0))
        found = autobatch.probe(workload, memory_budget=budget, **options)
        cells = (found.micro_batch, found.predicted_micro_batch, len(found.attempts), found.oom_count)
        after = (
            "-"
            if found.upper_bound_by == "cap"
            else outcome(workload, found.micro_batch + 1, budget, options)
        )
    return ROW.format(workload.name, device, *cells, found.upper_bound_by, after)


def outcome(workload: autobatch.Workload, size: int, budget: int, options: dict[str, Any]) -> str:
    """Run a size that a probe has refused, to see if it does fail."""
    try:
        autobatch.probe(workload, micro_batch=size, memory_budget=budget, **options)
    except autobatch.DoesNotFitError:
        return "out of memory"
    return "fits"


def main() -> None:
    """Print the table, and write it to a file if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", metavar="TEXT", default="", help="workloads whose name has this text")
    parser.add_argument("--device", nargs="*", choices=DEVICES, default=DEVICES)
    given = parser.parse_args()
    lines = [ROW.format(*HEAD), "|---" * len(HEAD) + "|"]
    for client in clients():
        if given.only not in client.name:
            continue
        for device in given.device:
            lines.append(row(client, device))
            print(lines[-1], flush=True)
            if given.out is not None:
                given.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def row(client: Client, device: str) -> str:
    """Return the row of a workload; one whose package is missing or that does not run says so."""
    try:
        workload = client.build()
    except ImportError as error:
        return ROW.format(client.name, device, "not run", *"---", f"{error.name} is not installed", "-")
    try:
        return measure(workload, device)
    except autobatch.AutobatchError as error:
        return ROW.format(client.name, device, "error", *"---", str(error).splitlines()[0][:90], "-")


if __name__ == "__main__":
    main()
