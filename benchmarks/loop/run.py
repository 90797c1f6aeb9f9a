"""The time of the training loop against loops that do the same work, and against forward, backward and step.

    python -m benchmarks.loop.run [--rounds 400] [--cases mlp,transformer]

One process with one thread runs all loops in turn, a short segment of steps each, so that other load on the
machine affects them equally. Micro-batches are either made before (``made``), or joined from samples in
memory (``joined``; a DataLoader without workers in the loops by hand).

- ``adam, clipped``: Adam, 4 micro-batches a step, clipping, the loss of each step. The reference is a loop
  written by hand that does the same. autobatch also checks, measures the norm and writes a line.
- ``sgd``: plain SGD without clipping. The reference is ``bare``: forward, backward and step, nothing else.

A figure is the median, over segments, of the ratio to the reference in the same round, for wall time and for
the CPU time of the process. They agree on an idle machine. On a busy one, read the CPU time.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.loop.cases import ACCUMULATION, CASES, Case, Precision, Source
from benchmarks.loop.contenders import WORKS, bare, by_batches, by_fit, by_hand, by_loader
from benchmarks.loop.peers import by_accelerate, by_fabric, by_lightning
from benchmarks.report import save, surroundings

OWN = {"fit": by_fit, "batches": by_batches, "batches of a loader": by_loader}
LOOPS: dict[str, dict[str, Callable[..., Callable[[], None]]]] = {
    "adam, clipped": {
        "hand": by_hand,
        **OWN,
        "fabric": by_fabric,
        "accelerate": by_accelerate,
        "lightning": by_lightning,
    },
    "sgd": {"bare": bare, **OWN, "hand": by_hand},
}
"""Loops of each work; the first is the reference."""
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
WARM_UP_STEPS = 20


def compare(
    case: Case, source: Source, precision: Precision, work: str, rounds: int
) -> dict[str, dict[str, Any]]:
    """Return for each loop its time per micro-batch, and its ratio to the reference."""
    steps: dict[str, Callable[[], None]] = {}
    for name, make in LOOPS[work].items():
        torch.manual_seed(0)
        try:
            steps[name] = make(case, source, precision, WORKS[work])
        except ImportError as error:
            print(f"{name} left out: {error}")
            continue
        for _ in range(min(WARM_UP_STEPS, case.steps * 4)):
            steps[name]()
    names = list(steps)
    seconds: dict[str, dict[str, list[float]]] = {name: {clock: [] for clock in CLOCKS} for name in names}
    for number in range(rounds // case.fewer):
        # The order rotates, so that no loop always follows the same other one.
        for name in names[number % len(names) :] + names[: number % len(names)]:
            before = {clock: read() for clock, read in CLOCKS.items()}
            for _ in range(case.steps):
                steps[name]()
            for clock, read in CLOCKS.items():
                seconds[name][clock].append((read() - before[clock]) / case.steps / ACCUMULATION)
    reference = seconds[names[0]]
    return {
        name: {clock: figures(seconds[name][clock], reference[clock]) for clock in CLOCKS} for name in names
    }


def figures(own: list[float], reference: list[float]) -> dict[str, Any]:
    """Return the median time, and the quartiles of the ratios round by round."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(own, reference, strict=True)], n=4)
    return {
        "microseconds_a_micro_batch": round(statistics.median(own) * 1e6, 1),
        "ratio": round(middle, 4),
        "quartiles": [round(low, 4), round(high, 4)],
    }


def rows(results: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield "| case | micro-batches | precision | work | loop | µs a micro-batch | CPU ratio | wall ratio |"
    yield "|---|---|---|---|---|---|---|---|"
    for result in results:
        about = " | ".join(result[key] for key in ("case", "source", "precision", "work"))
        for name, found in result["loops"].items():
            low, high = found["cpu"]["quartiles"]
            yield (
                f"| {about} | {name} | {found['cpu']['microseconds_a_micro_batch']:.0f} | "
                f"{found['cpu']['ratio']:.3f} [{low:.2f}, {high:.2f}] | {found['wall']['ratio']:.3f} |"
            )


def main() -> None:
    """Measure every combination, print and save the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--cases", default="mlp,transformer")
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument("--sources", default="made,joined")
    parser.add_argument("--works", default=";".join(LOOPS), help="separated by semicolons")
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = surroundings("accelerate", "lightning")
    results: list[dict[str, Any]] = []
    report |= {"rounds": options.rounds, "accumulation": ACCUMULATION, "threads": 1, "results": results}
    keys = ("case", "source", "precision", "work")
    cases, sources = options.cases.split(","), options.sources.split(",")
    for about in itertools.product(cases, sources, options.precisions.split(","), options.works.split(";")):
        loops = compare(CASES[about[0]], about[1], about[2], about[3], options.rounds)
        results.append({**dict(zip(keys, about, strict=True)), "loops": loops})
        print("\n".join(list(rows(results[-1:]))[2:]), flush=True)
        report["load_after"] = os.getloadavg()[0]
        if not options.no_save:
            # After each combination, because all of them take a quarter of an hour.
            save("loop", report, "\n".join(rows(results)) + "\n")


if __name__ == "__main__":
    main()
