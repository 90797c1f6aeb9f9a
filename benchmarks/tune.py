"""The result of the tuner against an exhaustive grid, what it gains, and what it takes.

    python -m benchmarks.tune [--workloads resnet-bn u-net experts] [--trials 30]

For each workload, on this CPU with one thread, with every knob named that applies there but `compile`, which
would compile for half a minute at each point of the grid, the tuner runs once. Its choice and the default
then run in turn again: their median must not be below the bound that the tuner quotes. A grid measures every
configuration as a ratio to the default in the same round, the median of five rounds.

Seconds are the CPU time of the process.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import optuna
import torch

from autobatch import Progress, Workload
from autobatch.core.errors import Infeasible
from autobatch.core.options import Options
from autobatch.core.records import Configuration
from autobatch.planning import make_plan
from autobatch.rehearsal.process import ThisProcess
from autobatch.rehearsal.setup import open_setup
from autobatch.search.find_limit import find_limit
from autobatch.tuning.fastest import Knob, Search, choose_knobs, defaults
from autobatch.tuning.trial import ROUNDS, Trials
from benchmarks.report import arguments, markdown, save
from benchmarks.workloads import WORKLOADS

BUDGETS = {"resnet-bn": "5MiB", "u-net": "4MiB", "experts": "3MiB"}
"""For a fraction of the batch, so that the plan accumulates; the batch of the experts fits whole."""
TARGET, GRID_ROUNDS = 512, 5
KNOBS = ("micro_batch_shift", "precision", "channels_last", "optimizer")


def open_trials(workload: Workload, memory_budget: str) -> tuple[Trials, list[Knob]]:
    """Probe a workload, and return its trials and the choices of its knobs."""
    options = Options(target_batch=TARGET, memory_budget=memory_budget, device="cpu")
    setup = dataclasses.replace(open_setup(workload, options), clock=time.process_time)
    process = ThisProcess(setup)
    with tempfile.TemporaryDirectory() as home:
        found = find_limit(process, options, share=TARGET, home=Path(home), progress=Progress())
    limit = found.probe.micro_batch
    knobs, _, _ = choose_knobs(setup, KNOBS, limit, 1000, None)
    plan = make_plan(target_batch=TARGET, micro_batch_limit=limit, learning_rate=workload.learning_rate)
    return Trials(process=process, plan=plan), knobs


def speed_ratio(trials: Trials, changed: Configuration) -> float:
    """Return the speed of a configuration ÷ that of the default; 0 if it does not run."""
    base = trials.measure({})
    try:
        return trials.measure(changed) / base
    except Infeasible:
        return 0.0


def measure_grid(trials: Trials, knobs: list[Knob]) -> dict[tuple[Any, ...], float]:
    """Measure every configuration in every round, in a new order for each, beside the default."""
    names, default = [knob.name for knob in knobs], defaults(knobs)
    points = list(itertools.product(*(knob.choices for knob in knobs)))
    ratios: dict[tuple[Any, ...], list[float]] = {point: [] for point in points}
    for number in range(GRID_ROUNDS):
        random.Random(number).shuffle(points)
        for point in points:
            ratios[point].append(speed_ratio(trials, dict(zip(names, point, strict=True))))
    return {point: median(own) for point, own in ratios.items()} | {tuple(default.values()): 1.0}


def examine(name: str, budget: int) -> dict[str, Any]:
    """Tune a workload, measure the choice again, and measure the grid."""
    trials, knobs = open_trials(WORKLOADS[name](), BUDGETS[name])
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    search = Search(trials=trials, study=study, knobs=knobs, budget=budget, progress=Progress())
    clock = [time.process_time()]
    found = search.find()
    clock.append(time.process_time())
    again = median(speed_ratio(trials, found.changes) for _ in range(ROUNDS))
    clock.append(time.process_time())
    grid = measure_grid(trials, knobs)
    clock.append(time.process_time())
    chosen = tuple((defaults(knobs) | found.changes).values())
    return {
        "choice": found.changes,
        "at least": None if found.low is None else round(found.low, 3),
        "again": round(again, 3),
        "÷ best of the grid": round(grid[chosen] / max(grid.values()), 3),
        "configurations": len(grid),
        "seconds": round(clock[1] - clock[0], 1),
        "of the grid": round(clock[3] - clock[2], 1),
    }


def main() -> None:
    """Measure each workload, print and save the table."""
    options = arguments(__doc__, workloads=[*BUDGETS], trials=30, no_save=False)
    torch.set_num_threads(1)
    rows = {name: examine(name, options.trials) for name in options.workloads}
    head = ("workload", *next(iter(rows.values())))
    text = markdown(head, [(name, *row.values()) for name, row in rows.items()])
    print(text)
    if not options.no_save:
        print(save("tune", text, trials=options.trials))


if __name__ == "__main__":
    main()
