"""The journal of a measurement: one JSON line per event, so that a process that dies loses nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BEGUN, DONE, FAILED, CUT = "begun", "done", "failed", "cut"
FILE = "rows.jsonl"


class Journal:
    """The rows of all calls with the same folder.

    A row names its call, its unit and a status: ``begun`` (with ``until``, when it counts as hanging),
    ``done`` (with ``found``), ``failed`` (with ``error``) or ``cut``, if time ended within the unit.
    """

    def __init__(self, folder: Path, call: int) -> None:
        self._file = folder / FILE
        self.call = call

    def write(self, unit: str, status: str, **more: Any) -> None:
        """Append a row and wait until it is on the disk."""
        row = {"call": self.call, "unit": unit, "status": status, **more}
        with self._file.open("a") as file:
            file.write(json.dumps(row, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def rows(self) -> list[dict[str, Any]]:
        """Return all rows. A last line that a dying process left incomplete is not one."""
        return list(_read(self._file))

    def done(self) -> set[str]:
        """Return the units that some call has measured."""
        return {row["unit"] for row in self.rows() if row["status"] == DONE}

    def tried_before(self) -> set[str]:
        """Return the units that an earlier call has begun."""
        return {row["unit"] for row in self.rows() if row["call"] < self.call}

    def tried_now(self) -> set[str]:
        """Return the units that this call has begun."""
        return {row["unit"] for row in self.rows() if row["call"] == self.call}

    def unfinished(self) -> dict[str, Any] | None:
        """Return the row of the unit of this call that has begun and not ended; None if there is none."""
        own = [row for row in self.rows() if row["call"] == self.call]
        return own[-1] if own and own[-1]["status"] == BEGUN else None


def last_call(folder: Path) -> int:
    """Return the number of the latest call with this folder; 0 before the first."""
    return max((row["call"] for row in _read(folder / FILE)), default=0)


def latest(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the last ``done`` row of every unit, else its last row."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["status"] == DONE or found.get(row["unit"], row)["status"] != DONE:
            found[row["unit"]] = row
    return found


def _read(file: Path) -> Iterator[dict[str, Any]]:
    if not file.exists():
        return
    for line in file.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue
