"""The limits that a probe finds on a GPU, against brute force: doubling, then bisection by real attempts."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autobatch import Workload
from autobatch.core.errors import DoesNotFitError
from autobatch.core.options import Options
from autobatch.core.progress import Progress
from autobatch.search.find_limit import find_limit
from autobatch.setup.attempt import TrainSetup, attempt
from autobatch.setup.child import ThisProcess
from autobatch.setup.setup import open_setup
from benchmarks.gpu.machine import Machine
from benchmarks.probe.limits import bisected


def limit(machine: Machine, make: Callable[[], Workload], budget_bytes: int) -> dict[str, Any]:
    """Probe a workload under a cap, and find the truth."""
    workload = make()
    most = len(workload.train_data)
    budget = machine.budget(budget_bytes)
    setup = open_setup(workload, Options().with_values(device=machine.name, memory_budget=budget))
    row: dict[str, Any] = {
        "model": workload.name,
        "budget_bytes": budget_bytes,
        "precision": setup.precision,
    }
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as home:
        try:
            probe = find_limit(ThisProcess(setup), Options(), home=Path(home), progress=Progress()).probe
        except DoesNotFitError as error:
            true = brute_force(setup, most, {})
            return row | {"found": 0, "error": str(error), "true": true, "exact": true == 0}
    row |= {
        "found": probe.micro_batch,
        "limited_by": probe.limited_by,
        "upper_bound_by": probe.upper_bound_by,
        "predicted": probe.predicted_micro_batch,
        "runs": len(probe.attempts),
        "ooms": sum(one.phase is not None for one in probe.attempts),
        "refused": [one.reason for one in probe.attempts if not one.fits and one.phase is None],
        "seconds": round(time.perf_counter() - start, 2),
        "sizes": [one.micro_batch for one in probe.attempts],
        "peak_reserved_bytes": max(one.peak_reserved_bytes or 0 for one in probe.attempts if one.fits),
    }
    known: dict[int, bool] = {}
    row["true"] = brute_force(setup, most, known)
    for size in (probe.micro_batch, probe.micro_batch + 1):
        if size not in known and size <= most:
            known[size] = attempt(setup, size).attempt.fits
    row["exact"] = known[probe.micro_batch] and not known.get(probe.micro_batch + 1, False)
    return row


def brute_force(setup: TrainSetup, most: int, known: dict[int, bool]) -> int:
    """Return the largest micro-batch by real attempts alone, and remember what they showed."""

    def fits(size: int) -> bool:
        known[size] = attempt(setup, size).attempt.fits
        return known[size]

    return bisected(fits, most)
