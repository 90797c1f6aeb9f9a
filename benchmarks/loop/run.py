"""The time of the training loop against loops that do the same work, and against forward, backward and step.

    python -m benchmarks.loop.run [--rounds 400] [--cases mlp transformer]

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

import itertools
import os
import statistics
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.loop.loops import (
    ACCUMULATION,
    CASES,
    Step,
    Work,
    by_batches,
    by_fit,
    by_hand,
)
from benchmarks.loop.peers import by_accelerate, by_fabric, by_lightning
from benchmarks.report import CLOCKS, arguments, in_turn, markdown, save

OWN = {"fit": by_fit, "batches": by_batches}
PEERS = {"fabric": by_fabric, "accelerate": by_accelerate, "lightning": by_lightning}
WORKS: dict[
    str, tuple[Callable[..., torch.optim.Optimizer], float | None, dict[str, Callable[[Work], Step]]]
] = {
    "adam, clipped": (
        lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        1.0,
        {"hand": by_hand, **OWN, **PEERS},
    ),
    "sgd": (lambda parameters: torch.optim.SGD(parameters, lr=1e-3), None, {"bare": by_hand, **OWN}),
}
"""Optimizer, norm and loops of each work; the first loop is the reference."""
WARM_UP_STEPS = 20
HEAD = ("case", "micro-batches", "precision", "work", "loop", "µs a micro-batch", "CPU ratio", "wall ratio")


def compare(case: str, source: str, precision: str, work: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Return for each loop its time per micro-batch, and its ratio to the reference."""
    optimizer, max_norm, loops = WORKS[work]
    steps: dict[str, Step] = {}
    for name, make in loops.items():
        torch.manual_seed(0)
        try:
            steps[name] = make(Work(CASES[case], source == "made", precision, optimizer, max_norm))
        except ImportError as error:
            print(f"{name} left out: {error}")
            continue
        for _ in range(min(WARM_UP_STEPS, CASES[case].steps * 4)):
            steps[name]()
    seconds = in_turn(steps, rounds // CASES[case].fewer, CASES[case].steps)
    reference = seconds[next(iter(steps))]
    return {
        name: {clock: figures(seconds[name][clock], reference[clock]) for clock in CLOCKS} for name in steps
    }


def figures(own: list[float], reference: list[float]) -> dict[str, Any]:
    """Return the median time, and the quartiles of the ratios round by round."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(own, reference, strict=True)], n=4)
    return {
        "microseconds_a_micro_batch": round(statistics.median(own) / ACCUMULATION * 1e6, 1),
        "ratio": round(middle, 4),
        "quartiles": [round(low, 4), round(high, 4)],
    }


def rows(results: list[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield the rows of the table."""
    for result in results:
        for name, found in result["loops"].items():
            cpu, (low, high) = found["cpu"], found["cpu"]["quartiles"]
            yield [
                *(result[key] for key in ("case", "source", "precision", "work")),
                name,
                f"{cpu['microseconds_a_micro_batch']:.0f}",
                f"{cpu['ratio']:.3f} [{low:.2f}, {high:.2f}]",
                f"{found['wall']['ratio']:.3f}",
            ]


def main() -> None:
    """Measure every combination, print and save the table."""
    options = arguments(
        __doc__, rounds=400, cases=[*CASES], precisions=["fp32", "bf16"], sources=["made", "joined"],
        works=[*WORKS], no_save=False,
    )  # fmt: skip
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    asked = (options.cases, options.sources, options.precisions)
    for about in itertools.product(*asked, options.works):
        keys = ("case", "source", "precision", "work")
        loops = compare(*about, options.rounds)
        results.append({**dict(zip(keys, about, strict=True)), "loops": loops})
        print(markdown(HEAD, rows(results[-1:])), flush=True)
        if not options.no_save:
            # After each combination, because all of them take a quarter of an hour.
            save("loop", markdown(HEAD, rows(results)), "accelerate", "lightning", rounds=options.rounds)


if __name__ == "__main__":
    main()
