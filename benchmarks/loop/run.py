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
import tempfile
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import autobatch
from benchmarks.loop.peers import by_accelerate, by_fabric, by_lightning
from benchmarks.loop.work import ACCUMULATION, CASES, ENDLESS, Paced, Segment, Work, by_hand, loss_of
from benchmarks.report import CLOCKS, arguments, in_turn, markdown, save


def by_fit(work: Work) -> Segment:
    """Run `autobatch.fit` as it is."""

    def train(stepped: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            autobatch.fit(
                work.workload(), device="cpu", memory_budget="1GiB", precision=work.precision, trials=0,
                target_batch=ACCUMULATION * work.case.micro_batch, max_micro_batch=work.case.micro_batch,
                steps=ENDLESS, max_grad_norm=work.max_grad_norm, split_check="off", out=folder,
                progress=False, until=stepped,
            )  # fmt: skip

    return Paced(work.case.steps, train)


def by_batches(work: Work) -> Segment:
    """Run a loop of one's own with `autobatch.batches`."""
    model, optimizer = work.model()
    size, workload = work.case.micro_batch, work.workload()
    counts = {"target_batch": ACCUMULATION * size, "max_micro_batch": size}
    plan = autobatch.plan(
        workload, device="cpu", memory_budget="1GiB", split_check="off", progress=False, **counts
    )
    batches = iter(autobatch.batches(workload, plan, optimizer=optimizer, steps=ENDLESS))

    def step() -> None:
        batch = next(batches)
        for micro in batch:
            with work.context():
                loss = loss_of(model, micro.data)
            batch.backward(loss)
        batch.step(max_grad_norm=work.max_grad_norm)

    return work.segment(step)


OWN = {"fit": by_fit, "batches": by_batches}
PEERS = {"fabric": by_fabric, "accelerate": by_accelerate, "lightning": by_lightning}
WORKS: dict[str, tuple[Any, float | None, dict[str, Any]]] = {
    "adam, clipped": (torch.optim.Adam, 1.0, {"hand": by_hand, **OWN, **PEERS}),
    "sgd": (lambda weights: torch.optim.SGD(weights, lr=1e-3), None, {"bare": by_hand, **OWN}),
}
"""Optimizer, norm and loops of each work; the first loop is the reference."""
HEAD = ("case", "micro-batches", "precision", "work", "loop", "µs a micro-batch", "CPU ratio", "wall ratio")


def compare(case: str, source: str, precision: str, work: str, rounds: int) -> Iterator[list[str]]:
    """Yield the row of each loop: its time per micro-batch, and its ratio to the reference."""
    optimizer, max_norm, loops = WORKS[work]
    segments: dict[str, Segment] = {}
    for name, make in loops.items():
        torch.manual_seed(0)
        try:
            segments[name] = make(Work(CASES[case], source == "made", precision, optimizer, max_norm))
        except ImportError as error:
            print(f"{name} left out: {error}")
    in_turn(segments, 1)  # warms up
    seconds = in_turn(segments, max(2, rounds // (20 // CASES[case].steps)))
    reference = seconds[next(iter(segments))]
    micro_batches = ACCUMULATION * CASES[case].steps
    for name, own in seconds.items():
        ratios = {
            clock: [a / b for a, b in zip(own[clock], reference[clock], strict=True)] for clock in CLOCKS
        }
        low, middle, high = statistics.quantiles(ratios["cpu"], n=4)
        micros = statistics.median(own["cpu"]) / micro_batches * 1e6
        wall = statistics.median(ratios["wall"])
        figures = (f"{micros:.0f}", f"{middle:.3f} [{low:.2f}, {high:.2f}]", f"{wall:.3f}")
        yield [case, source, precision, work, name, *figures]


def main() -> None:
    """Measure every combination, print and save the table."""
    options = arguments(
        __doc__, rounds=400, cases=[*CASES], precisions=["fp32", "bf16"], sources=["made", "joined"],
        works=[*WORKS], no_save=False,
    )  # fmt: skip
    torch.set_num_threads(1)
    rows: list[list[str]] = []
    asked = (options.cases, options.sources, options.precisions, options.works)
    with tempfile.TemporaryDirectory() as os.environ["AUTOBATCH_HOME"]:
        for about in itertools.product(*asked):
            own = [*compare(*about, options.rounds)]
            print(markdown(HEAD, own), flush=True)
            rows += own
            if not options.no_save:
                # After each combination, because all of them take a quarter of an hour.
                save("loop", markdown(HEAD, rows), "accelerate", "lightning", rounds=options.rounds)


if __name__ == "__main__":
    main()
