"""What a call returns: its records, the JSON that the command line prints, and what a notebook shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from autobatch.core.errors import InputError
from autobatch.core.records import DeviceRecord, Estimate, Plan, Probe, Record, RunRecord, StepRecord
from autobatch.core.version import __version__
from autobatch.report.notebook import estimates_html, plan_html, probe_html, run_html

SCHEMA = 1
NOT_IN_JSON = ("model", "metrics", "notes")


class Result(RunRecord, frozen=True, kw_only=True):
    """The records of every part that ran; a part that did not run is ``None``."""

    profile: Path | None = None
    """The file that remembers what fitted."""
    report: Path | None = None
    out: Path | None = None
    """The folder of the run."""
    model: Any = None
    """The trained ``torch.nn.Module``; not part of the JSON."""

    def to_json(self, *parts: str) -> dict[str, Any]:
        """Return the object of ``--json``.

        Args:
            parts: names of the parts to print; without any, all of them.
        """
        head: dict[str, Any] = {"schema": SCHEMA, "autobatch": __version__}
        names = parts or tuple(name for name in self.__struct_fields__ if name not in NOT_IN_JSON)
        values = {name: getattr(self, name) for name in names}
        return head | {
            name: str(value) if isinstance(value, Path) else msgspec.to_builtins(value)
            for name, value in values.items()
        }

    def _repr_html_(self) -> str:
        return run_html(self, metrics=_metrics_of(self), report=self.report)


class ProbeResult(Probe, frozen=True, kw_only=True):
    """A probe, with the device that it ran on."""

    device: DeviceRecord

    @property
    def probe(self) -> Probe:
        """The probe itself, under the name that it has in the JSON."""
        return self

    def _repr_html_(self) -> str:
        return probe_html(self, self.device)


class PlanResult(Plan, frozen=True, kw_only=True):
    """A plan, with the device and the probe that it rests on."""

    device: DeviceRecord
    probe: Probe

    @property
    def plan(self) -> Plan:
        """The plan itself, under the name that it has in the JSON."""
        return self

    def _repr_html_(self) -> str:
        return plan_html(self, self.device, self.probe)


class Estimates(Record, frozen=True, kw_only=True):
    """Predictions for one workload, a card each."""

    estimates: list[Estimate]
    notes: list[str] = []

    def to_json(self, *_: str) -> dict[str, Any]:
        """Return the object of ``--json``."""
        return {"schema": SCHEMA, "autobatch": __version__, **msgspec.to_builtins(self)}

    def _repr_html_(self) -> str:
        return estimates_html(self.estimates, self.notes)


def load_run(folder: Path) -> RunRecord:
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
    fields = {name: value for name, value in found.items() if name in RunRecord.__struct_fields__}
    fields.setdefault("title", folder.resolve().name)
    fields.setdefault("versions", {"autobatch": found["autobatch"]} if "autobatch" in found else {})
    fields["metrics"] = metrics
    if unreadable:
        notes = fields.get("notes") or []
        fields["notes"] = [*notes, f"{unreadable} lines of metrics.jsonl could not be read and are left out"]
    present = {name: value for name, value in fields.items() if value is not None}
    try:
        return msgspec.convert(present, RunRecord)
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


def _metrics_of(result: Result) -> list[StepRecord]:
    """Return the run's own records; none if its folder is gone or holds another run by now."""
    if result.out is None:
        return []
    try:
        stored = load_run(result.out)
    except InputError:
        return []
    return stored.metrics if stored.created == result.created else []
