"""Results as a notebook shows them: HTML without a style sheet, because a notebook has a theme of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from autobatch.core.records import Estimate, Recorded, RunRecord
from autobatch.report.facts import facts_of, headline, recorded_lines
from autobatch.report.page import fill_template, sections_of
from autobatch.report.tables import gpu_table, recorded_tables
from autobatch.report.words import plural

SHOWN_EVERY_S = 0.2
"""Seconds between two steps that are shown."""


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


class NotebookLine:
    """The line of a notebook cell, with a bar that the browser draws; it needs no widgets."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown_at = 0.0
        self._begin: tuple[int, float] | None = None
        """The first step that was shown, and its time."""

    def show(self, words: Sequence[str], done: int = 0, total: int | None = None) -> None:
        """Show words; a step of a training is left out if one has just been shown.

        Args:
            words: what happens, and figures.
            done: steps done.
            total: all steps; None if their number is unknown.
        """
        now, size, left = time.monotonic(), "", []
        if total is not None:
            if done < total and now - self._shown_at < SHOWN_EVERY_S:
                return
            size = f'value="{done}" max="{total}" '
            self._begin = first, since = self._begin or (done, now)
            left = [f"{(now - since) / (done - first) * (total - done):,.0f} s left"] if done > first else []
        self._shown_at, text = now, " · ".join([*words, *left])
        style = 'style="width: 20em; vertical-align: middle"'
        html = f"<progress {size}{style}></progress> {escape(text)}"
        self._update({"text/plain": text, "text/html": html})

    def end(self) -> None:
        """Remove the line."""
        if self._handle is not None:
            self._update({"text/plain": "", "text/html": ""})

    def _update(self, content: dict[str, str]) -> None:
        if self._handle is None:
            self._handle = import_module("IPython.display").display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)
