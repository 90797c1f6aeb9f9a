"""Checks that hold for every report page, made with the standard library's parser and in a browser."""

from __future__ import annotations

import itertools
import json
import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from benchmarks.screenshots import browse

VOID = {"meta", "br", "link", "img", "hr", "input"}
Attributes = list[tuple[str, str | None]]


class Page(HTMLParser):
    """The elements and the text of a page, whose tags must be balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, Any], tuple[str, ...]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: Attributes) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Attributes) -> None:
        self.elements.append((tag, dict(attrs), tuple(self.open)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1:] == [tag], f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.words.append(data)

    def all(self, *tags: str) -> list[dict[str, Any]]:
        """Return the attributes of all elements of some kinds."""
        return [attributes for tag, attributes, _ in self.elements if tag in tags]

    @property
    def text(self) -> str:
        """The words that a reader sees."""
        return " ".join("".join(self.words).split())


def check(text: str) -> Page:
    """Check a page and return it parsed."""
    page = Page(text)
    assert text.startswith("<!doctype html>")
    assert len(text.encode()) < 1_000_000
    assert page.all("html")[0]["lang"] == "en"
    assert [len(page.all(landmark)) for landmark in ("header", "nav", "main", "h1")] == [1] * 4
    levels = [int(tag[1]) for tag, _, _ in page.elements if tag in {"h1", "h2", "h3", "h4"}]
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    ids = [attributes["id"] for _, attributes, _ in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids)), "an id appears twice"
    for tag, attributes, parents in page.elements:
        assert attributes.get("aria-labelledby", ids[0]) in ids, attributes
        for name in ("href", "xlink:href", "src"):
            target = attributes.get(name, f"#{ids[0]}")
            assert target[:1] == "#", f"loads {target}"
            assert target[1:] in ids, f"leads nowhere: {target}"
        assert tag != "summary" or parents[-1] == "details"
    assert "url(http" not in text
    assert "@import" not in text
    assert not page.all("link", "iframe", "object", "img", "script")
    assert all(svg["role"] == "img" and svg["aria-label"] for svg in page.all("svg"))
    assert len(page.all("caption")) == len(page.all("table"))
    assert all(cell["scope"] in {"row", "col"} for cell in page.all("th"))
    return page


MEASURE = """
<script>
onload = async () => {
  const page = document.getElementById("page").contentDocument, root = page.documentElement
  const box = (node) => node.getBoundingClientRect()
  const colour = (node, name) => getComputedStyle(node)[name]
  page.querySelectorAll("details").forEach((details) => { details.open = true })
  const drawings = [...page.querySelectorAll("svg")]
  const words = (svg) => [...svg.querySelectorAll("text")].filter((text) => text.textContent.trim())
  const meet = (a, b) =>
    a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3
  document.getElementById("answer").textContent = JSON.stringify({
    overflow: root.scrollWidth - root.clientWidth,
    escaping: drawings.flatMap((svg) => words(svg)
      .filter((text) => box(text).left < box(svg).left - 1 || box(text).right > box(svg).right + 1)
      .map((text) => text.textContent)),
    smallest: Math.min(...drawings.flatMap((svg) => words(svg).map((text) =>
      parseFloat(colour(text, "fontSize")) * box(svg).width / svg.viewBox.baseVal.width))),
    overlapping: drawings.flatMap((svg) => words(svg).flatMap((text, at, all) =>
      all.slice(at + 1).filter((other) => meet(box(text), box(other)))
        .map((other) => text.textContent + " / " + other.textContent))),
    paper: colour(page.body, "backgroundColor"),
    ink: colour(page.querySelector("#figure-training text"), "fill"),
  })
}
</script>
"""


def measure(folder: Path, page: str, *, width: int) -> tuple[dict[str, Any], list[str]]:
    """Open a page in Chromium, in a frame of ``width`` pixels and with its tables open.

    Returns:
        The measures, and the lines that the page wrote to the console.
    """
    style = f"width:{width}px;height:900px;border:0"
    frame = f'<iframe id="page" srcdoc="{escape(page)}" style="{style}"></iframe>'
    file = folder / "frame.html"
    head = '<!doctype html><meta charset="utf-8"><body><pre id="answer"></pre>'
    file.write_text(f"{head}{frame}{MEASURE}", encoding="utf-8")
    done = browse(folder, file, f"--window-size={max(width, 800) + 100},1000", "--dump-dom")
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    found = re.search(r'<pre id="answer">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None
    return json.loads(found[1]), complaints
