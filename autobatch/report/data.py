"""What a report is made of, and how it is read back from the folder of a run.

The folder holds ``result.json`` (the object that the command line prints; keys named like the fields of
:class:`ReportData` are read too) and ``metrics.jsonl``, a :class:`~autobatch.records.StepRecord` a line.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from autobatch.errors import InputError
from autobatch.records import (
    DeviceRecord,
    MemoryCurve,
    Plan,
    PredictedPoint,
    Probe,
    Record,
    StepRecord,
    Training,
    Tuning,
)


class ReportData(Record, frozen=True):
    """All that a report shows; what is ``None`` or empty is left out of it."""

    device: DeviceRecord
    probe: Probe | None = None
    plan: Plan | None = None
    tuning: Tuning | None = None
    training: Training | None = None
    metrics: list[StepRecord] = []
    """One for each window, in the order in which they ran; of windows that ran again the last one counts."""
    checkpoints: list[int] = []
    """Windows after which a checkpoint was written."""
    predicted: list[PredictedPoint] = []
    memory_curve: MemoryCurve | None = None
    versions: dict[str, str] = {}
    command: str = ""
    """What repeats the run."""
    title: str = "autobatch"
    created: str = ""
    """When the run ended, as text."""
    notes: list[str] = []
    """What a person should know of the report itself, a line each."""


def load_run(folder: Path) -> ReportData:
    """Read the folder of a run.

    Args:
        folder: holds ``result.json`` and, where something was trained, ``metrics.jsonl``.

    Returns:
        The data of its report; parts that the run did not have are ``None`` or empty. Rows of metrics that
        cannot be read (the last one of a killed run) are left out, and a note says how many.

    Raises:
        InputError: ``result.json`` is missing, or is not the result of a run.
    """
    path = folder / "result.json"
    try:
        found = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise InputError(f"no run in {folder}: cannot read {path.name}: {error.strerror or error}") from error
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise InputError(f"{path} is not the result of a run: {error}") from error
    metrics, unreadable = _read_rows(folder / "metrics.jsonl")
    if not isinstance(found, dict):
        raise InputError(f"{path} is not the result of a run: it holds no object")
    fields = {name: value for name, value in found.items() if name in ReportData.__struct_fields__}
    fields.setdefault("title", folder.resolve().name)
    fields.setdefault("versions", {"autobatch": found["autobatch"]} if "autobatch" in found else {})
    fields["metrics"] = metrics
    if unreadable:
        notes = fields.get("notes") or []
        fields["notes"] = [*notes, f"{unreadable} lines of metrics.jsonl could not be read and are left out"]
    present = {name: value for name, value in fields.items() if value is not None}
    try:
        return msgspec.convert(present, ReportData)
    except msgspec.ValidationError as error:
        raise InputError(f"{path} is not the result of a run: {error}") from error


def _read_rows(path: Path) -> tuple[list[StepRecord], int]:
    """Read the rows that can be read, and count those that cannot."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    rows, unreadable = [], 0
    for line in filter(None, map(bytes.strip, lines)):
        try:
            rows.append(msgspec.json.decode(line, type=StepRecord))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            unreadable += 1
    return rows, unreadable
