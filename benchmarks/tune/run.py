"""The result of the tuner against an exhaustive grid, its gain, and the cost of choosing trials.

    python -m benchmarks.tune.run [--workloads resnet-bn u-net experts] [--trials 30] [--seeds 5]

For each workload, on this CPU with one thread:
1. A grid measures every configuration in two passes, as a share of the default measured just before and
   after. The six best run eight times more next to the default. torch.compile is left out, because it would
   compile for half a minute at each point of the grid.
2. Searches with the tuner and at random use the same number of trials. They replay the figures of the grid
   with its noise, so that five seeds of each take seconds. Both start with the default and measure their
   best again next to it.
3. The tuner runs once for real. This gives the share of its time spent on choosing, and the gain of its
   result over the largest micro-batch in fp32 with every knob at its default, measured again in turn.

Seconds are the CPU time of the process. With one thread they equal the wall time of an idle machine, and on a
busy machine they are the figure to read.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import optuna
import torch

from autobatch.core.knobs import defaults
from autobatch.tuning.configuration import Budget, StudyLocation, key_of, size_of
from autobatch.tuning.find_fastest import find_fastest
from benchmarks.report import arguments, markdown, save, surroundings
from benchmarks.tune.grid import (
    LONGEST_TRIAL_SECONDS,
    Case,
    by_autobatch,
    by_chance,
    measure_grid,
    open_case,
    open_trials,
)
from benchmarks.workloads import WORKLOADS

CASES = {
    "resnet-bn": {"target_batch": 512, "memory_budget": "5MiB"},
    "u-net": {"target_batch": 512, "memory_budget": "4MiB"},
    "experts": {"target_batch": 512, "memory_budget": "3MiB"},
}
"""Budgets for a fraction of the batch, so that the plan accumulates; the batch of the experts fits whole."""
SEARCHES = {"autobatch": by_autobatch, "random": by_chance}
GRID_SECONDS = 0.08
ROUNDS = 9
"""Rounds in which the result and the default are measured in turn."""


def for_real(case: Case, *, trials: int) -> dict[str, Any]:
    """Tune, then measure the result and the default in turn."""
    runner = open_trials(case, LONGEST_TRIAL_SECONDS)
    found = find_fastest(
        runner.measure,
        runner.confirm,
        case.axes,
        budget=Budget(trials),
        seed=0,
        place=StudyLocation("real", None, {}),
        clock=time.process_time,
    ).tuning
    base = defaults(case.axes)
    ratios: list[float] = []
    for _ in range(ROUNDS):
        default, best = runner.measure(base), runner.measure(found.best)
        if default.feasible and best.feasible:
            ratios.append(best.samples_per_s / default.samples_per_s)
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "best": found.best,
        "gain": round(middle, 3),
        "gain_quartiles": [round(low, 3), round(high, 3)],
        "trials": found.trials,
        "seconds": round(found.seconds, 1),
        "sampler_seconds": round(found.sampler_seconds, 2),
        "sampler_share": round(found.sampler_seconds / found.seconds, 4),
        "notes": found.notes,
    }


def examine(name: str, *, trials: int, seeds: int, passes: int) -> dict[str, Any]:
    """Run all three parts for a workload."""
    case = open_case(WORKLOADS[name](), seconds=GRID_SECONDS, **CASES[name])
    start = time.perf_counter()
    grid = measure_grid(case, passes=passes, seconds=GRID_SECONDS)
    grid_seconds = time.perf_counter() - start
    searches = {}
    for who, search in SEARCHES.items():
        shares = [search(case, grid, trials=trials, seed=seed) for seed in range(seeds)]
        searches[who] = {"median": round(statistics.median(shares), 4), "least": round(min(shares), 4)}
    real = for_real(case, trials=trials)
    ranked = sorted(grid.speeds.items(), key=lambda item: -item[1])
    return {
        **CASES[name],
        "micro_batch_limit": case.limit,
        "configurations": size_of(case.axes),
        "infeasible": sum(not speed for speed in grid.speeds.values()),
        "grid_seconds": round(grid_seconds, 1),
        "noise": round(grid.noise, 4),
        "searches": searches,
        "real": real | {"of_grid_best": round(grid.speeds[key_of(real["best"])] / grid.best, 4)},
        "grid": [[dict(key), round(speed, 4)] for key, speed in ranked],
    }


def table(content: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    found, real = [], []
    for name, one in content["workloads"].items():
        shares = [f"{by['median']:.3f} ({by['least']:.3f})" for by in one["searches"].values()]
        found.append([name, one["configurations"], f"{one['noise']:.1%}", *shares])
        run = one["real"]
        low, high = run["gain_quartiles"]
        chosen = ", ".join(f"{knob} {value}" for knob, value in run["best"].items())
        gain = f"{run['gain']:.2f} ({low:.2f} to {high:.2f})"
        costs = (f"{run['seconds']:.0f} s", f"{run['sampler_share']:.1%}")
        real.append([name, chosen, gain, f"{run['of_grid_best']:.3f}", *costs])
    return (
        f"Best found ÷ best of the grid in {content['trials']} trials, median (least) of {content['seeds']} "
        "seeds. The searches replay the figures of the grid with its noise:\n\n"
        + markdown(("workload", "configurations", "noise of a figure", *SEARCHES), found)
        + "\nOne real run of the tuner. The gain is over the largest micro-batch in fp32 with every knob at "
        f"its default, in {ROUNDS} rounds in turn (quartiles):\n\n"
        + markdown(
            ("workload", "result", "gain", "of the best of the grid", "time", "spent on choosing"), real
        )
    )


def main() -> None:
    """Measure each workload, print and save the tables."""
    given = vars(arguments(__doc__, workloads=[*CASES], trials=30, seeds=5, passes=2, dry=False))
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    names, is_dry = given.pop("workloads"), given.pop("dry")
    content = surroundings("optuna", "scipy") | given | {"threads": 1, "workloads": {}}
    for name in names:
        content["workloads"][name] = examine(name, **given)
        print(name, {k: v for k, v in content["workloads"][name].items() if k != "grid"}, flush=True)
    text = table(content)
    print(text)
    if not is_dry:
        print(save("tune", content, text))


if __name__ == "__main__":
    main()
