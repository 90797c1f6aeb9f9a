"""The report page: one self-contained HTML file, without network access or other files."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from autobatch.core.files import write_atomic
from autobatch.core.records.run import RunRecord
from autobatch.report.html import Markup, element, join
from autobatch.report.sections import Section, sections
from autobatch.report.sentences import headline
from autobatch.report.theme import style_sheet
from autobatch.report.tiles import tiles
from autobatch.report.words import moment


def write_report(path: Path, data: RunRecord) -> Path:
    """Write the report of a run to one HTML file, atomically.

    Args:
        path: the file to write; missing directories are created.
        data: the records of the run.

    Returns:
        ``path``.

    Raises:
        OSError: the file cannot be written.
    """
    return write_atomic(path, render(data).encode())


def render(data: RunRecord) -> str:
    """Build the page. The same data always give the same text."""
    parts = sections(data)
    body = element(
        "body",
        element("a", "Skip to the report", class_="skip", href="#report"),
        element("header", _title(data), tiles(data), _contents(parts)),
        element("main", [_section(part) for part in parts], id="report"),
    )
    return page_of(f"{data.title or 'autobatch'}: autobatch report", body)


def page_of(title: str, body: Markup) -> str:
    """Build a page in the style of the report."""
    return f'<!doctype html>\n<html lang="en">\n{_head(title)}\n{body}\n</html>\n'


def _head(title: str) -> Markup:
    sheet = style_sheet() + (resources.files(__package__) / "page.css").read_text(encoding="utf-8")
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="generator", content="autobatch"),
        element("title", title),
        element("style", Markup(sheet)),
    )


def _title(data: RunRecord) -> Markup:
    eyebrow = "autobatch report" + (f", {moment(data.created)}" if data.created else "")
    return join(
        element("p", eyebrow, class_="eyebrow"),
        element("h1", data.title or "autobatch"),
        element("p", headline(data), class_="verdict"),
    )


def _contents(parts: list[Section]) -> Markup:
    links = [element("li", element("a", part.title, href=f"#{part.slug}")) for part in parts]
    return element("nav", element("ul", links), aria_label="Sections of the report")


def _section(part: Section) -> Markup:
    heading = f"{part.slug}-heading"
    return element(
        "section", element("h2", part.title, id=heading), part.body, id=part.slug, aria_labelledby=heading
    )
