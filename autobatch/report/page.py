"""The results as HTML: the report of a run, and the output of a notebook.

A page is one file that loads nothing. A section of it shows the facts of one stage, its charts and its
remarks; `templates/` lays them out. A notebook chooses its own theme, so its fragment has no style sheet.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from autobatch.core.files import write_atomic
from autobatch.core.records import Estimate, Recorded, RunRecord
from autobatch.core.text import printable_lines
from autobatch.report.charts import (
    Picture,
    memory_curve_figure,
    memory_figure,
    training_figure,
    trials_figure,
)
from autobatch.report.facts import Fact, facts_of, headline, is_probed_configuration, recorded_lines, tiles_of
from autobatch.report.tables import Table, gpu_table, recorded_tables
from autobatch.report.words import moment, plural

_LONG = 24
"""Length in characters above which a cell counts as a sentence and gets a minimum width."""
_NUMBER = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?%?( [KMGT]?i?B)?")


@dataclass(frozen=True)
class Section:
    """A section of the page; empty parts are left out."""

    slug: str
    title: str
    facts: Sequence[Fact] = ()
    pictures: Sequence[Picture] = ()
    folded: Sequence[Table] = ()
    """Tables that are shown at a click."""
    notes: Sequence[str] = ()
    command: str = ""

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to show."""
        return not (self.facts or self.pictures or self.folded or self.notes or self.command)


def write_report(path: Path, run: RunRecord) -> Path:
    """Write the report of a run to one HTML file, atomically, and return its path.

    Args:
        path: the file to write; missing directories are created.
        run: the records of the run.

    Raises:
        OSError: the file cannot be written.
    """
    return write_atomic(path, render(run).encode())


def render(run: RunRecord) -> str:
    """Build the page. The same records always give the same text."""
    name = run.title or "autobatch"
    style = (resources.files(__package__) / "templates" / "page.css").read_text(encoding="utf-8")
    return _filled(
        "page.html.j2",
        title=f"{name}: autobatch report",
        sections=sections_of(run),
        style=style,
        eyebrow="autobatch report" + (f", {moment(run.created)}" if run.created else ""),
        heading=name,
        verdict=headline(run),
        tiles=tiles_of(run),
    )


def sections_of(run: RunRecord) -> list[Section]:
    """Return the sections that have anything to show, in reading order."""
    probe, tuning, training = run.probe, run.tuning, run.training
    facts = facts_of(run)
    is_other = run.plan is not None and probe is not None and not is_probed_configuration(probe, run.plan)
    whose = "Of the default configuration, before tuning." if is_other else ""
    drawn: dict[str, Picture | None] = {}
    if run.memory_curve:
        drawn["memory"] = memory_curve_figure(run.memory_curve, run.device.budget_bytes, whose)
    if probe:
        drawn["fits"] = memory_figure(run.device, probe, run.predicted, whose)
    if tuning:
        drawn["tuning"] = trials_figure(tuning.history)
    held_out = training.validation if training else None
    drawn["training"] = training_figure(run.metrics, run.checkpoints, held_out)
    notes = {
        "tuning": [*(tuning.notes if tuning else []), *(_rate_notes(run))],
        "training": training.notes if training else [],
        "device": run.device.notes,
    }
    sections = [
        Section(
            part,
            title,
            [fact for fact in facts if fact.part == part],
            [picture] if (picture := drawn.get(part)) else [],
            notes=notes.get(part, []),
        )
        for part, title in {
            "memory": "Where the memory goes",
            "fits": "What fits",
            "plan": "Plan",
            "tuning": "Tuning",
            "training": "Training",
            "device": "Device and budget",
        }.items()
    ]
    around = [
        Fact("files", *pair) for pair in (*sorted(run.versions.items()), *sorted(run.surroundings.items()))
    ]
    rows = [[name, "" if value is None else str(value)] for name, value in sorted(run.options.items())]
    options = [Table("Every option of this run", ["Option", "Value"], rows)] if rows else []
    repeat = Section(
        "repeat", "Repeat this run", around, folded=options, notes=run.notes, command=run.command or ""
    )
    return [section for section in (*sections, repeat) if not section.is_empty]


def _rate_notes(run: RunRecord) -> Sequence[str]:
    return run.tuning.learning_rate.notes if run.tuning and run.tuning.learning_rate else []


def run_html(run: RunRecord, *, report: Path | None = None) -> str:
    """Return the HTML that a notebook shows for a probe, a plan or a whole run.

    Args:
        run: the records.
        report: the report page of the run; None if it was not written.
    """
    pictures = [picture for section in sections_of(run) for picture in section.pictures]
    return _fragment(headline(run), facts=facts_of(run, report=report), pictures=pictures)


def estimates_html(estimates: Sequence[Estimate], notes: Sequence[str], recorded: Recorded | None) -> str:
    """Return the HTML that a notebook shows for an estimate: one row per GPU, or a recorded program."""
    if recorded is not None:
        words, *more = recorded_lines(recorded)
        return _fragment(words, tables=recorded_tables(recorded), notes=[*more, *notes])
    fitting = sum(estimate.fits for estimate in estimates)
    words = f"Predicted to fit on {fitting} of {plural(len(estimates), 'GPU')}. No GPU was used."
    return _fragment(words, tables=[gpu_table(estimates)], notes=notes)


def _fragment(
    words: str,
    *,
    facts: Sequence[Fact] = (),
    pictures: Sequence[Picture] = (),
    tables: Sequence[Table] = (),
    notes: Sequence[str] = (),
) -> str:
    return _filled(
        "notebook.html.j2", headline=words, facts=facts, pictures=pictures, tables=tables, notes=notes
    )


def _filled(name: str, **values: object) -> str:
    """Fill a template. All text is escaped: for HTML, and for terminals, where a page may be printed."""
    return printable_lines(_templates().get_template(name).render(values), limit=None)


@cache
def _templates() -> Environment:
    """Return the templates, each of which is compiled once."""
    templates = Environment(
        loader=PackageLoader("autobatch.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    templates.filters |= {"unbroken": _unbroken, "cell_kind": _cell_kind}
    return templates


def _unbroken(text: str) -> Markup:
    """Keep each word with a hyphen in one line: ``--steps``, ``held-out``, ``2026-11-22``."""
    span = Markup('<span class="unbroken">{}</span>')
    return Markup(" ").join(span.format(word) if "-" in word else escape(word) for word in text.split(" "))


def _cell_kind(text: str) -> str:
    return "number" if _NUMBER.fullmatch(text) else "long" if len(text) > _LONG else ""
