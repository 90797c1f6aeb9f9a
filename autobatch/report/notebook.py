"""Notebook output of a result: one HTML fragment with its facts and the charts of the report.

A notebook chooses its own theme, so text and background are inherited, and charts use mid-tones that are
readable on light and dark. A fragment has no style sheet and no script, because notebooks strip them from
untrusted output. Its ids are unique, because a notebook shows many fragments on one page.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from autobatch.core.records import Estimate, RunRecord
from autobatch.core.units import format_bytes
from autobatch.report.charts.drawing import Picture, Table
from autobatch.report.facts import Fact, describe_split, facts_of, headline
from autobatch.report.page import sections_of, templates
from autobatch.report.theme import EITHER
from autobatch.report.words import count, plural

_GLYPHS = {
    "line": "—", "dash": "┄", "dot": "●", "ring": "○", "cross": "✕", "block": "■", "triangle": "▲",
}  # fmt: skip


def run_html(run: RunRecord, *, report: Path | None = None) -> str:
    """Return the HTML of a probe, a plan or a whole run.

    Args:
        run: the records.
        report: the report page of the run; None if it was not written.
    """
    pictures = [picture for section in sections_of(run) for picture in section.pictures]
    return _fragment(headline(run), facts_of(run, report=report), pictures)


def estimates_html(estimates: Sequence[Estimate], notes: Sequence[str]) -> str:
    """Return the HTML of an estimate: one row per GPU."""
    fitting = [one for one in estimates if one.fits]
    words = f"Predicted to fit on {len(fitting)} of {plural(len(estimates), 'GPU')}. No GPU was used."
    head = ["GPU", "Budget", "Precision", "Micro-batch", "Peak reserved", "Optimizer step"]
    table = Table(caption=words, head=head, rows=[_estimate_row(one) for one in estimates])
    return _fragment(words, tables=[table], notes=notes)


def _estimate_row(one: Estimate) -> list[str]:
    size = count(one.micro_batch) if one.fits else "none"
    if one.fits and one.micro_batch_low != one.micro_batch_high:
        size += f" ({count(one.micro_batch_low)} to {count(one.micro_batch_high)})"
    return [
        one.profile,
        format_bytes(one.budget_bytes),
        one.precision,
        size,
        format_bytes(one.peak_reserved_bytes),
        "" if one.plan is None else describe_split(one.plan),
    ]


def _fragment(
    words: str,
    facts: Sequence[Fact] = (),
    pictures: Sequence[Picture] = (),
    *,
    tables: Sequence[Table] = (),
    notes: Sequence[str] = (),
) -> str:
    made = templates().get_template("notebook.html.j2").render(
        headline=words,
        facts=facts,
        drawings=[(picture, _first_drawing(picture.svg)) for picture in pictures],
        tables=tables,
        notes=notes,
        palette=EITHER,
        glyphs=_GLYPHS,
    )  # fmt: skip
    return _named(made)


def _first_drawing(svg: str) -> str:
    """Return the wide drawing of a picture; without a style sheet, the narrow one would show too."""
    wide = svg[: svg.index("</svg>") + len("</svg>")] if "</svg>" in svg else svg
    # matplotlib's style sheet would apply to the whole notebook. Inherited styles apply to the chart alone.
    wide = re.sub(r"<style[^>]*>.*?</style>", "", wide, flags=re.DOTALL)
    return wide.replace("<svg ", '<svg style="stroke-linejoin:round;stroke-linecap:butt" ', 1)


def _named(markup: str) -> str:
    """Replace colour variables by their values, and make the ids of this fragment unique."""
    html = re.sub(r"var\(--sans, ([^)]*)\)", r"\1", markup)
    html = re.sub(r"var\(--([\w-]+), #[0-9a-f]{6}\)", lambda found: EITHER[found[1]], html)
    name = "autobatch-" + hashlib.sha256(html.encode()).hexdigest()[:12]
    return re.sub(r'(\bid="|aria-describedby="|href="#|url\(#)', rf"\g<1>{name}-", html)
