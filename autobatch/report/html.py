"""HTML as values. Text is escaped, and only `Markup` that this module built passes unescaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from autobatch.report.charts.drawing import Mark, Picture, Table

_VOID = frozenset({"meta", "br"})

_LONG = 24
"""Length in characters above which a cell counts as a sentence and gets a minimum width."""

_NUMBER = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?%?( [KMGT]?i?B)?")


class Markup(str):
    """Text that is already HTML."""

    __slots__ = ()


Child = str | Iterable[str] | None


def element(tag: str, *children: Child, **attributes: str | bool | None) -> Markup:
    """Build an element.

    Args:
        tag: name of the element.
        children: text (escaped), `Markup` (kept), lists of both, or ``None`` for nothing.
        attributes: attributes by name. ``_`` becomes ``-``, and a trailing ``_`` is dropped. ``True`` writes
            the bare name. ``None`` and ``False`` omit the attribute.
    """
    written = "".join(_attribute(name, value) for name, value in attributes.items())
    if tag in _VOID:
        return Markup(f"<{tag}{written}>")
    return Markup(f"<{tag}{written}>{join(*children)}</{tag}>")


def join(*children: Child) -> Markup:
    """Concatenate children."""
    return Markup("".join(_text(child) for child in children))


def unbroken(word: str) -> Markup:
    """Build a word that moves to the next line as a whole if it fits there."""
    return element("span", word, class_="unbroken")


def prose(text: str) -> Markup:
    """Build text whose options, such as ``--steps``, do not break after their dashes."""
    words = text.split(" ")
    return join(
        *(join(" " if at else "", unbroken(one) if "--" in one else one) for at, one in enumerate(words))
    )


def _attribute(name: str, value: str | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'


def _text(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, str):
        return escape(child, quote=False)
    return "".join(map(_text, child))


def table(data: Table) -> Markup:
    """Build a table that scrolls sideways in its own box if the page is too narrow."""
    head = element("tr", [element("th", name, scope="col") for name in data.head])
    body = [element("tr", [_cell(at, text) for at, text in enumerate(row)]) for row in data.rows]
    whole = element("table", element("caption", data.caption), element("thead", head), element("tbody", body))
    return element("div", whole, class_="scroll", tabindex="0", role="region", aria_label=data.caption)


def _cell(at: int, text: str) -> Markup:
    kind = "number" if _NUMBER.fullmatch(text) else "long" if at and len(text) > _LONG else None
    return element("th", text, scope="row", class_=kind) if at == 0 else element("td", text, class_=kind)


def figure(picture: Picture) -> Markup:
    """Build a figure with its legend, and its data as a collapsed table."""
    caption = element(
        "figcaption", legend(picture.legend), element("p", picture.note) if picture.note else None
    )
    data = element("details", element("summary", "Data of this figure"), table(picture.table))
    return element("figure", Markup(picture.svg), caption, data, id=f"figure-{picture.slug}")


def legend(marks: list[Mark]) -> Markup | None:
    """Build the legend of a picture. Return None if it has no entries."""
    items = [
        element(
            "li",
            element(
                "span", class_=f"mark {mark.shape}", style=f"--mark:var(--{mark.role})", aria_hidden="true"
            ),
            mark.label,
        )
        for mark in marks
    ]
    return element("ul", items, class_="legend") if items else None


def facts(pairs: Iterable[tuple[str, Child]]) -> Markup:
    """Build a list of names and values, without the pairs that have no value."""
    rows = [
        element("div", element("dt", name), element("dd", value))
        for name, value in pairs
        if value not in (None, "")
    ]
    return element("dl", rows, class_="facts")


class BarPart(NamedTuple):
    """A part of a `bar`."""

    name: str
    """Its name with its value, for the legend."""
    role: str
    """Its colour."""
    size: float


def bar(label: str, parts: Sequence[BarPart]) -> Markup:
    """Build one bar of several parts, with a legend; parts without a size are left out."""
    shown = [part for part in parts if part.size]
    blocks = [element("span", style=f"--mark:var(--{one.role});flex:{one.size} 1 0") for one in shown]
    whole = f"{label}: {', '.join(one.name for one in shown)}"
    marks = [Mark(role=one.role, label=one.name, shape="block") for one in shown]
    return join(element("div", blocks, class_="bar", role="img", aria_label=whole), legend(marks))
