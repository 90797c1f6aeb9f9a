"""Notebook output of a result: one HTML fragment with a sentence, a table and the charts of the report.

A notebook chooses its own theme, so text and background are inherited, and charts use mid-tones that are
readable on light and dark. A fragment has no style sheet and no script, because notebooks strip them from
untrusted output. Its ids are unique, because a notebook shows many fragments on one page.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from autobatch.core.records.device import DeviceRecord
from autobatch.core.records.estimate import Estimate
from autobatch.core.records.plan import Plan
from autobatch.core.records.probe import Probe
from autobatch.core.records.run import RunRecord
from autobatch.core.records.training import StepRecord
from autobatch.core.units import format_bytes
from autobatch.report.charts.curves import training_figure
from autobatch.report.charts.drawing import Mark, Picture, Table
from autobatch.report.charts.memory import memory_figure
from autobatch.report.charts.rates import rates_figure
from autobatch.report.charts.split import plan_figure
from autobatch.report.charts.trials import comparison_figure, trials_figure
from autobatch.report.html import Markup, element, join
from autobatch.report.sentences import (
    fits_in_words,
    headline,
    rate_in_words,
    rates_in_words,
    split_in_words,
    training_in_words,
    tuning_in_words,
)
from autobatch.report.theme import EITHER
from autobatch.report.words import count, knobs_in_words, metric_in_words, plural

WIDEST = "max-width:720px"

_LEFT = "text-align:left"

_GLYPHS = {
    "line": "—", "dash": "┄", "dot": "●", "ring": "○", "cross": "✕", "block": "■", "triangle": "▲",
}  # fmt: skip

Facts = Iterable[tuple[str, str | None]]


def probe_html(probe: Probe, device: DeviceRecord) -> str:
    """Return the HTML of a probe: the largest micro-batch that fits, and the evidence for it."""
    data = RunRecord(device=device, probe=probe)
    return _fragment(
        headline(data), [*_device_facts(device), *_probe_facts(probe)], [memory_figure(device, probe)]
    )


def plan_html(plan: Plan, device: DeviceRecord, probe: Probe | None = None) -> str:
    """Return the HTML of a plan: the split of the target batch."""
    data = RunRecord(device=device, probe=probe, plan=plan)
    rows = [*_device_facts(device), *_probe_facts(probe), *_plan_facts(plan)]
    return _fragment(
        headline(data), rows, [plan_figure(plan), None if probe is None else memory_figure(device, probe)]
    )


def run_html(result: RunRecord, *, metrics: list[StepRecord], report: Path | None) -> str:
    """Return the HTML of a run.

    Args:
        result: the records of the run.
        metrics: one record per optimizer step, for the training curves.
        report: the report page of the run; None if it was not written.
    """
    rows: list[tuple[str, str | None]] = [*_device_facts(result.device), *_probe_facts(result.probe)]
    pictures: list[Picture | None] = []
    if result.plan is not None:
        rows += _plan_facts(result.plan)
        pictures.append(plan_figure(result.plan))
    if result.probe is not None:
        pictures.append(memory_figure(result.device, result.probe))
    if result.tuning is not None:
        words = tuning_in_words(result.tuning, result.plan) if result.tuning.trials else None
        rows.append(("Tuning", words))
        pictures += [comparison_figure(result.tuning.comparisons), trials_figure(result.tuning.history)]
        found = result.tuning.learning_rate
        rows.append(("Learning-rate study", None if found is None else rates_in_words(found)))
        pictures.append(None if found is None else rates_figure(found))
    if result.training is not None:
        rows.append(("Training", training_in_words(result.training)))
        rows += [
            (f"Held-out {name}", metric_in_words(name, value).removeprefix(f"{name} "))
            for name, value in result.training.validation.items()
        ]
        rows.append(("Checkpoint", result.training.checkpoint))
        pictures.insert(0, training_figure(metrics, result.checkpoints))
    rows.append(("Report", None if report is None else str(report)))
    return _fragment(headline(result), rows, pictures)


def estimates_html(estimates: Sequence[Estimate], notes: Iterable[str]) -> str:
    """Return the HTML of an estimate: one row per GPU."""
    fitting = [one for one in estimates if one.fits]
    words = f"Predicted to fit on {len(fitting)} of {plural(len(estimates), 'GPU')}. No GPU was used."
    head = ["GPU", "Budget", "Precision", "Micro-batch", "Peak reserved", "Optimizer step"]
    table = Table(caption=words, head=head, rows=[_estimate_row(one) for one in estimates])
    lines = [element("p", note) for note in notes]
    return _named(element("div", element("p", element("strong", words)), _table(table), lines))


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
        "" if one.plan is None else split_in_words(one.plan),
    ]


def _device_facts(device: DeviceRecord) -> Facts:
    return [("Device", f"{device.name} ({device.kind}), memory budget {format_bytes(device.budget_bytes)}")]


def _probe_facts(probe: Probe | None) -> Facts:
    return [] if probe is None else [("Largest micro-batch", fits_in_words(probe))]


def _plan_facts(plan: Plan) -> Facts:
    return [
        ("Target batch", f"{plural(plan.target_batch, 'sample')}: {split_in_words(plan)}"),
        ("Learning rate", rate_in_words(plan)),
        ("Precision", plan.precision),
        ("Tuned knobs", knobs_in_words(plan.knobs) or None),
    ]


def _fragment(words: str, rows: Facts, pictures: Sequence[Picture | None]) -> str:
    facts = [
        element("tr", element("th", name, scope="row", style=_LEFT), element("td", value, style=_LEFT))
        for name, value in rows
        if value
    ]
    figures = [_figure(picture) for picture in pictures if picture is not None]
    return _named(element("div", element("p", element("strong", words)), element("table", facts), figures))


def _figure(picture: Picture) -> Markup:
    # A picture holds a wide and a narrow drawing. Without a style sheet both would show: keep the first.
    wide = picture.svg[: picture.svg.index("</svg>") + len("</svg>")]
    # matplotlib's style sheet would apply to the whole notebook. Inherited styles apply to the chart alone.
    wide = re.sub(r"<style[^>]*>.*?</style>", "", wide, flags=re.DOTALL)
    wide = wide.replace("<svg ", '<svg style="stroke-linejoin:round;stroke-linecap:butt" ', 1)
    legend = [_mark(mark) for mark in picture.legend]
    data = element("details", element("summary", picture.table.caption), _table(picture.table))
    return element("div", Markup(wide), element("p", legend), data, style=f"{WIDEST};margin-top:1em")


def _mark(mark: Mark) -> Markup:
    glyph = element(
        "span", _GLYPHS.get(mark.shape, "—"), style=f"color:{EITHER[mark.role]}", aria_hidden="true"
    )
    return join(glyph, f" {mark.label} \u2003")


def _table(table: Table) -> Markup:
    head = element("tr", [element("th", name, scope="col", style=_LEFT) for name in table.head])
    body = [element("tr", [element("td", cell, style=_LEFT) for cell in row]) for row in table.rows]
    return element("table", element("thead", head), element("tbody", body))


def _named(markup: Markup) -> str:
    """Replace colour variables by their values, and make the ids of this fragment unique."""
    html = re.sub(r"var\(--sans, ([^)]*)\)", r"\1", markup)
    html = re.sub(r"var\(--([\w-]+), #[0-9a-f]{6}\)", lambda found: EITHER[found[1]], html)
    name = "autobatch-" + hashlib.sha256(html.encode()).hexdigest()[:12]
    return re.sub(r'(\bid="|aria-describedby="|href="#|url\(#)', rf"\g<1>{name}-", html)
