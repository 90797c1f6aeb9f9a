"""The report page: one self-contained HTML file, without network access or other files.

A section shows the facts of one stage, its charts and its remarks. `templates/page.html.j2` lays them out.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autobatch.core.files import write_atomic
from autobatch.core.records import RunRecord
from autobatch.report.charts.curves import training_figure
from autobatch.report.charts.drawing import Mark, Picture, Table
from autobatch.report.charts.memory import memory_curve_figure, memory_figure
from autobatch.report.charts.split import plan_figure
from autobatch.report.charts.trials import comparison_figure, trials_figure
from autobatch.report.facts import Fact, Part, Tile, facts_of, headline, tiles_of
from autobatch.report.theme import style_sheet
from autobatch.report.words import moment

if TYPE_CHECKING:
    from jinja2 import Environment

PHASES = {
    "forward": "series-1",
    "backward": "series-2",
    "data": "series-3",
    "step": "series-5",
    "checkpoint": "series-6",
    "validation": "series-7",
    "other": "series-4",
}
"""Colours of the phases of a training."""
_LONG = 24
"""Length in characters above which a cell counts as a sentence and gets a minimum width."""
_NUMBER = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?%?( [KMGT]?i?B)?")


@dataclass(frozen=True)
class Bar:
    """One bar of several parts, and its legend."""

    title: str
    marks: list[Mark]
    sizes: list[float]


@dataclass(frozen=True)
class Section:
    """A section of the page; empty parts are left out."""

    slug: str
    title: str
    facts: Sequence[Fact] = ()
    pictures: Sequence[Picture] = ()
    bar: Bar | None = None
    tables: Sequence[Table] = ()
    folded: Sequence[Table] = ()
    """Tables that are shown at a click."""
    notes: Sequence[str] = ()
    command: str = ""


def write_report(path: Path, run: RunRecord) -> Path:
    """Write the report of a run to one HTML file, atomically.

    Args:
        path: the file to write; missing directories are created.
        run: the records of the run.

    Returns:
        ``path``.

    Raises:
        OSError: the file cannot be written.
    """
    return write_atomic(path, render(run).encode())


def render(run: RunRecord) -> str:
    """Build the page. The same records always give the same text."""
    name = run.title or "autobatch"
    return page_of(
        f"{name}: autobatch report",
        sections_of(run),
        eyebrow="autobatch report" + (f", {moment(run.created)}" if run.created else ""),
        heading=name,
        verdict=headline(run),
        tiles=tiles_of(run),
    )


def page_of(
    title: str,
    sections: Sequence[Section],
    *,
    eyebrow: str,
    heading: str,
    verdict: str = "",
    tiles: Sequence[Tile] = (),
) -> str:
    """Build a page in the style of the report."""
    return templates().get_template("page.html.j2").render(
        title=title,
        sections=sections,
        eyebrow=eyebrow,
        heading=heading,
        verdict=verdict,
        tiles=tiles,
        style=style_sheet() + _file("page.css"),
        copy=_file("copy.js"),
    )  # fmt: skip


def sections_of(run: RunRecord) -> list[Section]:
    """Return the sections that have anything to show, in reading order."""
    facts, training, tuning = facts_of(run), run.training, run.tuning

    def part(name: Part) -> list[Fact]:
        return [fact for fact in facts if fact.part == name]

    search = None if run.probe is None else memory_figure(run.device, run.probe, run.predicted)
    curve = None if run.memory_curve is None else memory_curve_figure(run.memory_curve)
    plan = None if run.plan is None or run.plan.size_cut is not None else plan_figure(run.plan)
    trials = [] if tuning is None else tuning.history
    compared = None if tuning is None else comparison_figure(tuning.comparisons)
    rates = None if tuning is None else tuning.learning_rate
    curves = training_figure(run.metrics, run.checkpoints)
    around = [
        Fact("files", *one) for one in (*sorted(run.versions.items()), *sorted(run.surroundings.items()))
    ]
    found = [
        Section("fits", "What fits", part("fits"), drawn(search, curve)),
        Section("plan", "Plan", part("plan"), drawn(plan)),
        Section(
            "tuning",
            "Tuning",
            part("tuning"),
            drawn(compared, trials_figure(trials)),
            notes=[] if rates is None else rates.notes,
        ),
        Section(
            "training",
            "Training",
            part("training"),
            drawn(curves),
            bar=None if training is None else _times(training.phase_seconds),
            notes=[] if training is None else training.notes,
        ),
        Section("device", "Device and budget", part("device"), notes=run.device.notes),
        Section(
            "repeat",
            "Repeat this run",
            around,
            folded=_options(run),
            notes=run.notes,
            command=run.command or "",
        ),
    ]
    return [one for one in found if one.facts or one.pictures or one.folded or one.notes or one.command]


def drawn(*pictures: Picture | None) -> list[Picture]:
    """Return the pictures that have anything to show."""
    return [picture for picture in pictures if picture is not None]


def _times(phase_seconds: dict[str, float]) -> Bar | None:
    """Return where the time of the training went."""
    whole = sum(phase_seconds.values())
    shares = {name: seconds / whole for name, seconds in phase_seconds.items() if seconds} if whole else {}
    if not shares:
        return None
    marks = [
        Mark(role=PHASES.get(name, "rule"), label=f"{name} {100 * share:.0f} %", shape="block")
        for name, share in shares.items()
    ]
    return Bar("Where the time went", marks, [round(share, 4) for share in shares.values()])


def _options(run: RunRecord) -> list[Table]:
    rows = [[name, "" if value is None else str(value)] for name, value in sorted(run.options.items())]
    return [Table(caption="Every option of this run", head=["Option", "Value"], rows=rows)] if rows else []


@functools.cache
def templates() -> Environment:
    """Return the templates of the page and of the notebook. All text is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    found = Environment(
        loader=PackageLoader("autobatch.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    found.filters |= {"unbroken": _unbroken, "cell_kind": _cell_kind}
    return found


def _unbroken(text: str) -> Any:
    """Keep each option such as ``--steps`` in one line: a ``--`` alone at a line end misleads."""
    from markupsafe import Markup, escape

    words = [Markup('<span class="unbroken">{}</span>').format(one) if "--" in one else escape(one)
             for one in text.split(" ")]  # fmt: skip
    return Markup(" ").join(words)


def _cell_kind(text: str) -> str:
    return "number" if _NUMBER.fullmatch(text) else "long" if len(text) > _LONG else ""


def _file(name: str) -> str:
    return (resources.files(__package__) / "templates" / name).read_text(encoding="utf-8")
