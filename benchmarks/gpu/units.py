"""The units of a measurement, those that yield the most per minute first, and the process that runs them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu import commands, limits, recordings, speed
from benchmarks.gpu.device import empty, room
from benchmarks.gpu.facts import FACTS
from benchmarks.gpu.work import PARTS, Journal, Unit, work
from benchmarks.gpu.workloads import CASES
from benchmarks.report import arguments

FIRST = ("mlp", "gpt", "resnet-50", "gpt-124m", "encoder-masked", "lstm", "vision-transformer", "u-net")
"""Workloads that are measured before the others."""


def units_of(out: Path) -> list[Unit]:
    """Return all units. Limits that this GPU has no memory for are left out."""
    others = [name for name in CASES if name not in FIRST]
    return [
        *(Unit(f"facts/{name}", 5, read) for name, read in FACTS.items()),
        *limits_of(FIRST, 0),
        *(Unit(f"record/{name}", 20, partial(recordings.record, name, out)) for name in FIRST),
        *(
            Unit(f"speed/loops {name} {precision}", 60, partial(speed.loops, name, precision))
            for name in ("mlp", "transformer")
            for precision in ("fp32", "bf16")
        ),
        Unit("speed/ragged", 60, partial(speed.by_size, "sft")),
        Unit("tests/gpu", 90, lambda: commands.tests(out)),
        Unit("fit/demo", 60, commands.demo),
        Unit("fit/resume", 60, lambda: commands.resume(60)),
        Unit("speed/tuned", 200, lambda: speed.tuned("gpt", 256, 12, 100.0)),
        *limits_of(FIRST, 1),
        *(unit for which in (0, 1) for unit in limits_of(others, which)),
    ]


def limits_of(names: Sequence[str], which: int) -> list[Unit]:
    """Return the units of limits under one of the budgets of their cases."""
    asked = [(name, CASES[name].budgets_mib[which]) for name in names]
    return [
        Unit(f"limit/{name} {mib} MiB", 40, partial(limits.measure, name, mib))
        for name, mib in asked
        if mib << 20 <= room()
    ]


def main() -> int:
    """Measure what the options name, until a time in seconds since the epoch."""
    options = arguments(__doc__, out=Path, call=1, until=0.0, part=PARTS)
    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} finds no CUDA GPU: nothing was measured")
        return 0

    def is_lost() -> bool:
        try:
            empty()
        except RuntimeError:
            return True
        return False

    units = [unit for unit in units_of(options.out) if unit.name.partition("/")[0] in options.part]
    return work(units, Journal(options.out, options.call), options.until, is_lost)


if __name__ == "__main__":
    sys.exit(main())
