"""Measurements of every configuration of a workload, and searches that replay them."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from autobatch import Progress, Workload
from autobatch.core.knobs import Configuration, SearchAxis, applicable, defaults
from autobatch.core.options import Options
from autobatch.rehearsal.process import Session, ThisProcess
from autobatch.rehearsal.setup import Setup, open_setup
from autobatch.search.find_limit import find_limit
from autobatch.tuning.compare import compare
from autobatch.tuning.configuration import (
    Budget,
    Measure,
    Measurement,
    StudyLocation,
    all_configurations,
    key_of,
)
from autobatch.tuning.find_fastest import find_fastest
from autobatch.tuning.trial import Trials, TrialSpec, look_at_workload
from benchmarks.workloads import InMemory

REFINED = 6
REFINING_ROUNDS = 8
"""Number of the best configurations that are measured again, and rounds. The best of many noisy figures is
biased. The repeats last as long as a trial, so they also give the noise of a trial."""
ANCHOR_EVERY = 6
"""Configurations between two measurements of the default, so that other load affects both equally."""
COMPARED = 3
"""Configurations that are measured again beside the default."""
LONGEST_TRIAL_SECONDS = 0.5
"""Seconds of a trial, as in `autobatch tune`."""


class Case(NamedTuple):
    """A workload with everything that its trials need."""

    setup: Setup
    task: TrialSpec
    axes: list[SearchAxis]
    limit: int


def open_case(workload: Workload, *, target_batch: int, memory_budget: str, seconds: float) -> Case:
    """Probe a workload, and prepare its trials."""
    workload = dataclasses.replace(workload, train_data=InMemory(workload.train_data, 4 * target_batch))
    settings = Options().with_values(target_batch=target_batch, memory_budget=memory_budget, device="cpu")
    # Other load on the machine does not change the CPU time of the process. With one thread and without other
    # load it equals the wall time.
    setup = dataclasses.replace(open_setup(workload, settings), clock=time.process_time)
    limits = Options().with_values(target_batch=target_batch)
    with tempfile.TemporaryDirectory() as home:
        probe = find_limit(ThisProcess(setup), limits, home=Path(home), progress=Progress()).probe
    task = TrialSpec(
        limit=probe.micro_batch, cap=target_batch, samples=target_batch, planned_steps=1000, seconds=seconds
    )
    axes, _ = applicable(look_at_workload(Session(setup), task))
    return Case(setup, dataclasses.replace(task, defaults=defaults(axes)), axes, probe.micro_batch)


def open_trials(case: Case, seconds: float) -> Trials:
    """Return trials without earlier results."""
    return Trials(ThisProcess(case.setup), dataclasses.replace(case.task, seconds=seconds))


class Grid(NamedTuple):
    """The speed of every configuration as a share of that of the default."""

    speeds: dict[Any, float]
    """Medians over the passes; 0 for an infeasible configuration."""
    micro_batches: dict[Any, int]
    noise: float
    """Standard deviation of the logarithm of a trial's figure."""

    @property
    def best(self) -> float:
        """The highest speed."""
        return max(self.speeds.values())


def measure_grid(case: Case, *, passes: int, seconds: float) -> Grid:
    """Measure every configuration in every pass, in a new order for each pass."""
    trials = open_trials(case, seconds)
    base = defaults(case.axes)
    found: dict[Any, list[float]] = {key_of(values): [] for values in all_configurations(case.axes)}
    sizes: dict[Any, int] = {}
    for number in range(passes):
        order = list(all_configurations(case.axes))
        random.Random(number).shuffle(order)
        for first in range(0, len(order), ANCHOR_EVERY):
            anchors = [trials.measure(base).samples_per_s]
            part = [(values, trials.measure(values)) for values in order[first : first + ANCHOR_EVERY]]
            anchors.append(trials.measure(base).samples_per_s)
            anchor = statistics.geometric_mean(anchors)
            for values, one in part:
                found[key_of(values)].append(one.samples_per_s / anchor)
                sizes[key_of(values)] = one.micro_batch
    speeds = {key: statistics.median(ratios) for key, ratios in found.items()}
    speeds[key_of(base)] = 1.0
    refined = _refine(case, speeds)
    return Grid(
        speeds | {key: statistics.median(ratios) for key, ratios in refined.items()}, sizes, _noise(refined)
    )


def _refine(case: Case, speeds: dict[Any, float]) -> dict[Any, list[float]]:
    """Measure the best ones again next to the default, in turn."""
    trials = open_trials(case, LONGEST_TRIAL_SECONDS)
    base = defaults(case.axes)
    best = sorted((key for key in speeds if key != key_of(base)), key=lambda key: -speeds[key])[:REFINED]
    found: dict[Any, list[float]] = {key: [] for key in best}
    for _ in range(REFINING_ROUNDS):
        anchor = trials.measure(base).samples_per_s
        for key in best:
            found[key].append(trials.measure(dict(key)).samples_per_s / anchor)
    return found


def _noise(figures: dict[Any, list[float]]) -> float:
    """Return the noise of one figure; a ratio has the noise of two."""
    spreads = [statistics.variance(map(math.log, ratios)) for ratios in figures.values() if all(ratios)]
    return math.sqrt(statistics.median(spreads) / 2) if spreads else 0.0


def replayed(grid: Grid, seed: int) -> Measure:
    """Return measurements that replay the figures of the grid with its noise."""
    draw = random.Random(seed)

    def measure(values: Configuration) -> Measurement:
        key = key_of(values)
        speed = 1000 * grid.speeds[key] * math.exp(draw.gauss(0, grid.noise))
        failure = None if grid.speeds[key] else "not feasible in the grid"
        return Measurement(speed, max(1, grid.micro_batches[key]), failure)

    return measure


def by_autobatch(case: Case, grid: Grid, *, trials: int, seed: int) -> float:
    """Search with the tuner, and return the speed of its choice as a share of the best of the grid."""
    found = find_fastest(
        replayed(grid, seed),
        lambda values: Measurement(0.0, grid.micro_batches[key_of(values)]),
        case.axes,
        budget=Budget(trials),
        seed=seed,
        place=StudyLocation("replay", None, {}),
    ).tuning
    return grid.speeds[key_of(found.best)] / grid.best


def by_chance(case: Case, grid: Grid, *, trials: int, seed: int) -> float:
    """Search at random, also from the default, and measure the best again, as the tuner does."""
    measure, draw = replayed(grid, seed), random.Random(seed)
    base = defaults(case.axes)
    tried = [base, *draw.choices(list(all_configurations(case.axes)), k=trials - 1)]
    speeds = {key_of(values): one.samples_per_s for values in tried if (one := measure(values)).feasible}
    best = sorted(speeds.keys() - {key_of(base)}, key=lambda key: -speeds[key])[:COMPARED]
    ranking = compare(measure, base, [dict(key) for key in best]).ranking
    return grid.speeds[key_of(ranking[0].values if ranking else base)] / grid.best
