"""Accuracy of the limits found by autobatch and by other finders, on the same limits in the same run.

    python -m benchmarks.probe.run

It takes about eight minutes on two idle cores. The other finders need accelerate and lightning. The rows of a
finder that is not installed state so.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import json
import multiprocessing
import os
import platform
import re
import tempfile
import time
from pathlib import Path

import torch

from autobatch.core.units import format_bytes
from autobatch.device.host import cpu_name, host_memory
from benchmarks.probe.finders import by_autobatch, finders
from benchmarks.probe.limits import BUDGETS, Limit, workload_of
from benchmarks.probe.table import markdown

RESULTS = Path(__file__).parents[1] / "results"
COMMAND = "python -m benchmarks.probe.run"
LIGHTNING = ("mlp-heavy", "conv", "resnet-bn", "gpt", "gpt-ragged", "lstm", "contrastive")
"""Workloads for Lightning, whose trials cost a loader and two loops each."""


def measure(task: tuple[str, str]) -> list[dict[str, object]]:
    """Measure all budgets of a workload on a device."""
    name, device = task
    torch.set_num_threads(1)
    # Every finder collects garbage after an error. Freezing spares it the imported objects.
    gc.collect()
    gc.freeze()
    workload = workload_of(name)
    return [measure_limit(name, Limit(workload, device, budget)) for budget in BUDGETS[device][name]]


def measure_limit(name: str, limit: Limit) -> dict[str, object]:
    answer, more = by_autobatch(limit)
    setup = limit.setup()
    true = limit.true(setup, answer.found)
    neighbour = answer.found >= limit.cap or not limit.fits(setup, answer.found + 1)
    rows: dict[str, dict[str, object] | None] = {"autobatch": answer.to_json() | more}
    for finder, find in finders(lightning=name in LIGHTNING).items():
        rows[finder] = find(limit).to_json() if find else None
    for row in rows.values():
        if row is not None:
            row["steps_later"] = limit.later(setup, row["found"])
    print(f"{name:18} {limit.device:7} {limit.budget:>8}  true {true:5}  found {answer.found:5}", flush=True)
    return {
        "workload": name,
        "device": limit.device,
        "budget": limit.budget,
        "dataset": limit.cap,
        "true": true,
        "exact": bool(answer.found and limit.fits(setup, answer.found) and neighbour),
        "finders": rows,
    }


def environment() -> dict[str, object]:
    """Return what the figures depend on."""
    memory = host_memory()
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "command": COMMAND,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory": None if memory.total_bytes is None else format_bytes(memory.total_bytes),
        "python": platform.python_version(),
        **{name: version_of(name) for name in ("torch", "accelerate", "lightning")},
    }


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", help="workloads (default: all)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    # No saved limit of this machine may answer, and nothing is left behind.
    with tempfile.TemporaryDirectory() as home:
        os.environ["AUTOBATCH_HOME"] = home
        start = time.perf_counter()
        tasks = [(name, device) for device in BUDGETS for name in options.only or BUDGETS[device]]
        with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
            limits = [one for many in pool.imap_unordered(measure, tasks, chunksize=1) for one in many]
    order = {task: number for number, task in enumerate(tasks)}
    limits.sort(key=lambda one: order[one["workload"], one["device"]])
    found = environment() | {"seconds": round(time.perf_counter() - start), "lightning_on": list(LIGHTNING)}
    slug = re.sub(r"[^a-z0-9]+", "-", str(found["cpu"]).lower()).strip("-")
    stem = options.out / f"probe_{slug}_{found['date']}"
    options.out.mkdir(parents=True, exist_ok=True)
    text = markdown(found, limits)
    stem.with_suffix(".json").write_text(
        json.dumps({"environment": found, "limits": limits}, indent=1) + "\n"
    )
    stem.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
