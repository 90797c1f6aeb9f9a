"""Accuracy of the limits found by autobatch and by other finders, on the same limits in the same run.

    python -m benchmarks.probe.run [--only gpt lstm] [--others none] [--save]

It takes about eight minutes on two idle cores. The other finders need accelerate and lightning; one that is
not installed is left out.

- All finders run under the same meter. On ``cpu`` it counts the bytes of tensors against the budget. On
  ``sim:t4`` they go through a model of CUDA's caching allocator. Batches count after collation.
- A plain loop of torch under the same meter gives the truth (doubling, then bisection). On ``sim:t4``, where
  memory need not be monotone, every size near the answers runs as well. A search that ends at the nearest
  boundary can be under 1 there.
- accelerate runs the steps that autobatch runs (three optimizer steps). The decorated function builds model
  and optimizer. It starts from the whole dataset if that is smaller.
- Lightning runs with its defaults, ``accumulate_grad_batches=2``, no logger and no checkpoints.
"""

from __future__ import annotations

import gc
import multiprocessing
from statistics import median
from typing import Any

import torch

from benchmarks.probe.finders import finders
from benchmarks.probe.limits import BUDGETS, Limit, by_autobatch, workload_of
from benchmarks.report import arguments, markdown, save

LIGHTNING = ("mlp-heavy", "conv", "resnet-bn", "gpt", "gpt-ragged", "lstm", "contrastive")
"""Workloads for Lightning, whose trials cost a loader and two loops each."""
HEAD = (
    "finder",
    "limits",
    "found ÷ true: worst … best, median",
    *(f"{what}: median, most" for what in ("runs", "out-of-memory errors", "seconds")),
)


def measure(task: tuple[str, str, bool]) -> list[dict[str, Any]]:
    """Measure all budgets of a workload on a device."""
    name, device, with_others = task
    torch.set_num_threads(1)
    # Every finder collects garbage after an error. Freezing spares it the imported objects.
    gc.collect()
    gc.freeze()
    workload = workload_of(name)
    return [measure_limit(name, Limit(workload, device, one), with_others) for one in BUDGETS[device][name]]


def measure_limit(name: str, limit: Limit, with_others: bool) -> dict[str, Any]:
    answer = by_autobatch(limit)
    setup = limit.setup()
    true = limit.true(setup, answer.found)
    exact = answer.found >= limit.cap or not limit.fits(setup, answer.found + 1)
    rows = {"autobatch": answer._asdict()}
    if with_others:
        for finder, find in finders(lightning=name in LIGHTNING).items():
            rows[finder] = find(limit)._asdict()
    print(f"{name:18} {limit.device:7} {limit.budget:>8}  true {true:5}  found {answer.found:5}", flush=True)
    return {
        "workload": name,
        "device": limit.device,
        "budget": limit.budget,
        "true": true,
        "exact": bool(answer.found and limit.fits(setup, answer.found) and exact),
        "finders": rows,
    }


def table(limits: list[dict[str, Any]]) -> str:
    """Return the finders over all limits and by device, and every limit."""
    exact = sum(one["exact"] for one in limits)
    names = list(dict.fromkeys(name for one in limits for name in one["finders"]))
    text = (
        f"autobatch is exact in {exact} of {len(limits)} limits: a plain loop runs at its answer, and\n"
        "not at the next size (or the answer is the cap).\n"
    )
    for device in (None, *BUDGETS):
        chosen = [one for one in limits if device in (None, one["device"])]
        rows = [cells for name in names if (cells := row(name, chosen))]
        text += f"\n## {device or 'All'}\n\n{markdown(HEAD, rows)}"
    every = []
    for one in limits:
        answer = one["finders"]["autobatch"]
        about = [one[key] for key in ("workload", "device", "budget", "true")]
        found = [answer[key] for key in ("found", "runs", "ooms")]
        every.append([*about, *found, "yes" if one["exact"] else "**no**"])
    head = ("workload", "device", "budget", "true", "found", "runs", "errors", "exact")
    return f"{text}\n{markdown(head, every)}"


def row(name: str, limits: list[dict[str, Any]]) -> list[str]:
    """Return the row of one finder over some limits; empty if it ran on none."""
    # A limit under which nothing fits has no share to find.
    answers = [
        (one["true"], one["finders"][name]) for one in limits if one["true"] and name in one["finders"]
    ]
    if not answers:
        return []
    shares = sorted(answer["found"] / true for true, answer in answers)
    columns = [[answer[field] for _, answer in answers] for field in ("runs", "ooms", "seconds")]
    return [
        name,
        str(len(answers)),
        f"{shares[0]:.3f} … {shares[-1]:.3f}, {median(shares):.3f}",
        *(f"{median(values):.3g}, {max(values):.3g}" for values in columns),
    ]


def main() -> None:
    options = arguments(__doc__, only=[*BUDGETS["cpu"]], others="all", processes=2, save=False)
    names = [(device, name) for device in BUDGETS for name in options.only]
    tasks = [(name, device, options.others == "all") for device, name in names]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        limits = [one for many in pool.imap(measure, tasks, chunksize=1) for one in many]
    text = table(limits)
    print(text)
    if options.save:
        print(save("probe", text, "accelerate", "lightning", others=options.others))


if __name__ == "__main__":
    main()
