"""The result of the tuner against an exhaustive grid, what it gains, and what it takes.

    python -m benchmarks.tune.run [--workloads resnet-bn u-net experts] [--trials 30] [--seeds 5]

For each workload, on this CPU with one thread, with every knob named that applies there but `compile`, which
would compile for half a minute at each point of the grid:
1. A grid measures every configuration as a ratio to the default in the same round: the median of five rounds.
2. Searches with the tuner and at random replay the ratios of the grid with its noise, five seeds of each with
   the same number of configurations. Both compare what they choose with the default again, as the tuner does.
3. The tuner runs once for real. Its choice and the default then run in turn again, in rounds of their own:
   their median must not be below the bound that the tuner quotes.

Seconds are the CPU time of the process. With one thread they equal the wall time of an idle machine, and on a
busy machine they are the figure to read.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import optuna
import torch

from autobatch import Progress, Workload
from autobatch.core.errors import Infeasible
from autobatch.core.knobs import Configuration, SearchAxis, applicable, defaults
from autobatch.core.options import Options
from autobatch.rehearsal.process import ThisProcess
from autobatch.rehearsal.setup import open_setup
from autobatch.search.find_limit import find_limit
from autobatch.tuning.compare import ROUNDS, Measurement, compare
from autobatch.tuning.fastest import Search
from autobatch.tuning.space import changes, look_at_workload
from autobatch.tuning.trial import Trials
from benchmarks.report import arguments, markdown, save
from benchmarks.workloads import WORKLOADS, InMemory

CASES = {
    "resnet-bn": {"target_batch": 512, "memory_budget": "5MiB"},
    "u-net": {"target_batch": 512, "memory_budget": "4MiB"},
    "experts": {"target_batch": 512, "memory_budget": "3MiB"},
}
"""Budgets for a fraction of the batch, so that the plan accumulates; the batch of the experts fits whole."""
KNOBS = ("micro_batch_shift", "precision", "checkpointing", "channels_last", "optimizer")
GRID_ROUNDS = 5
Key = tuple[Any, ...]


class Grid(NamedTuple):
    """Every configuration of a workload, by its values."""

    ratios: dict[Key, float]
    """Speed ÷ the default's; 0 for an infeasible configuration."""
    noise: float
    """Standard deviation of the logarithm of a measured speed."""


@dataclasses.dataclass
class Replayed:
    """Trials that replay the figures of a grid with its noise."""

    grid: Grid
    default: dict[str, Any]
    seed: int

    def __post_init__(self) -> None:
        """Seed the noise."""
        self.draw = random.Random(self.seed)

    def measure(self, values: Configuration) -> Measurement:
        """Return a measurement of the grid with noise."""
        ratio = self.grid.ratios[tuple((self.default | values).values())]
        if not ratio:
            raise Infeasible("not feasible in the grid")
        return Measurement(1000 * ratio * math.exp(self.draw.gauss(0, self.grid.noise)), 1)


def open_trials(workload: Workload, target_batch: int, memory_budget: str) -> tuple[Trials, list[SearchAxis]]:
    """Probe a workload, and return its trials and the choices of its knobs."""
    workload = dataclasses.replace(workload, train_data=InMemory(workload.train_data, 4 * target_batch))
    options = Options().with_values(target_batch=target_batch, memory_budget=memory_budget, device="cpu")
    setup = dataclasses.replace(open_setup(workload, options), clock=time.process_time)
    process = ThisProcess(setup)
    with tempfile.TemporaryDirectory() as home:
        found = find_limit(process, options, share=target_batch, home=Path(home), progress=Progress())
    limit = found.probe.micro_batch
    axes, _ = applicable(look_at_workload(setup, limit, 1000, None), KNOBS)
    return Trials(process=process, limit=limit, cap=target_batch, samples=target_batch), axes


