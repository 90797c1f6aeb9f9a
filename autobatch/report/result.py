"""Results of the library calls with their JSON, and the folders of runs that hold them."""

from __future__ import annotations

from contextlib import suppress
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
from autobatch.report.facts import describe_estimate, final_facts, recorded_lines
from autobatch.report.words import plural

RESULT = "result.json"
"""File with the records of a run, in its folder."""
NOT_IN_JSON = ("model", "metrics", "notes")
HEAD: dict[str, Any] = {"schema": SCHEMA, "autobatch": __version__}
"""Beginning of every object that ``--json`` prints."""


class Shown:
    """A result as a terminal, a REPL and a notebook show it."""

    def _run(self) -> Result:
        """Return what is known, as the records of a run."""
        raise NotImplementedError

    def __str__(self) -> str:
        """Return the summary that a terminal shows."""
        return printable_lines(self._text())

    def _text(self) -> str:
        run = self._run()
        facts = [fact for fact in final_facts(run, out=run.out) if fact.kind != "path"]
        return "\n".join(f"{fact.label:<10} {fact.text}" for fact in facts)

    def __repr__(self) -> str:
        first = " ".join(str(self).partition("\n")[0].split())
        return f"<{type(self).__name__}: {first}>"

    def _repr_html_(self) -> str:
        # Imported here: matplotlib takes half a second, and only a notebook needs it.
        from autobatch.report.notebook import run_html

        run = self._run()
        with suppress(InputError):  # its folder may be gone, or have another run
            stored = None if run.out is None else load_run(run.out)
            if stored is not None and stored.created == run.created:
                run = msgspec.structs.replace(run, metrics=stored.metrics)
        return run_html(run, report=run.report)


class Result(Shown, RunRecord, frozen=True, kw_only=True):
    """The records of a run. A part that did not run is ``None``."""

    profile: Path | None = None
    """The file in which the limit is saved."""
    report: Path | None = None
    out: Path | None = None
    """The folder of the run."""
    model: Any = None
    """The trained ``torch.nn.Module``, which the JSON leaves out; None if the ranks share it."""

    def to_json(self, *parts: str) -> dict[str, Any]:
        """Return the object that ``--json`` prints.

        Args:
            parts: names of the parts to print; all parts if none are given.
        """
        names = parts or tuple(name for name in self.__struct_fields__ if name not in NOT_IN_JSON)
        return HEAD | {name: msgspec.to_builtins(getattr(self, name), enc_hook=str) for name in names}

    def _run(self) -> Result:
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

    def _run(self) -> Result:
        return Result(device=self.device, probe=self)


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

    def _run(self) -> Result:
        return Result(device=self.device, probe=self.probe, plan=self)

    def _text(self) -> str:
        return "\n".join([super()._text(), *(f"note: {note}" for note in self.notes)])


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
        from autobatch.report.notebook import estimates_html

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
        runs = _runs_in(folder, "*")
    except OSError as error:
        raise InputError(f"cannot look for a run in {folder}: {error.strerror or error}") from error
    if not runs:
        raise InputError(
            f"there is no run in {folder} or in a folder directly in it: give the folder of a run, which "
            f"has {RESULT}, or train with autobatch fit"
        )
    return runs[0]


def newest_runs(runs: Path, number: int) -> list[Path]:
    """Return the newest runs in the folder of one workload, that of the newest of all, the oldest first.

    Args:
        runs: the folder of runs, with runs in it and in the folders of workloads.
        number: how many runs to return.

    Raises:
        InputError: there are fewer.
    """
    known = _runs_in(runs, "*", "*/*")
    if not known:
        raise InputError(f"there is no run in {runs}: give the folder of a run, or train with autobatch fit")
    newest = [run for run in known if run.parent == known[0].parent][:number]
    if len(newest) < number:
        raise InputError(
            f"{newest[0].parent} has fewer than {number} runs, found {newest[0]}: give RUN RUN, or "
            "train again"
        )
    return newest[::-1]


def _runs_in(folder: Path, *patterns: str) -> list[Path]:
    """Return the runs that patterns find, the newest first, without links, which lead elsewhere."""
    # A later run in the same folder moves the earlier one aside.
    written = {
        path.parent: path.stat().st_mtime_ns
        for pattern in patterns
        for path in folder.glob(f"{pattern}/{RESULT}")
        if path.is_file() and not path.parent.name.startswith("previous-")
    }
    own = [run for run in written if run.resolve() == folder.resolve() / run.relative_to(folder)]
    return sorted(own, key=lambda run: (written[run], run), reverse=True)


def load_run(folder: Path) -> RunRecord:
    """Read the folder of a run.

    Args:
        folder: contains ``result.json`` and, after training, ``metrics.jsonl``. Unreadable rows of metrics,
            such as the last row of a killed run, are left out, and a note states their number.

    Raises:
        InputError: ``result.json`` is missing or is not the result of a run, or metrics cannot be read.
    """
    try:
        content = read_json(folder / RESULT)
    except InputError as error:
        raise InputError(f"{error}. Give the folder of a run, which has {RESULT}") from error
    metrics, unreadable = _read_rows(folder / "metrics.jsonl")
    try:
        known = {name: value for name, value in content.items() if value is not None}
        versions = {"autobatch": known["autobatch"]} if "autobatch" in known else {}
        defaults = {"title": folder.resolve().name, "versions": versions}
        run = msgspec.convert(defaults | known | {"metrics": metrics}, RunRecord)
    except (AttributeError, *UNREADABLE) as error:
        reason = error_text(error)
        if not isinstance(content, dict):
            reason = f"expected a JSON object, found {type(content).__name__}"
        raise InputError(
            f"{folder / RESULT} is not the result of a run: {reason}. Give the folder of a run"
        ) from error
    if not unreadable:
        return run
    left_out = f"left out {plural(unreadable, 'unreadable line')} of metrics.jsonl"
    return msgspec.structs.replace(run, notes=[*run.notes, left_out])


def _read_rows(path: Path) -> tuple[list[StepRecord], int]:
    """Return the readable rows of metrics, and the number of unreadable ones."""
    try:
        lines = [line for line in path.read_bytes().splitlines() if line.strip()]
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    rows = []
    for line in lines:
        with suppress(*UNREADABLE):
            rows.append(msgspec.json.decode(line, type=StepRecord))
    return rows, len(lines) - len(rows)
