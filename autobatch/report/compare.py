"""Runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autobatch.core.options import all_fields, spelled
from autobatch.core.records import RunRecord
from autobatch.report.facts import facts_of
from autobatch.report.words import moment

Rows = dict[str, list[str]]
"""For the name of each figure its cells, one for each run; a cell is empty if its run has no such figure."""


def compare_runs(runs: Sequence[RunRecord]) -> tuple[Rows, Rows]:
    """Return what runs were given, and what they planned and reached, without what no run has."""
    # Where a run writes and what it prints is no difference.
    hidden = {name for name, field in all_fields().items() if field.group == "output"} | {"out", "resume"}
    given, reached = [], []
    for run in runs:
        options = {name: value for name, value in run.options.items() if value is not None}
        facts = [fact for fact in facts_of(run) if fact.label and fact.part != "files"]
        given.append(
            {
                "workload": run.title or "",
                **{fact.label: fact.text for fact in facts if fact.part == "device"},
                **run.versions,
                **{spelled(name): str(options[name]) for name in options if name not in hidden},
            }
        )
        known = {fact.label: fact.text for fact in facts if fact.part != "device"}
        reached.append(known | {"date": moment(run.created)})
    return _side_by_side(given), _side_by_side(reached)


def _side_by_side(records: Sequence[Mapping[str, str]]) -> Rows:
    names = dict.fromkeys(name for record in records for name in record)
    rows = {name: [record.get(name, "") for record in records] for name in names}
    return {name: cells for name, cells in rows.items() if any(cells)}
