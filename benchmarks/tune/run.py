"""The result of the tuner against an exhaustive grid, its gain, and the cost of choosing trials.

    python -m benchmarks.tune.run [--workloads resnet-bn,u-net,experts] [--trials 30] [--seeds 5]

For each workload, on this CPU with one thread:
1. A grid measures every configuration in two passes, as a share of the default measured just before and
   after. The six best run eight times more next to the default. torch.compile is left out, because it would
   compile for half a minute at each point of the grid.
2. Searches with the tuner, random search and TPE use the same number of trials. They replay the figures of
   the grid with its noise, so that five seeds of each take seconds. All three start with the default and
   measure their best again next to it.
3. The tuner runs once for real. This gives the share of its time spent on choosing, and the gain of its
   result over the largest micro-batch in fp32 with every knob at its default, measured again in turn.

Seconds are the CPU time of the process. With one thread they equal the wall time of an idle machine, and on a
busy machine they are the figure to read.
"""

from __future__ import annotations

import argparse
import math
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
from benchmarks.report import save, surroundings
from benchmarks.tune.grid import (
    LONGEST_TRIAL_SECONDS,
    Case,
    Grid,
    Search,
    by_autobatch,
    by_sampler,
    measure_grid,
    open_case,
    open_runner,
)
from benchmarks.workloads import WORKLOADS

CASES = {
    "gpt": {"target_batch": 256, "memory_budget": "24MiB"},
    "resnet-bn": {"target_batch": 512, "memory_budget": "5MiB"},
    "experts": {"target_batch": 512, "memory_budget": "3MiB"},
    "u-net": {"target_batch": 512, "memory_budget": "4MiB"},
    "encoder-dropout": {"target_batch": 256, "memory_budget": "8MiB"},
}
"""Budgets for a fraction of the batch, so that the plan accumulates; the batch of the experts fits whole."""
GRID_SECONDS = 0.08
ROUNDS = 9
"""Rounds in which the result and the default are measured in turn."""


def searches(case: Case, grid: Grid, *, trials: int, seeds: int) -> dict[str, Any]:
    """Run every search with each seed."""
    made = {
        "autobatch": lambda seed: by_autobatch(case, grid, trials=trials, seed=seed),
        "tpe": lambda seed: by_sampler(
            case, grid, lambda s: optuna.samplers.TPESampler(seed=s), trials=trials, seed=seed
        ),
        "random": lambda seed: by_sampler(
            case, grid, lambda s: optuna.samplers.RandomSampler(seed=s), trials=trials, seed=seed
        ),
    }
    results: dict[str, Any] = {}
    for name, search in made.items():
        runs: list[Search] = [search(seed) for seed in range(seeds)]
        results[name] = {
            part: {
                "median": round(statistics.median(getattr(run, part) for run in runs), 4),
                "least": round(min(getattr(run, part) for run in runs), 4),
            }
            for part in ("found", "chosen")
        }
    return results


def for_real(case: Case, *, trials: int) -> dict[str, Any]:
    """Tune, then measure the result and the default in turn."""
    runner = open_runner(case, LONGEST_TRIAL_SECONDS)
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
    found = searches(case, grid, trials=trials, seeds=seeds)
    real = for_real(case, trials=trials)
    best = max(grid.speeds, key=lambda key: grid.speeds[key])
    return {
        **CASES[name],
        "micro_batch_limit": case.limit,
        "configurations": size_of(case.axes),
        "infeasible": sum(not speed for speed in grid.speeds.values()),
        "grid_seconds": round(grid_seconds, 1),
        "noise": round(grid.noise, 4),
        "best_of_grid": dict(best),
        "best_of_grid_over_default": round(grid.best, 3),
        "searches": found,
        "real": real | {"of_grid_best": round(grid.speeds[key_of(real["best"])] / grid.best, 4)},
        "grid": [
            [dict(key), round(speed, 4)] for key, speed in sorted(grid.speeds.items(), key=lambda i: -i[1])
        ],
    }


def table(content: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    lines = [
        f"# Tuning on {content['hardware']['cpu']}, {content['date']}",
        "",
        f"`{content['command']}`: {content['trials']} trials, median (least) of {content['seeds']} seeds; "
        f"{content['seconds']:.0f} s in total; load {content['load_before']:.1f} before; "
        + ", ".join(f"{name} {version}" for name, version in content["versions"].items()),
        "",
        "Best found ÷ best of the grid (the searches replay the figures of the grid with its noise):",
        "",
        "| workload | configurations | noise of a figure | autobatch | TPE | random |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in content["workloads"].items():
        cells = [
            f"{one['searches'][who]['chosen']['median']:.3f} ({one['searches'][who]['chosen']['least']:.3f})"
            for who in ("autobatch", "tpe", "random")
        ]
        lines.append(f"| {name} | {one['configurations']} | {one['noise']:.1%} | {' | '.join(cells)} |")
    lines += [
        "",
        "One real run of the tuner. The gain is over the largest micro-batch in fp32 with every knob at its "
        f"default, in {ROUNDS} rounds in turn (quartiles):",
        "",
        "| workload | result | gain | of the best of the grid | time | spent on choosing |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in content["workloads"].items():
        real = one["real"]
        low, high = real["gain_quartiles"]
        chosen = ", ".join(f"{knob} {value}" for knob, value in real["best"].items())
        lines.append(
            f"| {name} | {chosen} | {real['gain']:.2f} ({low:.2f} to {high:.2f}) | "
            f"{real['of_grid_best']:.3f} | {real['seconds']:.0f} s | {real['sampler_share']:.1%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default="resnet-bn,u-net,experts")
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--dry", action="store_true", help="print, and save nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    content = surroundings("optuna", "scipy")
    content |= {
        "command": "python -m benchmarks.tune.run",
        "trials": options.trials,
        "seeds": options.seeds,
        "threads": torch.get_num_threads(),
        "workloads": {},
    }
    start = time.perf_counter()
    for name in options.workloads.split(","):
        content["workloads"][name] = examine(
            name, trials=options.trials, seeds=options.seeds, passes=options.passes
        )
        print(name, {k: v for k, v in content["workloads"][name].items() if k != "grid"}, flush=True)
    content["seconds"] = math.ceil(time.perf_counter() - start)
    text = table(content)
    print(text)
    if not options.dry:
        print(save("tune", content, text))


if __name__ == "__main__":
    main()
