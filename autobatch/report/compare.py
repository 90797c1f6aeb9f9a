"""Runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from autobatch.core.errors import InputError
from autobatch.core.options import all_fields
from autobatch.core.records import RunRecord
from autobatch.core.units import format_bytes
from autobatch.report.facts import describe_split, peak_bytes
from autobatch.report.result import RESULT
from autobatch.report.words import count, decimal, knobs_in_words, metric_in_words, moment

Rows = dict[str, list[str]]
"""For the name of each figure its cells, one for each run."""


def newest_two(runs: Path) -> list[Path]:
    """Return the newest two runs of the workload that ran last, the earlier one first.

    Args:
        runs: the folder of all runs, as ``NAME/DATE``.

    Raises:
        InputError: there are fewer.
    """
    ended = sorted(runs.glob(f"*/*/{RESULT}"), key=lambda path: path.stat().st_mtime_ns)
    folders = [path.parent for path in ended if path.parent.parent == ended[-1].parent.parent]
    if len(folders) < 2:
        raise InputError(f"{runs} has no two runs of the workload that ran last: give RUN RUN")
    return folders[-2:]


def compare_runs(runs: Sequence[RunRecord]) -> tuple[Rows, Rows]:
    """Return what runs were given, and what they planned and reached, without what no run has."""

    def row(part: str, cell: Callable[..., str]) -> list[str]:
        """Return a cell for each run that has the part, for example ``plan``."""
        return ["" if getattr(run, part) is None else cell(getattr(run, part)) for run in runs]

    def recorded(part: str, unset: str = "–") -> Rows:
        records: list[dict[str, object]] = [getattr(run, part) for run in runs]
        # Where a run writes and what it prints is no difference.
        names = sorted({name for record in records for name in record} - hidden)
        cells = {name: [record.get(name) for record in records] for name in names}
        return {
            name: [unset if value is None else str(value) for value in values]
            for name, values in cells.items()
            if any(value is not None for value in values)
        }

    def held_out(name: str) -> list[str]:
        return row(
            "training",
            lambda training: (
                metric_in_words(name, training.validation[name]).removeprefix(f"{name} ")
                if name in training.validation
                else ""
            ),
        )

    hidden = {name for name, field in all_fields().items() if field.group == "output"} | {"out", "resume"}
    options = recorded("options", unset="not set")
    metrics = dict.fromkeys(name for run in runs if run.training for name in run.training.validation)
    given = {
        "workload": [run.title or "–" for run in runs],
        "device": row("device", lambda device: device.name),
        "budget": row("device", lambda device: format_bytes(device.budget_bytes)),
        **recorded("versions"),
        **{f"--{name.replace('_', '-')}": cells for name, cells in options.items()},
        "precision": row("plan", lambda plan: plan.precision),
        "tuned": row("plan", lambda plan: knobs_in_words(plan.knobs)),
    }
    reached = {
        "batch": row("plan", lambda plan: count(plan.target_batch)),
        "split": row("plan", describe_split),
        "learning rate": row("plan", lambda plan: decimal(plan.learning_rate, 3)),
        **{f"held-out {name}": held_out(name) for name in metrics},
        "training loss": row("training", lambda training: decimal(training.final_loss)),
        "steps": row("training", lambda training: count(training.optimizer_steps)),
        "samples/s": row("training", lambda training: decimal(training.samples_per_s)),
        "time, s": row("training", lambda training: decimal(training.seconds, 3)),
        "peak memory": row(
            "training", lambda training: format_bytes(peak) if (peak := peak_bytes(training)) else ""
        ),
        "recoveries": row("training", lambda training: count(training.oom_recoveries)),
        "date": [moment(run.created) for run in runs],
    }
    return given, {name: cells for name, cells in reached.items() if any(cells)}
