"""The results as HTML: the report of a run, runs side by side, and the output of a notebook.

A page is one file that loads nothing. A section of it shows the facts of one stage, its charts and its
remarks; `templates/` lays them out.

A notebook chooses its own theme, so text and background are inherited there, and charts have colours that
are readable on light and dark. A fragment for it has no style sheet and no script, because notebooks strip
them from untrusted output. Its ids are unique, because a notebook shows many fragments on one page.
"""

from __future__ import annotations

import hashlib
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
    curves_figure,
    memory_curve_figure,
    memory_curves_figure,
    memory_figure,
    training_figure,
    trials_figure,
)
from autobatch.report.drawing import PALETTE, Picture
from autobatch.report.facts import Fact, facts_of, headline, is_probed_configuration, recorded_lines, tiles_of
from autobatch.report.tables import Comparison, Table, gpu_table, recorded_tables
from autobatch.report.words import moment, plural

_LONG = 24
"""Length in characters above which a cell counts as a sentence and gets a minimum width."""
MOST_NAMED = 4
"""Differences that a headline names one by one."""
_NUMBER = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?%?( [KMGT]?i?B)?")


@dataclass(frozen=True)
class Section:
    """A section of the page; empty parts are left out."""

    slug: str
    title: str
    facts: Sequence[Fact] = ()
    drawn: Sequence[Picture | None] = ()
    """Charts; None for one that has nothing to show."""
    tables: Sequence[Table] = ()
    folded: Sequence[Table] = ()
    """Tables that are shown at a click."""
    notes: Sequence[str] = ()
    command: str = ""

    @property
    def pictures(self) -> list[Picture]:
        """The charts that have anything to show."""
        return [picture for picture in self.drawn if picture is not None]

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to show."""
        return not (self.facts or self.pictures or self.tables or self.folded or self.notes or self.command)


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
    return _page(
        f"{name}: autobatch report",
        sections_of(run),
        eyebrow="autobatch report" + (f", {moment(run.created)}" if run.created else ""),
        heading=name,
        verdict=headline(run),
        tiles=tiles_of(run),
    )


def sections_of(run: RunRecord) -> list[Section]:
    """Return the sections that have anything to show, in reading order."""
    probe, tuning, training = run.probe, run.tuning, run.training
    facts = facts_of(run)
    setting = f" in {probe.precision}" if probe and probe.precision else ""
    other = ""
    if run.plan is not None and probe is not None and not is_probed_configuration(probe, run.plan):
        setting += ", before tuning"
        other = f"Of the configuration that was probed{setting}."
    stages = {
        "memory": "Where the memory goes",
        "fits": "What fits",
        "plan": "Plan",
        "tuning": "Tuning",
        "training": "Training",
    }
    pictures: dict[str, list[Picture | None]] = {
        "memory": [
            memory_curve_figure(run.memory_curve, run.device.budget_bytes, setting)
            if run.memory_curve
            else None
        ],
        "fits": [memory_figure(run.device, probe, run.predicted, other) if probe else None],
        "tuning": [trials_figure(tuning.history)] if tuning else [],
        "training": [
            training_figure(run.metrics, run.checkpoints, training.validation if training else None)
        ],
    }
    notes = {
        "tuning": [*tuning.notes, *(tuning.learning_rate.notes if tuning.learning_rate else [])]
        if tuning
        else [],
        "training": training.notes if training else [],
        "device": run.device.notes,
    }
    around = [
        Fact("files", *one) for one in (*sorted(run.versions.items()), *sorted(run.surroundings.items()))
    ]
    rows = [[name, "" if value is None else str(value)] for name, value in sorted(run.options.items())]
    options = [Table("Every option of this run", ["Option", "Value"], rows)] if rows else []
    sections = [
        Section(
            part,
            title,
            [fact for fact in facts if fact.part == part],
            pictures.get(part, []),
            notes=notes.get(part, []),
        )
        for part, title in (stages | {"device": "Device and budget"}).items()
    ]
    sections.append(
        Section(
            "repeat", "Repeat this run", around, folded=options, notes=run.notes, command=run.command or ""
        )
    )
    return [section for section in sections if not section.is_empty]


def write_comparison(path: Path, runs: Sequence[RunRecord], found: Comparison) -> Path:
    """Write the page of runs side by side, atomically, and return its path.

    Args:
        path: the file to write.
        runs: the runs.
        found: what differs between them, and what they reached.

    Raises:
        OSError: the file cannot be written.
    """
    differing, same = found.differing, found.same
    none = [] if differing.rows else ["Their options, versions and hardware are the same."]
    sections = [
        Section(
            "differs", "What differs", tables=[differing] if differing.rows else [], folded=[same], notes=none
        ),
        Section("runs", "What they reached", tables=[found.figures]),
        Section(
            "curves",
            "Over each other",
            drawn=[curves_figure(runs, found.names), memory_curves_figure(runs, found.names)],
        ),
    ]
    shown = [section for section in sections if not section.is_empty]
    title = ", ".join(dict.fromkeys(run.title or "run" for run in runs))
    page = _page(
        f"{title}: runs side by side",
        shown,
        eyebrow="autobatch compare",
        heading=title,
        verdict=_differences([row[0] for row in differing.rows], len(runs)),
    )
    return write_atomic(path, page.encode())


def _differences(names: Sequence[str], runs: int) -> str:
    """Say in a sentence what differs between runs."""
    what = " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
    if len(names) > MOST_NAMED:
        what = f"{len(names)} options, versions and parts of the hardware"
    return f"{plural(runs, 'run')} that differ in {what}." if names else f"{plural(runs, 'run')} of one kind."


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
    fitting = sum(one.fits for one in estimates)
    words = f"Predicted to fit on {fitting} of {plural(len(estimates), 'GPU')}. No GPU was used."
    return _fragment(words, tables=[gpu_table(estimates)], notes=notes)


def _page(title: str, sections: Sequence[Section], **head: object) -> str:
    """Build a page in the style of the report."""
    explored = any(" data-x=" in picture.svg for section in sections for picture in section.pictures)
    return _filled(
        "page.html.j2", title=title, sections=sections, style=_style_sheet(), explored=explored, **head
    )


def _fragment(
    words: str,
    *,
    facts: Sequence[Fact] = (),
    pictures: Sequence[Picture] = (),
    tables: Sequence[Table] = (),
    notes: Sequence[str] = (),
) -> str:
    """Build a fragment: colours as they are, the wide drawings only, and ids of its own."""
    html = _filled(
        "notebook.html.j2", headline=words, facts=facts, pictures=pictures, tables=tables, notes=notes
    )
    # matplotlib's style sheet would apply to the whole notebook. Inherited styles apply to the chart alone.
    left_out = r'<svg class="narrow".*?</svg>|<style[^>]*>.*?</style>| data-(x|panels)="[^"]*"'
    html = re.sub(left_out, "", html, flags=re.DOTALL)
    html = html.replace('<svg class="wide"', '<svg style="stroke-linejoin:round;stroke-linecap:butt"')
    html = re.sub(r"var\(--sans, ([^)]*)\)", r"\1", html)
    html = re.sub(r"var\(--([\w-]+), #[0-9a-f]{6}\)", lambda found: PALETTE[found[1]].either, html)
    name = "autobatch-" + hashlib.sha256(html.encode()).hexdigest()[:12]
    return re.sub(r'(\bid="|aria-describedby="|href="#|url\(#)', rf"\g<1>{name}-", html)


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


def _style_sheet() -> str:
    """Return the CSS. The system's theme chooses the colours, unless the page sets ``data-theme``."""
    light = "".join(f"--{role}:{colors.light};" for role, colors in PALETTE.items())
    dark = "".join(f"--{role}:{colors.dark};" for role, colors in PALETTE.items())
    rest = (resources.files(__package__) / "templates" / "page.css").read_text(encoding="utf-8")
    return (
        f":root{{color-scheme:light dark;{light}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}\n"
        f":root[data-theme=dark]{{color-scheme:dark;{dark}}}\n"
        f":root[data-theme=light]{{color-scheme:light}}\n{rest}"
    )
