"""The report of a run: one HTML file that loads nothing.

A section shows the facts of one stage, its chart and its remarks; `templates/` lays them out.
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
from autobatch.core.records import RunRecord
from autobatch.core.text import printable_lines
from autobatch.report.charts import Picture, memory_curve_figure, memory_figure, training_figure
from autobatch.report.facts import Fact, facts_of, headline, is_probed_configuration, tiles_of
from autobatch.report.tables import Table, attempts_table, trials_table
from autobatch.report.words import moment

_LONG = 24
"""Length in characters above which a cell counts as a sentence and gets a minimum width."""
_NUMBER = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?%?( [KMGT]?i?B)?")
_PRODUCT = re.compile(r"\(?[\d,]{1,12} × [\d,]{1,12}\)?")


@dataclass(frozen=True)
class Section:
    """A section of the page; empty parts are left out."""

    slug: str
    title: str
    facts: Sequence[Fact] = ()
    picture: Picture | None = None
    notes: Sequence[str] = ()
    command: str = ""
    folded: Table | None = None
    """A table that is shown at a click."""


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
    return fill_template(
        "page.html.j2",
        heading=run.title or "autobatch",
        created=moment(run.created) if run.created else "",
        style=(resources.files(__package__) / "templates" / "page.css").read_text(encoding="utf-8"),
        verdict=headline(run),
        tiles=tiles_of(run),
        sections=sections_of(run),
    )


def sections_of(run: RunRecord) -> list[Section]:
    """Return the sections that have anything to show, in reading order."""
    probe, tuning, training, curve = run.probe, run.tuning, run.training, run.memory_curve
    is_other = run.plan is not None and probe is not None and not is_probed_configuration(probe, run.plan)
    whose = "Of the default configuration, before tuning." if is_other else ""
    facts = facts_of(run)

    def said(part: str) -> list[Fact]:
        return [fact for fact in facts if fact.part == part]

    of_rate = tuning.learning_rate.notes if tuning and tuning.learning_rate else []
    of_tuning = [*tuning.notes, *of_rate] if tuning else []
    held_out, of_training = (training.validation, training.notes) if training else (None, [])
    around = [*sorted(run.versions.items()), *sorted(run.surroundings.items())]
    options = [[name, "" if value is None else str(value)] for name, value in sorted(run.options.items())]
    sections = [
        Section(
            "memory",
            "Where the memory goes",
            picture=memory_curve_figure(curve, run.device.budget_bytes, whose) if curve else None,
        ),
        Section(
            "fits",
            "What fits",
            said("fits"),
            memory_figure(run.device, probe, run.predicted, whose) if probe else None,
            folded=attempts_table(probe.attempts) if probe else None,
        ),
        Section("plan", "Plan", said("plan")),
        Section(
            "tuning",
            "Tuning",
            said("tuning"),
            notes=of_tuning,
            folded=trials_table(tuning.history) if tuning and tuning.history else None,
        ),
        Section(
            "training",
            "Training",
            said("training"),
            training_figure(run.metrics, run.checkpoints, held_out),
            of_training,
        ),
        Section("device", "Device and budget", said("device"), notes=run.device.notes),
        Section(
            "repeat",
            "Repeat this run",
            [Fact("files", label, text) for label, text in around],
            notes=run.notes,
            command=run.command or "",
            folded=Table("Every option of this run", ["Option", "Value"], options) if options else None,
        ),
    ]
    return [
        part for part in sections if any((part.facts, part.picture, part.notes, part.command, part.folded))
    ]


def fill_template(name: str, **values: object) -> str:
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
    """Keep each word with a hyphen in one line: ``--steps``, ``held-out``, ``2026-11-22``; and ``4 × 86``."""
    span = Markup('<span class="unbroken">{}</span>')
    words = Markup(" ").join(span.format(word) if "-" in word else escape(word) for word in text.split(" "))
    return Markup(_PRODUCT.sub(r'<span class="unbroken">\g<0></span>', str(words)))


def _cell_kind(text: str) -> str:
    return "number" if _NUMBER.fullmatch(text) else "long" if len(text) > _LONG else ""
