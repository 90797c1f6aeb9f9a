"""The probe on models of other libraries and of `examples/`: runs, errors, and the evidence for the limit.

python -m benchmarks.clients.run [--out FILE] [--only TEXT]

The rows take the place of those of the same workload in a file. ``--only`` takes workloads by a part of
their names.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import autobatch
from benchmarks.clients import gallery, of_others, of_torch, of_transformers
from benchmarks.clients.data import Build
from benchmarks.report import arguments, markdown

SIZE = 48
"""Samples whose memory is the budget, nearly."""
ROOM = 1.02
"""Budget as a share of that memory."""
DEVICES = ["cpu", "sim:t4"]
HEAD = (
    "workload",
    "device",
    "micro-batch",
    "predicted",
    "runs",
    "out of memory",
    "next size fails by",
    "next size in a run",
    "lines",
    "off a plain loop",
    "resumed",
)


def measure(workload: autobatch.Workload, device: str) -> list[object]:
    """Probe a workload within the memory of 48 samples and 2 % more, and run the next size."""
    with tempfile.TemporaryDirectory() as home:
        os.environ["AUTOBATCH_HOME"] = home
        options: dict[str, Any] = {"device": device, "precision": "fp32", "progress": False}
        one = autobatch.probe(workload, micro_batch=SIZE, **options).attempts[-1]
        budget = int(ROOM * (one.peak_reserved_bytes or one.peak_allocated_bytes or 0))
        found = autobatch.probe(workload, memory_budget=budget, **options)
        after = "-"
        if found.upper_bound_by != "cap":
            after = outcome(workload, found.micro_batch + 1, budget, options)
    runs = (len(found.attempts), found.oom_count)
    return [found.micro_batch, found.predicted_micro_batch, *runs, found.upper_bound_by, after]


def outcome(workload: autobatch.Workload, size: int, budget: int, options: dict[str, Any]) -> str:
    """Run a size that a probe has refused, to see if it does fail."""
    try:
        autobatch.probe(workload, micro_batch=size, memory_budget=budget, **options)
    except autobatch.DoesNotFitError:
        return "out of memory"
    return "fits"


def clients() -> Iterator[tuple[str, Build]]:
    """Yield the workloads in the order of the table: their names, and functions that build them."""
    of_others.load_torchvision()
    for part in (of_transformers, of_torch, of_others, gallery):
        yield from part.WORKLOADS.items()


def row(name: str, build: Build, device: str) -> list[object]:
    """Return the row of a workload; one whose package is missing or that does not run says so."""
    try:
        return [name, device, *measure(build(), device), *trained(name, device)]
    except ImportError as error:
        return [name, device, "not run", *"---", f"{error.name} is not installed", *"----"]
    except autobatch.AutobatchError as error:
        return [name, device, "error", *"---", str(error).splitlines()[0][:90], *"----"]


def trained(name: str, device: str) -> list[object]:
    """Return what is known of an example beyond its limit, once: lines, exactness, resume."""
    if name not in gallery.GALLERY or device != DEVICES[0]:
        return ["-"] * 3
    with tempfile.TemporaryDirectory() as home:
        os.environ["AUTOBATCH_HOME"] = home
        off = gallery.distance(name, Path(home, "exact"))
        same = gallery.resumes(name, Path(home, "resumed"))
    return [gallery.changed_lines(name), f"{off:.0e}", "same bits" if same else "other bits"]


def rows_of(path: Path | None) -> dict[tuple[str, ...], list[object]]:
    """Read the rows of an earlier table by workload and device; columns that it lacks are empty."""
    lines = path.read_text(encoding="utf-8").splitlines()[2:] if path and path.exists() else []
    cells = [line.strip("| ").split(" | ") for line in lines]
    return {tuple(row[:2]): [*row, *"---"][: len(HEAD)] for row in cells}


def main() -> None:
    """Print the rows, and put them in the place of those of the same workload in a file if asked."""
    given = arguments(__doc__, out=None, only="", device=DEVICES)
    rows = rows_of(given.out)
    for name, build in clients():
        for device in given.device if given.only in name else ():
            rows[name, device] = row(name, build, device)
            print(*rows[name, device], sep=" | ", flush=True)
            if given.out is not None:
                given.out.write_text(markdown(HEAD, rows.values()), encoding="utf-8")


if __name__ == "__main__":
    main()