def measure_grid(trials: Trials, axes: list[SearchAxis]) -> Grid:
    """Measure every configuration in every round, in a new order for each, beside the default."""
    names, default = [axis.name for axis in axes], defaults(axes)
    points = list(itertools.product(*(axis.choices for axis in axes)))
    found: dict[Key, list[float]] = {point: [] for point in points}
    for number in range(GRID_ROUNDS):
        random.Random(number).shuffle(points)
        for point in points:
            base = trials.measure({}).samples_per_s
            changed = changes(dict(zip(names, point, strict=True)), default)
            try:
                found[point].append(trials.measure(changed).samples_per_s / base)
            except Infeasible:
                found[point].append(0.0)
    logs = [[math.log(ratio) for ratio in ratios] for ratios in found.values() if all(ratios)]
    noise = math.sqrt(statistics.median(map(statistics.variance, logs)) / 2)
    medians = {point: statistics.median(ratios) for point, ratios in found.items()}
    return Grid(medians | {tuple(default.values()): 1.0}, noise)


def find(trials: Any, axes: list[SearchAxis], budget: int, seed: int) -> Any:
    """Search with the tuner, on a study in memory."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    return Search(trials=trials, study=study, axes=axes, budget=budget, progress=Progress()).find()[1]


def by_chance(replayed: Replayed, axes: list[SearchAxis], budget: int, seed: int) -> Configuration:
    """Search at random, and compare the best with the default as the tuner does."""
    draw, default = random.Random(seed), defaults(axes)
    tried = [{axis.name: draw.choice(axis.choices) for axis in axes} for _ in range(budget - 1)]
    feasible = [values for values in tried if replayed.grid.ratios[tuple(values.values())]]
    best = max(feasible, key=lambda values: replayed.measure(values).samples_per_s, default=default)
    is_faster = best != default and compare(replayed.measure, default, best).is_faster
    return best if is_faster else default


def examine(name: str, *, trials: int, seeds: int) -> dict[str, Any]:
    """Run all three parts for a workload."""
    runner, axes = open_trials(WORKLOADS[name](), **CASES[name])  # type: ignore[arg-type]
    start = time.process_time()
    grid = measure_grid(runner, axes)
    grid_seconds = time.process_time() - start
    most = max(grid.ratios.values())
    shares: dict[str, list[float]] = {"autobatch": [], "random": []}
    for seed in range(seeds):
        tuned = find(Replayed(grid, defaults(axes), seed), axes, trials, seed).best
        drawn = by_chance(Replayed(grid, defaults(axes), seed), axes, trials, seed)
        for who, chosen in (("autobatch", tuned), ("random", drawn)):
            shares[who].append(grid.ratios[tuple(chosen.values())] / most)
    start = time.process_time()
    found = find(runner, axes, trials, 0)
    seconds = time.process_time() - start
    base, best = ([] for _ in range(2))
    for _ in range(ROUNDS):
        base.append(runner.measure({}).samples_per_s)
        best.append(runner.measure(found.changes).samples_per_s)
    ratios = [after / before for before, after in zip(base, best, strict=True)]
    return {
        "configurations": len(grid.ratios),
        "noise": round(grid.noise, 4),
        "grid_seconds": round(grid_seconds, 1),
        **{who: [round(statistics.median(all_), 3), round(min(all_), 3)] for who, all_ in shares.items()},
        "choice": found.changes,
        "at_least": None if found.low is None else round(found.low, 3),
        "again": round(statistics.median(ratios), 3),
        "of_grid_best": round(grid.ratios[tuple(found.best.values())] / most, 3),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    """Measure each workload, print and save the table."""
    given = vars(arguments(__doc__, workloads=[*CASES], trials=30, seeds=5, dry=False))
    torch.set_num_threads(1)
    names, is_dry = given.pop("workloads"), given.pop("dry")
    rows = {name: examine(name, **given) for name in names}
    head = ("workload", *next(iter(rows.values())))
    text = markdown(head, [(name, *row.values()) for name, row in rows.items()])
    print(text)
    if not is_dry:
        print(save("tune", text, "optuna", **given))


if __name__ == "__main__":
    main()
