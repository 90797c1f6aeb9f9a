"""Results as HTML: pages and notebook output, parsed with the standard library and measured in a browser."""

from __future__ import annotations

import itertools
import json
import re
from contextlib import suppress
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autobatch import Estimates, Result
from autobatch.report.facts import facts_of
from autobatch.report.page import TITLES, render
from benchmarks.screenshots import CHROMIUM, browse
from tests.support.planted import PLANTED
from tests.support.sample_run import a_device, a_run, an_estimate

pytestmark = pytest.mark.xdist_group("pictures")
"""One worker draws the pictures that many tests look at."""


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


def test_the_whole_page_is_sound_and_says_every_fact() -> None:
    run = a_run()
    page = check(render(run))
    assert [section["id"] for section in page.all("section")] == list(TITLES)
    assert [figure["id"] for figure in page.all("figure")] == ["figure-memory", "figure-training"]
    assert len(page.all("details")) == 2, "every size that ran, and every trial"
    for fact in facts_of(run):
        assert fact.text in page.text, fact
    for wanted in ("2.13.0+cu130", "2026-11-21 14:05 UTC", run.command, "over the budget by 4 %"):
        assert wanted in page.text, wanted


@pytest.mark.usefixtures("no_pictures")
def test_a_part_that_did_not_run_has_no_section() -> None:
    parts = {"probe": "fits", "plan": "plan", "tuning": "tuning", "memory_curve": "memory"}
    for missing, section in parts.items():
        page = check(render(a_run(**{missing: None})))
        assert [link["href"][1:] for link in page.all("a")] == [part for part in TITLES if part != section]
    nothing = dict.fromkeys(("probe", "plan", "tuning", "training", "memory_curve", "command", "created"))
    page = check(render(a_run(**nothing, metrics=[], versions={})))
    assert [section["id"] for section in page.all("section")] == ["device"]


def planted(value: Any) -> Any:
    """Replace every text of a record by one that a terminal would obey, if the record may hold it."""
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            changed = msgspec.structs.replace(value, **{name: planted(getattr(value, name))})
            with suppress(msgspec.ValidationError):
                value = msgspec.convert(msgspec.to_builtins(changed), type(value))
        return value
    if isinstance(value, list):
        return [planted(item) for item in value]
    if isinstance(value, dict):
        return {PLANTED: PLANTED} if PLANTED in map(planted, value.values()) else value
    return PLANTED if isinstance(value, str) else value


def test_every_text_of_a_run_is_harmless_in_the_page_and_printed() -> None:
    run = planted(a_run())
    result = Result(**{name: getattr(run, name) for name in run.__struct_fields__})
    estimates = Estimates(estimates=[planted(an_estimate())], notes=[PLANTED])
    page = render(run)
    check(page)
    assert msgspec.json.encode(run).count(b"<script>") > 20
    assert page.count("&lt;script&gt;alert(1)") > 20
    texts = [str(result), repr(result), str(estimates)]
    for html in (page, result._repr_html_(), estimates._repr_html_()):
        assert "<script" not in html
        texts.append(html)
    assert all(line.isprintable() for text in texts for line in text.split("\n"))


@pytest.mark.parametrize("left", ["its run", "nothing", "another run", "no result"])
@pytest.mark.usefixtures("no_pictures")
def test_a_notebook_shows_the_curves_of_a_run_if_that_is_still_there(tmp_path: Path, left: str) -> None:
    names = "device", "probe", "plan", "tuning", "training", "memory_curve"
    parts = {name: getattr(a_run(), name) for name in names}
    result = Result(**parts, created="2026-11-21T14:05:00+00:00", out=tmp_path / "run")
    another = msgspec.structs.replace(result, created="2027-01-01T00:00:00+00:00")
    content = {"its run": result.to_json(), "another run": another.to_json(), "no result": []}
    if left in content:
        result.out.mkdir()
        (result.out / "result.json").write_bytes(msgspec.json.encode(content[left]))
        lines = [msgspec.json.encode(record) for record in a_run().metrics]
        (result.out / "metrics.jsonl").write_bytes(b"\n".join(lines))
    page = Page(result._repr_html_())
    assert not page.all("style", "script", "link", "iframe", "img", "html", "body")
    assert str(result) in "".join(page.words)
    assert len(page.all("svg")) == 1 + (left == "its run")


in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


@pytest.mark.program
@in_a_browser
@pytest.mark.parametrize(("width", "theme"), [(390, "dark"), (1280, "light")])
def test_the_page_at_a_width_in_a_theme(tmp_path: Path, width: int, theme: str) -> None:
    page = render(a_run()).replace("color-scheme: light dark;", f"color-scheme: {theme};")
    seen, complaints = measure(tmp_path, page, width=width)
    assert complaints == []
    assert seen["overflow"] == 0, "the page scrolls sideways"
    assert seen["escaping"] == [], "words run out of their picture"
    assert seen["overlapping"] == [], "words stand on each other"
    assert seen["smallest"] >= 10, "too small to read"
    assert seen["paper"] == ("rgb(251, 251, 249)" if theme == "light" else "rgb(20, 24, 26)")
    assert seen["ink"] == ("rgb(27, 33, 38)" if theme == "light" else "rgb(230, 234, 232)")


@pytest.mark.program
@in_a_browser
def test_long_words_do_not_widen_a_phone(tmp_path: Path) -> None:
    long = "a" * 200
    device = a_device(name=long, budget_source=f"--{long}", notes=[long])
    page = render(a_run(device=device, title=long, command=f"autobatch fit {long}", versions={long: long}))
    seen, complaints = measure(tmp_path, page, width=360)
    assert (seen["overflow"], complaints) == (0, [])
