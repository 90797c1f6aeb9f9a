"""The units of a measurement, in the order that yields the most per minute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.gpu import commands, limits, recordings, speed
from benchmarks.gpu.device import room
from benchmarks.gpu.facts import FACTS
from benchmarks.gpu.work import Unit
from benchmarks.gpu.workloads import CASES

FACT_SECONDS = 5.0
FIRST_LIMITS = ("mlp", "gpt", "resnet-50", "gpt-124m", "encoder-masked", "lstm")
LIMIT_SECONDS = 40.0


def units_of(out: Path) -> list[Unit]:
    """Return all units. Limits that this GPU has no memory for are left out."""
    rest = [name for name in CASES if name not in FIRST_LIMITS]
    return [
        *(Unit(f"facts/{name}", FACT_SECONDS, read) for name, read in FACTS.items()),
        Unit("facts/golden", 20, lambda: recordings.golden("gpt", 16, out)),
        Unit("tests/gpu", 90, lambda: commands.tests(out)),
        *(_limit(name, 0) for name in FIRST_LIMITS if _has_room(name, 0)),
        Unit("facts/traces gpt", 40, lambda: recordings.traces("gpt", out)),
        Unit("fit/demo", 60, commands.demo),
        Unit("speed/loop mlp", 30, lambda: speed.loop("mlp", 256, 40)),
        Unit("fit/resume", 60, lambda: commands.resume(60)),
        Unit("fit/doctor", 8, commands.doctor),
        Unit("speed/loop gpt", 60, lambda: speed.loop("gpt", 32, 20)),
        Unit("facts/traces residual", 30, lambda: recordings.traces("residual", out)),
        *(_limit(name, 1) for name in FIRST_LIMITS if _has_room(name, 1)),
        Unit("speed/tuned", 200, lambda: speed.tuned("gpt", 256, 12, 100.0)),
        *(_limit(name, which) for which in (0, 1) for name in rest if _has_room(name, which)),
    ]


def _has_room(name: str, which: int) -> bool:
    return CASES[name].budgets_mib[which] << 20 <= room()


def _limit(name: str, which: int) -> Unit:
    budget_mib = CASES[name].budgets_mib[which]

    def run() -> dict[str, Any]:
        row = limits.measure(name, budget_mib)
        if "failed" in row:
            raise RuntimeError(row["failed"])
        return row

    return Unit(f"limit/{name} {budget_mib} MiB", LIMIT_SECONDS, run)
