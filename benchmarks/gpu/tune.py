"""The gain of tuning on a GPU over the largest micro-batch: over every knob at its default, and over fp32.

Both gains are measured in turn with what the tuner chose, after the search.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autobatch import Workload
from autobatch.core.knobs import applicable, defaults, parse_knobs
from autobatch.core.options import Options
from autobatch.core.progress import Progress
from autobatch.core.records.tuning import Trial
from autobatch.core.units import GiB
from autobatch.search.find_limit import find_limit
from autobatch.setup.attempt import TrainSetup
from autobatch.setup.child import Session, ThisProcess
from autobatch.setup.setup import open_setup
from autobatch.tuning.configuration import Budget, StudyLocation
from autobatch.tuning.find_fastest import find_fastest
from autobatch.tuning.trial import TrialRunner, TrialSpec, look_at_workload
from benchmarks.gpu.machine import Machine

KNOBS = "micro_batch_shift,precision,checkpointing,optimizer,expandable_segments"
"""All but ``compile``, which takes minutes."""
BUDGET_BYTES = 24 * GiB
ROUNDS = 5


def gain(
    machine: Machine, make: Callable[[], Workload], target: int, trials: int, seconds: float
) -> dict[str, Any]:
    """Probe, tune, and measure the result next to the default."""
    settings = Options().with_values(
        target_batch=target, device=machine.name, memory_budget=machine.budget(BUDGET_BYTES)
    )
    setup = open_setup(make(), settings)
    limit = limit_of(setup, target)
    task = TrialSpec(limit=limit, cap=target, samples=target, planned_steps=1000, seconds=1.0)
    axes, _ = applicable(look_at_workload(Session(setup), task), parse_knobs(KNOBS))
    base = defaults(axes)
    runner = TrialRunner(setup, dataclasses.replace(task, defaults=base))
    start = time.monotonic()
    found = find_fastest(
        runner.measure,
        axes,
        budget=Budget(trials, lambda: time.monotonic() - start > seconds),
        seed=0,
        place=StudyLocation("gpu", None, {}),
        confirm_fits=lambda values: runner.confirm(values).failure,
        progress=_Printed(),
    ).tuning
    single = dataclasses.replace(setup, precision="fp32")
    plain = TrialRunner(single, dataclasses.replace(task, limit=limit_of(single, target)))
    over_default, over_fp32 = [], []
    for _ in range(ROUNDS):
        best = runner.measure(found.best).samples_per_s
        over_default.append(best / runner.measure(base).samples_per_s)
        over_fp32.append(best / plain.measure({}).samples_per_s)
    return {
        "workload": setup.workload.name,
        "target_batch": target,
        "micro_batch_limit": limit,
        "best": found.best,
        "over_default": statistics.median(over_default),
        "over_default_all": over_default,
        "over_fp32": statistics.median(over_fp32),
        "trials": found.trials,
        "seconds": round(found.seconds, 1),
        "sampler_share": round(found.sampler_seconds / found.seconds, 4),
        "history": [[one.parameters, one.micro_batch, one.samples_per_s, one.note] for one in found.history],
    }


class _Printed(Progress):
    """Trials, printed as they end."""

    def measured(self, trial: Trial, of: int, changes: Mapping[str, object]) -> None:
        """Print a trial."""
        print(trial.number, dict(changes), trial.note or round(trial.samples_per_s or 0), flush=True)


def limit_of(setup: TrainSetup, target: int) -> int:
    """Return the largest micro-batch that fits."""
    with tempfile.TemporaryDirectory() as home:
        found = find_limit(
            ThisProcess(setup),
            Options().with_values(target_batch=target),
            home=Path(home),
            progress=Progress(),
        )
    return found.probe.micro_batch
