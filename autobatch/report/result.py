"""Results of the library calls, with their JSON and their notebook output."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec

from autobatch.core.errors import InputError
from autobatch.core.files import UNREADABLE, read_json
from autobatch.core.records import (
    SCHEMA,
    DeviceRecord,
    Estimate,
    Plan,
    Probe,
    RankEstimate,
    Record,
    Recorded,
    RunRecord,
    StepRecord,
    Training,
)
from autobatch.core.text import error_text, printable_lines
from autobatch.core.version import __version__
from autobatch.report.facts import describe_estimate, recorded_lines, text_of
from autobatch.report.words import plural

RESULT = "result.json"
"""File with the records of a run, in its folder."""
NOT_IN_JSON = ("model", "metrics", "notes")
HEAD: dict[str, Any] = {"schema": SCHEMA, "autobatch": __version__}
"""Beginning of every object that ``--json`` prints."""


class Shown:
    """A result as a terminal, a REPL and a notebook show it."""

    def _run(self) -> RunRecord:
        """Return what is known, as records of a run."""
        raise NotImplementedError

    def __str__(self) -> str:
        """Return the summary that a terminal shows."""
        return printable_lines(self._text())

    def _text(self) -> str:
        run = self._run()
        return text_of(run, out=run.out if isinstance(run, Result) else None)

    def __repr__(self) -> str:
        first = " ".join(str(self).partition("\n")[0].split())
        return f"<{type(self).__name__}: {first}>"

    def _repr_html_(self) -> str:
        # Imported here: matplotlib takes half a second, and only a notebook needs it.
        from autobatch.report.page import run_html

        run = self._run()
        if isinstance(run, Result):
            return run_html(msgspec.structs.replace(run, metrics=_metrics_of(run)), report=run.report)
        return run_html(run)


class Result(Shown, RunRecord, frozen=True, kw_only=True):
    """The records of a run. A part that did not run is ``None``."""

    profile: Path | None = None
    """The file in which the limit is saved."""
    report: Path | None = None
    out: Path | None = None
    """The folder of the run."""
    model: Any = None
    """The trained ``torch.nn.Module``, which the JSON leaves out."""

    def to_json(self, *parts: str) -> dict[str, Any]:
        """Return the object that ``--json`` prints.

        Args:
            parts: names of the parts to print; all parts if none are given.
        """
        names = parts or tuple(name for name in self.__struct_fields__ if name not in NOT_IN_JSON)
        values = {name: getattr(self, name) for name in names}
        return HEAD | {
            name: str(value) if isinstance(value, Path) else msgspec.to_builtins(value)
            for name, value in values.items()
        }

    def _run(self) -> RunRecord:
        return self


class TuneResult(Result, frozen=True, kw_only=True):
    """The records of a tuning, which always has a probe and a plan."""

    probe: Probe
    plan: Plan


class FitResult(Result, frozen=True, kw_only=True):
    """The records of a training, which always has a plan."""

    plan: Plan
    training: Training


class ProbeResult(Shown, Probe, frozen=True, kw_only=True):
    """A probe and the device that it ran on."""

    device: DeviceRecord

    @property
    def probe(self) -> Probe:
        """The probe, under its name in the JSON."""
        return self

    def _run(self) -> RunRecord:
        return RunRecord(device=self.device, probe=self)


class PlanResult(Shown, Plan, frozen=True, kw_only=True):
    """A plan, with the device and the probe that it is based on."""

    device: DeviceRecord
    probe: Probe
    notes: list[str] = []
    """Remarks of the probe and the plan, one per line."""

    @property
    def plan(self) -> Plan:
        """The plan, under its name in the JSON."""
        return self

    def _run(self) -> RunRecord:
        return RunRecord(device=self.device, probe=self.probe, plan=self)


class Estimates(Shown, Record, frozen=True, kw_only=True):
    """Predictions for one workload, one per GPU."""

    estimates: list[Estimate]
    over_ranks: list[RankEstimate] = []
    """The same for other numbers of ranks and other GPUs; empty for one rank."""
    recorded: Recorded | None = None
    """The program of a single memory snapshot, which has no ``estimates``; else None."""
    notes: list[str] = []

    def to_json(self, *_: str) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        return {**HEAD, **msgspec.to_builtins(self)}

    def _text(self) -> str:
        """Return one line for each GPU, and the notes."""
        recorded = [] if self.recorded is None else recorded_lines(self.recorded)
        return "\n".join([*map(describe_estimate, self.estimates), *recorded, *self.notes])

    def _repr_html_(self) -> str:
        from autobatch.report.page import estimates_html

        return estimates_html(self.estimates, self.notes, self.recorded)


def find_run(folder: Path) -> Path:
    """Return the folder of a run: this one, that of this result, or the newest of the runs directly in it.

    Raises:
        InputError: there is none.
    """
    try:
        if folder.name == RESULT and folder.is_file():
            return folder.parent
        if (folder / RESULT).exists():
            return folder
        found = _runs_in(folder, "*")
    except OSError as error:
        raise InputError(f"cannot look for a run in {folder}: {error.strerror or error}") from error
    if not found:
        raise InputError(
            f"there is no run in {folder} or in a folder directly in it: give the folder of a run, which "
            f"has {RESULT}, or train with autobatch fit"
        )
    return found[0]


def newest_runs(runs: Path, number: int) -> list[Path]:
    """Return the newest runs of one workload, that of the newest of all, the oldest of them first.

    Args:
        runs: the folder of runs, with runs in it and in the folders of workloads.
        number: how many runs to return.

    Raises:
        InputError: there are fewer.
    """
    known = _runs_in(runs, "*", "*/*")
    if not known:
        raise InputError(f"there is no run in {runs}: give the folder of a run, or train with autobatch fit")
    if number == 1:
        return known[:1]
    title = _read_result(known[0])["title"]
    same = (run for run in known[1:] if _title_of(run) == title)
    found = [known[0], *itertools.islice(same, number - 1)]
    if len(found) < number:
        raise InputError(
            f"{runs} has fewer than {number} runs of {title}, found {found[0]}: give RUN RUN, or train again"
        )
    return found[::-1]


def _title_of(run: Path) -> str | None:
    """Return the title of a run; None if its result is damaged."""
    try:
        return str(_read_result(run)["title"])
    except InputError:
        return None


def _runs_in(folder: Path, *patterns: str) -> list[Path]:
    """Return the runs that patterns find, the newest first, without links, which lead elsewhere."""
    # A later run in the same folder moves the earlier one aside.
    found = {
        path.parent: path.stat().st_mtime_ns
        for pattern in patterns
        for path in folder.glob(f"{pattern}/{RESULT}")
        if path.is_file() and not path.parent.name.startswith("previous-")
    }
    own = [run for run in found if run.resolve() == folder.resolve() / run.relative_to(folder)]
    return sorted(own, key=lambda run: (found[run], run), reverse=True)


def load_run(folder: Path, *, is_whole: bool = False) -> RunRecord:
    """Read the folder of a run.

    Args:
        folder: contains ``result.json`` and, after training, ``metrics.jsonl``. Unreadable rows of metrics,
            such as the last row of a killed run, are left out, and a note states their number.
        is_whole: raise if rows of metrics are unreadable, other than the last one.

    Raises:
        InputError: ``result.json`` is missing or is not the result of a run, or metrics are damaged.
    """
    found, metrics_path = _read_result(folder), folder / "metrics.jsonl"
    metrics, unreadable, is_cut = _read_rows(metrics_path)
    if is_whole and unreadable and not is_cut:
        raise InputError(
            f"{metrics_path} is damaged: {unreadable} of its {plural(len(metrics) + unreadable, 'line')} "
            "cannot be read. Give another run, or restore the file"
        )
    versions = {"autobatch": found["autobatch"]} if "autobatch" in found else {}
    try:
        run = msgspec.convert({"versions": versions} | found | {"metrics": metrics}, RunRecord)
    except UNREADABLE as error:
        raise _not_a_run(folder, error_text(error)) from error
    if not unreadable:
        return run
    left_out = f"left out {plural(unreadable, 'unreadable line')} of metrics.jsonl"
    return msgspec.structs.replace(run, notes=[*run.notes, left_out])


def _read_result(folder: Path) -> dict[str, Any]:
    """Return what ``result.json`` says, with a title, without what did not run."""
    try:
        found = read_json(folder / RESULT)
    except InputError as error:
        raise InputError(f"{error}. Give the folder of a run, which has {RESULT}") from error
    if not isinstance(found, dict):
        raise _not_a_run(folder, f"expected a JSON object, found {type(found).__name__}")
    known = {name: one for name, one in found.items() if one is not None}
    return {"title": folder.resolve().name} | known


def _not_a_run(folder: Path, reason: str) -> InputError:
    return InputError(f"{folder / RESULT} is not the result of a run: {reason}. Give the folder of a run")


def _read_rows(path: Path) -> tuple[list[StepRecord], int, bool]:
    """Return the readable rows of metrics, the number of unreadable ones, and if only the last one is."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return [], 0, False
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    rows, unreadable, was_read = [], 0, True
    for line in filter(None, map(bytes.strip, lines)):
        try:
            rows.append(msgspec.json.decode(line, type=StepRecord))
            was_read = True
        except UNREADABLE:
            unreadable += 1
            was_read = False
    return rows, unreadable, bool(rows) and unreadable == 1 and not was_read


def _metrics_of(result: Result) -> list[StepRecord]:
    """Return the metrics of the run; empty if its folder is gone or now contains another run."""
    if result.out is None:
        return []
    try:
        stored = load_run(result.out)
    except InputError:
        return []
    return stored.metrics if stored.created == result.created else []
