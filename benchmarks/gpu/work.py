"""The process that measures one unit after the other, until the time is over or the GPU's context is lost."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.journal import BEGUN, DONE, FAILED, Journal

PARTS = ("facts", "tests", "limit", "fit", "speed")
LOST = 9
"""Exit code of a process whose GPU answers nothing any more. The next process goes on."""
PATIENCE = 3.0
"""A unit that takes so many times its `Unit.seconds`, and `GRACE_S` more, hangs and is ended."""
GRACE_S = 45.0


@dataclass(frozen=True)
class Unit:
    """A measurement that is worth a row of its own."""

    name: str
    """Its part, a slash, and what it measures."""
    seconds: float
    """Roughly what it takes. It does not begin if less time is left."""
    run: Callable[[], dict[str, Any]]

    @property
    def part(self) -> str:
        """The part of the command that it belongs to."""
        return self.name.partition("/")[0]


def work(units: list[Unit], journal: Journal, until: float, is_lost: Callable[[], bool]) -> int:
    """Measure the units that are not done, those that were never tried first; return the exit code."""
    done, now, before = journal.done(), journal.tried_now(), journal.tried_before()
    todo = [unit for unit in units if unit.name not in done | now]
    todo.sort(key=lambda unit: unit.name in before)
    for unit in todo:
        if time.time() + unit.seconds > until:
            print(f"{unit.name}: left for the next call", flush=True)
            continue
        measure(unit, journal)
        if is_lost():
            return LOST
    return 0


def measure(unit: Unit, journal: Journal) -> None:
    """Measure one unit, and write what it found or why it failed."""
    journal.write(unit.name, BEGUN, until=time.time() + PATIENCE * unit.seconds + GRACE_S)
    print(f"{unit.name} …", flush=True)
    start = time.perf_counter()
    try:
        found = unit.run()
    except Exception as error:  # whatever happens, the next unit is measured
        where = traceback.format_exc().splitlines()[-8:]
        said = f"{type(error).__name__}: {error}"[:1000]
        journal.write(
            unit.name, FAILED, seconds=round(time.perf_counter() - start, 1), error=said, where=where
        )
        print(f"{unit.name}: {said.splitlines()[0]}", flush=True)
        return
    seconds = round(time.perf_counter() - start, 1)
    journal.write(unit.name, DONE, seconds=seconds, found=found)
    print(f"{unit.name}: {seconds} s", flush=True)


def main() -> int:
    """Measure what the options name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--call", type=int, required=True)
    parser.add_argument("--until", type=float, required=True)
    parser.add_argument("--part", nargs="*", required=True)
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} finds no CUDA GPU: nothing was measured")
        return 0
    from benchmarks.gpu.device import empty
    from benchmarks.gpu.plan import units_of

    def is_lost() -> bool:
        try:
            empty()
        except RuntimeError:
            return True
        return False

    units = [unit for unit in units_of(options.out) if unit.part in options.part]
    return work(units, Journal(options.out, options.call), options.until, is_lost)


if __name__ == "__main__":
    sys.exit(main())
