"""The section of the report that says how to repeat the run."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources

from autobatch.core.records.run import RunRecord
from autobatch.report.charts.drawing import Table
from autobatch.report.html import Markup, element, facts, join, prose, table, unbroken


def notes(lines: list[str]) -> Markup | None:
    """Show remarks, one per line. Return None if there are none."""
    return element("ul", [element("li", prose(line)) for line in lines], class_="notes") if lines else None


def repeat(data: RunRecord) -> Markup:
    """Show the command, its surroundings and every option."""
    return join(
        _command(data.command) if data.command else None,
        facts([*sorted(data.versions.items()), *sorted(data.surroundings.items())])
        if data.versions
        else None,
        _options(data.options),
        notes(data.notes),
    )


def _options(options: Mapping[str, object]) -> Markup | None:
    """Show every option of a run, collapsed."""
    if not options:
        return None
    rows = [[name, "" if value is None else str(value)] for name, value in sorted(options.items())]
    shown = table(Table(caption="Every option of this run", head=["Option", "Value"], rows=rows))
    return element("details", element("summary", "Every option of this run"), shown)


def _command(text: str) -> Markup:
    """Show a command that breaks lines only between its words: a ``--`` alone at a line end misleads."""
    words = [join(" " if at else "", unbroken(word)) for at, word in enumerate(text.split(" "))]
    script = (resources.files(__package__) / "copy.js").read_text(encoding="utf-8")
    button = element("button", "Copy", type="button", class_="copy", hidden=True)
    return element(
        "div",
        element("pre", element("code", words)),
        button,
        element("script", Markup(script)),
        class_="command",
    )
