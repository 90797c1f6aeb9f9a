"""The report of a run: one HTML file that loads nothing.

It begins with the main facts, as the terminal does. A section shows the other facts of one stage, its chart,
its table and its remarks; `templates/` lays them out.
"""

from __future__ import annotations

from jinja2 import Environment, PackageLoader

from autobatch.core.records import RunRecord
from autobatch.core.text import printable_lines
from autobatch.report.charts import pictures_of
from autobatch.report.facts import Fact, facts_of, moment
from autobatch.report.tables import Table, attempts_table, trials_table

TITLES = {
    "memory": "Where the memory goes",
    "fits": "What fits",
    "plan": "Plan",
    "tuning": "Tuning",
    "training": "Training",
    "device": "Device and budget",
    "repeat": "Repeat this run",
}
"""The sections in reading order, by the stage that they show."""
PAGES = Environment(
    loader=PackageLoader("autobatch.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True
)


def render(run: RunRecord) -> str:
    """Build the page. The same records always give the same text."""
    tuning, training = run.tuning, run.training
    facts: dict[str, list[Fact]] = {}
    for fact in facts_of(run):
        facts.setdefault("answers" if fact.kind == "main" else fact.part, []).append(fact)
    facts["repeat"] = [Fact("files", label, text) for label, text in sorted(run.versions.items())]
    tables = {"fits": attempts_table(run.probe.attempts)}
    if tuning is not None and tuning.history:
        tables["tuning"] = trials_table(tuning.history)
    if run.options:
        options = [[name, "" if value is None else str(value)] for name, value in sorted(run.options.items())]
        tables["repeat"] = Table("Every option of this run", ["Option", "Value"], options)
    rate = tuning.learning_rate if tuning else None
    notes = {
        "tuning": [*(tuning.notes if tuning else []), *(rate.notes if rate else [])],
        "training": training.notes if training else [],
        "device": run.device.notes,
        "repeat": run.notes,
    }
    commands = {"repeat": run.command}
    pictures = pictures_of(run)
    parts = (facts, pictures, tables, notes, commands)
    text = PAGES.get_template("page.html.j2").render(
        heading=run.title or "autobatch",
        created=moment(run.created),
        titles={slug: title for slug, title in TITLES.items() if any(part.get(slug) for part in parts)},
        facts=facts,
        pictures=pictures,
        tables=tables,
        notes=notes,
        commands=commands,
    )
    # Escaped for HTML by the template, and here for terminals, where a page may be printed.
    return printable_lines(text, limit=None)
