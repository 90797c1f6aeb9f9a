"""One self-contained HTML file: readable anywhere, with no network, no script and no other file."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from autobatch.files import write_atomic
from autobatch.report.data import ReportData
from autobatch.report.markup import Markup, element, join
from autobatch.report.palette import style_sheet
from autobatch.report.sections import Section, sections
from autobatch.report.tiles import tiles
from autobatch.report.verdict import verdict


def write_report(path: Path, data: ReportData) -> Path:
    """Write the report of a run as one HTML file, whole or not at all.

    Args:
        path: where the file shall stand; missing directories are made.
        data: what there is to report.

    Returns:
        ``path``.

    Raises:
        OSError: the file cannot be written.
    """
    return write_atomic(path, render(data).encode())


def render(data: ReportData) -> str:
    """Build the page; the same data give the same text."""
    parts = sections(data)
    body = element(
        "body",
        element("a", "Skip to the report", class_="skip", href="#report"),
        element("header", _title(data), tiles(data), _contents(parts)),
        element("main", [_section(part) for part in parts], id="report"),
    )
    return f'<!doctype html>\n<html lang="en">\n{_head(data)}\n{body}\n</html>\n'


def _head(data: ReportData) -> Markup:
    sheet = style_sheet() + (resources.files(__package__) / "page.css").read_text(encoding="utf-8")
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="generator", content="autobatch"),
        element("title", f"{data.title}: autobatch report"),
        element("style", Markup(sheet)),
    )


def _title(data: ReportData) -> Markup:
    eyebrow = "autobatch report" + (f", {data.created}" if data.created else "")
    return join(
        element("p", eyebrow, class_="eyebrow"),
        element("h1", data.title),
        element("p", verdict(data), class_="verdict"),
    )


def _contents(parts: list[Section]) -> Markup:
    links = [element("li", element("a", part.title, href=f"#{part.slug}")) for part in parts]
    return element("nav", element("ul", links), aria_label="Parts of the report")


def _section(part: Section) -> Markup:
    heading = f"{part.slug}-heading"
    return element(
        "section", element("h2", part.title, id=heading), part.body, id=part.slug, aria_labelledby=heading
    )
