"""Checks that hold for every report page, made with the standard library's parser."""

import itertools
import json
import re
from html import escape
from html.parser import HTMLParser

from benchmarks.screenshots import browse

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(HTMLParser):
    """The elements and the text of a page, whose tags must be balanced."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.words = [], [], []
        self.feed(text)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), tuple(self.open)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), tuple(self.open)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> without a start"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()

    def handle_data(self, data):
        if not {"style", "script"} & set(self.open):
            self.words.append(data)

    def all(self, *tags):
        return [attributes for tag, attributes, _ in self.elements if tag in tags]

    @property
    def text(self):
        return " ".join("".join(self.words).split())


def check(text):
    """Check a page and return it parsed."""
    page = Page(text)
    assert text.startswith("<!doctype html>")
    assert len(text.encode()) < 1_000_000
    assert page.all("html")[0]["lang"] == "en"
    for landmark in ("header", "nav", "main"):
        assert len(page.all(landmark)) == 1, landmark
    assert len(page.all("h1")) == 1
    levels = [int(tag[1]) for tag, _, _ in page.elements if tag in {"h1", "h2", "h3", "h4"}]
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    ids = [attributes["id"] for _, attributes, _ in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids)), "an id appears twice"
    for _, attributes, _ in page.elements:
        for name in ("aria-labelledby", "aria-describedby"):
            assert attributes.get(name, ids[0]) in ids, attributes
        for name in ("href", "xlink:href", "src"):
            target = attributes.get(name, f"#{ids[0]}")
            assert target.startswith("#"), f"loads {target}"
            assert target[1:] in ids, f"leads nowhere: {target}"
    assert "url(http" not in text
    assert "@import" not in text
    assert not page.all("link", "iframe", "object", "img")
    for svg in page.all("svg"):
        assert svg["role"] == "img"
        assert svg["aria-label"]
    assert len(page.all("caption")) == len(page.all("table"))
    assert all(cell["scope"] in {"row", "col"} for cell in page.all("th"))
    for tag, _, parents in page.elements:
        assert tag != "summary" or parents[-1] == "details"
    return page


MEASURE = """
<script>
onload = async () => {
  const frame = document.getElementById("page")
  const page = frame.contentDocument, root = page.documentElement
  const shows = (node) => node.getBoundingClientRect().width > 0
  const colour = (node, name) => getComputedStyle(node)[name]
  page.querySelectorAll("details").forEach((details) => { details.open = true })
  const words = (svg) => [...svg.querySelectorAll("text")].filter((text) => text.textContent.trim())
  const meet = (a, b) =>
    a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3
  document.getElementById("answer").textContent = JSON.stringify({
    overflow: root.scrollWidth - root.clientWidth,
    tallest: Math.max(...[...page.querySelectorAll("svg")].map((svg) => svg.getBoundingClientRect().height)),
    escaping: [...page.querySelectorAll("svg")].filter(shows).flatMap((svg) => {
      const box = svg.getBoundingClientRect()
      return [...svg.querySelectorAll("text")].filter((text) => {
        const own = text.getBoundingClientRect()
        return own.left < box.left - 1 || own.right > box.right + 1
      }).map((text) => text.textContent)
    }),
    smallest: Math.min(...[...page.querySelectorAll("svg text")].filter(shows)
      .map((text) => parseFloat(getComputedStyle(text).fontSize)
        * text.closest("svg").getBoundingClientRect().width / text.closest("svg").viewBox.baseVal.width)),
    overlapping: [...page.querySelectorAll("svg")].flatMap((svg) => words(svg).flatMap((text, at, all) =>
      all.slice(at + 1).filter((other) => meet(text.getBoundingClientRect(), other.getBoundingClientRect()))
        .map((other) => text.textContent + " / " + other.textContent))),
    split: [...page.querySelectorAll(".unbroken")].filter((word) => word.getClientRects().length > 1)
      .map((word) => word.textContent),
    paper: colour(page.body, "backgroundColor"),
    ink: colour(page.querySelector("#figure-training text"), "fill"),
  })
}
</script>
"""


def measure(folder, page, *, width):
    """Open a page in Chromium, in a frame of ``width`` pixels and with its tables open.

    Returns:
        The measures, and the lines that the page wrote to the console.
    """
    frame = (
        f'<iframe id="page" srcdoc="{escape(page)}" style="width:{width}px;height:900px;border:0"></iframe>'
    )
    file = folder / "frame.html"
    file.write_text(
        f'<!doctype html><meta charset="utf-8"><body><pre id="answer"></pre>{frame}{MEASURE}',
        encoding="utf-8",
    )
    done = browse(folder, file, f"--window-size={max(width, 800) + 100},1000", "--dump-dom")
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    found = re.search(r'<pre id="answer">(.*?)</pre>', done.stdout, re.DOTALL)
    return json.loads(found[1]), complaints
