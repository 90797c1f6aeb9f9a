"""Results of the library calls with their JSON, and the folders of runs that hold them."""

from __future__ import annotations

from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from autobatch.core import __version__
from autobatch.core.errors import InputError
from autobatch.core.files import METRICS, RESULT, UNREADABLE, read_steps
from autobatch.core.records import (
    SCHEMA,
    DeviceRecord,
    Estimate,
    Plan,
    Probe,
    Record,
    Recorded,
    RunRecord,
    Training,
)
from autobatch.core.text import LONGEST_VALUE, error_text, printable, printable_lines
from autobatch.report.facts import final_facts
from autobatch.report.tables import estimate_lines

NOT_IN_JSON = ("model", "metrics", "notes")
HEAD: dict[str, Any] = {"schema": SCHEMA, "autobatch": __version__}
"""Beginning of every object that ``--json`` prints."""


class Shown:
    """A result as a REPL and a notebook show it; its text is the summary that a terminal shows."""

    def _charts(self) -> list[str]:
        """Return the charts that a notebook shows below the text, as HTML."""
        return []

    def __repr__(self) -> str:
        first = " ".join(str(self).partition("\n")[0].split())
        return f"<{type(self).__name__}: {first}>"

    def _repr_html_(self) -> str:
        """Return the summary and the charts, without a style sheet: a notebook has its own."""
        return printable_lines("\n".join([f"<pre>{escape(str(self))}</pre>", *self._charts()]), limit=None)


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

    def __str__(self) -> str:
        facts = final_facts(self, out=self.out)
        return printable_lines("\n".join(f"{fact.label:<10} {fact.text}" for fact in facts))

    def _charts(self) -> list[str]:
        # Imported here: matplotlib takes half a second, and only a notebook needs it.
        from autobatch.report.page import pictures_of

        run: RunRecord = self
        with suppress(InputError):  # its folder may be gone, or have another run
            stored = None if self.out is None else load_run(self.out)
            if stored is not None and stored.created == self.created:
                run = msgspec.structs.replace(self, metrics=stored.metrics)
        return [
            f'<div style="max-width:600px">{chart.svg}<p>{escape(chart.note)}</p></div>'
            for chart in pictures_of(run).values()
        ]


class TuneResult(Result, frozen=True, kw_only=True):
    """The records of a tuning, which always has a plan."""

    plan: Plan


class FitResult(Result, frozen=True, kw_only=True):
    """The records of a training, which always has a plan."""

    plan: Plan
    training: Training


class ProbeResult(Shown, Probe, frozen=True, kw_only=True):
    """A probe and the device that it ran on."""

    device: DeviceRecord

    def __str__(self) -> str:
        return str(Result(device=self.device, probe=self))


class PlanResult(Shown, Plan, frozen=True, kw_only=True):
    """A plan, with the device and the probe that it is based on."""

    device: DeviceRecord
    probe: Probe
    notes: list[str] = []
    """Remarks of the probe and the plan, one per line."""

    def __str__(self) -> str:
        run = Result(device=self.device, probe=self.probe, plan=self)
        return "\n".join([str(run), *(f"note: {printable(note)}" for note in self.notes)])


class Estimates(Shown, Record, frozen=True, kw_only=True):
    """Predictions for one workload, one per GPU."""

    estimates: list[Estimate]
    recorded: Recorded | None = None
    """The program of a single memory snapshot, which has no ``estimates``; else None."""
    notes: list[str] = []

    def to_json(self, *_: str) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        return {**HEAD, **msgspec.to_builtins(self)}

    def __str__(self) -> str:
        lines = estimate_lines(self.estimates, self.recorded)
        return printable_lines("\n".join([*lines, *(f"note: {note}" for note in self.notes)]))

    def __repr__(self) -> str:
        fits = ", ".join(f"{gpu.micro_batch} on {gpu.profile}" for gpu in self.estimates)
        return f"<Estimates: {printable(fits, limit=LONGEST_VALUE)}>"


def load_run(folder: Path) -> RunRecord:
    """Read the folder of a run.

    Args:
        folder: contains ``result.json`` and, after training, ``metrics.jsonl``.

    Raises:
        InputError: ``result.json`` is missing or is not the result of a run, or metrics cannot be read.
    """
    try:
        run = msgspec.json.decode((folder / RESULT).read_bytes(), type=RunRecord)
        metrics = [record for _, record in read_steps(folder / METRICS)]
    except (OSError, *UNREADABLE) as error:
        raise InputError(f"{folder} is not the folder of a run: {error_text(error)}") from error
    return msgspec.structs.replace(run, metrics=metrics)
