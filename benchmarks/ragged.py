"""Time, padding and gradient of training on samples of many lengths, split by size, ÷ split by count.

    python -m benchmarks.ragged [--rounds 3] [--lengths sft]

`autobatch.fit` trains a small transformer within the memory of 8 of its longest samples, on batches of 128.
Both ways to split run in turn, on the same batches. A time is that from step to step, on the CPU the CPU time
of the process, which other processes disturb least. The gradient is that of one step of SGD in float64.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

import autobatch
from autobatch import Workload
from autobatch.report.facts import peak_bytes
from benchmarks.report import arguments, markdown, save
from benchmarks.workloads import Gpt, adamw, next_token, pad

VOCABULARY, LONGEST, SAMPLES, TARGET, STEPS = 512, 512, 4096, 128, 9
LENGTHS: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "log-normal": lambda draw: LONGEST * np.exp(draw.normal(-1.8, 0.8, SAMPLES)),
    "uniform": lambda draw: draw.uniform(1, LONGEST + 1, SAMPLES),
    "sft": lambda draw: np.where(
        draw.random(SAMPLES) < 0.9,
        LONGEST * np.exp(draw.normal(-2.2, 0.6, SAMPLES)),
        draw.uniform(LONGEST / 2, LONGEST + 1, SAMPLES),
    ),
    "two-peaked": lambda draw: np.where(
        draw.random(SAMPLES) < 0.6,
        draw.normal(LONGEST / 5, LONGEST / 20, SAMPLES),
        draw.normal(0.8 * LONGEST, LONGEST / 20, SAMPLES),
    ),
    "equal": lambda draw: np.full(SAMPLES, LONGEST),
}
SPLITS = ("count", "auto")
DEVICE, CLOCK = ("cuda", time.perf_counter) if torch.cuda.is_available() else ("cpu", time.process_time)


def workload_of(lengths: str, padding: Counter[str]) -> Workload:
    """Return a workload that counts padded and real tokens."""
    sizes = LENGTHS[lengths](np.random.default_rng(0)).astype(int).clip(2, LONGEST)
    sizes[SAMPLES // 2] = LONGEST
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, VOCABULARY, (int(size) + 1,), generator=draw) for size in sizes]

    def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        batch = pad(samples)
        padding.update(padded=batch[0].numel(), real=sum(len(ids) for ids, _ in samples))
        return batch

    return Workload(
        model=lambda: Gpt(64, 2, vocabulary=VOCABULARY),
        train_data=[(row[:-1], row[1:]) for row in rows],
        collate=collate,
        loss=next_token,
        optimizer=adamw,
        learning_rate=1e-3,
        size_of=lambda sample: len(sample[0]),
    )


def budget_of(workload: Workload) -> int:
    """Return the memory of a step over 8 of the longest samples, in bytes."""
    probe = autobatch.probe(workload, micro_batch=8, device=DEVICE, memory_budget="8GiB", progress=False)
    return peak_bytes(probe.attempts[-1]) or 0


def fit(workload: Workload, out: Path, **options: Any) -> autobatch.Result:
    return autobatch.fit(
        workload, device=DEVICE, target_batch=TARGET, trials=0, split_check="off", progress=False,
        out=str(out), **options,
    )  # fmt: skip


def measure(lengths: str, rounds: int, folder: Path) -> list[str]:
    """Return the row of a distribution."""
    padding: Counter[str] = Counter()
    workload = workload_of(lengths, padding)
    budget, seconds, padded = budget_of(workload), Counter[str](), dict[str, float]()
    for number in range(rounds):
        for split in SPLITS:
            padding.clear()
            ticks: list[float] = []

            def tick(_: object, ticks: list[float] = ticks) -> None:
                ticks.append(CLOCK())

            out = folder / f"{lengths}-{split}-{number}"
            fit(workload, out, steps=STEPS, split=split, memory_budget=budget, until=tick)
            seconds[split] += ticks[-1] - ticks[0]  # the first step warms up
            padded[split] = padding["padded"] / padding["real"]
    figures = [seconds["auto"] / seconds["count"], *(padded[split] for split in SPLITS)]
    error = gradient_error(workload, folder / lengths, 2 * budget)
    return [lengths, *(f"{figure:.2f}" for figure in figures), f"{error:.0e}"]


def gradient_error(workload: Workload, folder: Path, budget: int) -> float:
    """Return how far the steps of both splits end from each other, as a share of the step."""

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return workload.model().double()

    # A step so long that the rounding of the weights themselves is small.
    exact = replace(workload, model=model, optimizer=lambda weights, _: torch.optim.SGD(weights, 1e4))
    start, by_count, by_size = (
        parameters_to_vector(each.parameters()).detach().cpu()
        for each in (
            model(),
            *(
                fit(exact, folder / split, steps=1, split=split, memory_budget=budget).model
                for split in SPLITS
            ),
        )
    )
    return float((by_size - by_count).norm() / (by_count - start).norm())


def main() -> None:
    """Print and save the table."""
    options = arguments(__doc__, rounds=3, lengths=[*LENGTHS], no_save=False)
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AUTOBATCH_HOME"] = folder
        for lengths in options.lengths:
            rows.append(measure(lengths, options.rounds, Path(folder)))
            print(*rows[-1], flush=True)
    head = ("lengths", "time ÷ count", "padded ÷ real by count", "by size", "gradient")
    table = markdown(head, rows)
    print(table)
    if not options.no_save:
        print(save("ragged", table, rounds=options.rounds))


if __name__ == "__main__":
    main()
