"""The process that measures one unit after the other, and the journal that outlives it."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

BEGUN, DONE, FAILED, CUT = "begun", "done", "failed", "cut"
FILE = "rows.jsonl"
PARTS = ["facts", "tests", "limit", "record", "fit", "speed"]
LOST = 9
"""Exit code of a process whose GPU answers nothing any more. The next process goes on."""
PATIENCE, GRACE_S = 3.0, 45.0
"""A unit that takes so many times its `Unit.seconds`, and so many seconds more, hangs and is ended."""
Row = dict[str, Any]


class Unit(NamedTuple):
    """A measurement that is worth a row of its own."""

    name: str
    """Its part, a slash, and what it measures."""
    seconds: float
    """Roughly what it takes. It does not begin if less time is left."""
    run: Callable[[], Row]


class Journal:
    """The rows of all calls with the same folder, one JSON line each.

    A row names its call, its unit and a status: ``begun`` (with ``until``, when it counts as hanging),
    ``done`` (with ``found``), ``failed`` (with ``error``) or ``cut``, if time ended within the unit.
    """

    def __init__(self, folder: Path, call: int | None = None) -> None:
        self._file = folder / FILE
        self.call = call or 1 + max((row["call"] for row in self.rows()), default=0)

    def write(self, unit: str, status: str, **more: Any) -> None:
        """Append a row and wait until it is on the disk."""
        row = {"call": self.call, "unit": unit, "status": status, **more}
        with self._file.open("a") as file:
            file.write(json.dumps(row, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def rows(self) -> list[Row]:
        """Return all rows. A last line that a dying process left incomplete is not one."""
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def latest(self) -> dict[str, Row]:
        """Return the last ``done`` row of every unit, else its last row."""
        rows: dict[str, Row] = {}
        for row in self.rows():
            if row["status"] == DONE or rows.get(row["unit"], row)["status"] != DONE:
                rows[row["unit"]] = row
        return rows

    def unfinished(self) -> Row | None:
        """Return the row of the unit of this call that has begun and not ended; None if there is none."""
        own = [row for row in self.rows() if row["call"] == self.call]
        return own[-1] if own and own[-1]["status"] == BEGUN else None


def work(units: list[Unit], journal: Journal, until: float, is_lost: Callable[[], bool]) -> int:
    """Measure the units that are not done, those that were never tried first; return the exit code."""
    before = journal.latest()
    open_units = [
        unit
        for unit in units
        if (row := before.get(unit.name, {})).get("status") != DONE and row.get("call") != journal.call
    ]
    for unit in sorted(open_units, key=lambda unit: unit.name in before):
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
        more = {"status": DONE, "found": unit.run()}
        said = ""
    except Exception as error:  # whatever happens, the next unit is measured
        said = f"{type(error).__name__}: {error}"[:1000]
        more = {"status": FAILED, "error": said, "where": traceback.format_exc().splitlines()[-8:]}
    seconds = round(time.perf_counter() - start, 1)
    journal.write(unit.name, seconds=seconds, **more)
    print(f"{unit.name}: {said.partition(chr(10))[0] or f'{seconds} s'}", flush=True)
