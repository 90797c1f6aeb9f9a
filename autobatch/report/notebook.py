"""Results as a notebook shows them: HTML without a style sheet, because a notebook has a theme of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autobatch.core.records import Estimate, Recorded, RunRecord
from autobatch.report.facts import facts_of, headline, recorded_lines
from autobatch.report.page import fill_template, sections_of
from autobatch.report.tables import gpu_table, recorded_tables
from autobatch.report.words import plural


def run_html(run: RunRecord, *, report: Path | None = None) -> str:
    """Return the HTML of a probe, a plan or a whole run.

    Args:
        run: the records.
        report: the report page of the run; None if it was not written.
    """
    return fill_template(
        "notebook.html.j2",
        headline=headline(run),
        facts=facts_of(run, report=report),
        sections=sections_of(run),
        tables=[],
        notes=[],
    )


def estimates_html(estimates: Sequence[Estimate], notes: Sequence[str], recorded: Recorded | None) -> str:
    """Return the HTML of an estimate: one row per GPU, or a recorded program."""
    fitting = f"{sum(estimate.fits for estimate in estimates)} of {plural(len(estimates), 'GPU')}"
    words, *more = [f"Predicted to fit on {fitting}. No GPU was used."]
    tables = [gpu_table(estimates)]
    if recorded is not None:
        (words, *more), tables = recorded_lines(recorded), recorded_tables(recorded)
    return fill_template(
        "notebook.html.j2", headline=words, facts=[], sections=[], tables=tables, notes=[*more, *notes]
    )
