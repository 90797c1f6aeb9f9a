"""Accuracy of the limits that autobatch finds, against a plain loop of torch.

    python -m benchmarks.probe.run [--only gpt lstm] [--save]

It takes about five minutes on two idle cores. The loop runs under the meter of the device: on ``cpu`` it
counts the bytes of tensors against the budget, on ``sim:t4`` they go through a model of CUDA's caching
allocator. Batches count after collation. The truth is the largest size at which the loop runs (doubling, then
bisection). On ``sim:t4``, where memory need not be monotone, every size near the answers runs as well. A
search that ends at the nearest boundary can be under 1 there.
"""

from __future__ import annotations

import gc
import multiprocessing
from statistics import median
from typing import Any

import torch

from benchmarks.probe.limits import BUDGETS, Limit, by_autobatch
from benchmarks.report import arguments, markdown, save
from benchmarks.workloads import WORKLOADS

HEAD = (
    "device",
    "limits",
    "exact",
    "found ÷ true: worst … best, median",
    *(f"{what}: median, most" for what in ("runs", "out-of-memory errors", "seconds")),
)


def measure(task: tuple[str, str]) -> list[dict[str, Any]]:
    """Measure all budgets of a workload on a device."""
    name, device = task
    torch.set_num_threads(1)
    # A search collects garbage after an error. Freezing spares it the imported objects.
    gc.collect()
    gc.freeze()
    workload = WORKLOADS[name]()
    return [measure_limit(name, Limit(workload, device, budget)) for budget in BUDGETS[device][name]]


def measure_limit(name: str, limit: Limit) -> dict[str, Any]:
    """Return the answer of a search beside the truth; it is exact at the cap, too."""
    answer = by_autobatch(limit)
    setup = limit.setup()
    true = limit.true(setup, answer.found)
    fits = bool(answer.found) and limit.fits(setup, answer.found)
    is_exact = fits and (answer.found >= limit.cap or not limit.fits(setup, answer.found + 1))
    row = {"workload": name, "device": limit.device, "budget": limit.budget, "true": true}
    print(*row.values(), "found", answer.found, flush=True)
    return {**row, **answer._asdict(), "exact": ("**no**", "yes")[is_exact]}


def table(limits: list[dict[str, Any]]) -> str:
    """Return the limits by device, and every limit."""
    names = ("workload", "device", "budget", "true", "found", "runs", "errors", "exact")
    every = [[row[name] for name in names] for row in limits]
    return f"{markdown(HEAD, [summary(device, limits) for device in BUDGETS])}\n{markdown(names, every)}"


def summary(device: str, limits: list[dict[str, Any]]) -> list[str]:
    """Return the line of a device."""
    rows = [row for row in limits if row["device"] == device]
    # A limit under which nothing fits has no share to find.
    shares = sorted(row["found"] / row["true"] for row in rows if row["true"]) or [1.0]
    columns = [[row[name] for row in rows] or [0] for name in ("runs", "errors", "seconds")]
    return [
        device,
        str(len(rows)),
        str(sum(row["exact"] == "yes" for row in rows)),
        f"{shares[0]:.3f} … {shares[-1]:.3f}, {median(shares):.3f}",
        *(f"{median(values):.3g}, {max(values):.3g}" for values in columns),
    ]


def main() -> None:
    """Measure every limit, print and save the tables."""
    options = arguments(__doc__, only=[*BUDGETS["cpu"]], processes=2, save=False)
    tasks = [(name, device) for device in BUDGETS for name in options.only]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        limits = [limit for many in pool.imap(measure, tasks, chunksize=1) for limit in many]
    text = table(limits)
    print(text)
    if options.save:
        print(save("probe", text))


if __name__ == "__main__":
    main()
