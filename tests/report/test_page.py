"""Results as HTML: pages and notebook output, parsed as XML and measured in a browser."""

from __future__ import annotations

import itertools
import json
import re
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, fromstring

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


XLINK = "{http://www.w3.org/1999/xlink}href"


def parsed(html: str) -> Element:
    """Parse the source of a page as XML, whose tags are balanced."""
    return fromstring(
        re.sub(r"(<meta[^>]*)>", r"\1/>", html.replace(' xmlns="http://www.w3.org/2000/svg"', ""))
    )


def text_of(page: Element) -> str:
    """Return the words that a reader sees."""
    return " ".join("".join(page.itertext()).split())


def check(text: str) -> Element:
    """Check a page and return its body."""
    assert text.startswith("<!doctype html>")
    assert len(text.encode()) < 1_000_000
    assert "url(http" not in text
    assert "@import" not in text
    page = parsed(text.removeprefix("<!doctype html>"))
    found: dict[str, list[Element]] = {}
    for element in page.iter():
        found.setdefault(element.tag, []).append(element)
    assert page.get("lang") == "en"
    assert [len(found[landmark]) for landmark in ("header", "nav", "main", "h1")] == [1] * 4
    levels = [int(element.tag[1]) for element in page.iter() if element.tag in {"h1", "h2", "h3", "h4"}]
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    ids = [element.attrib["id"] for element in page.iter() if "id" in element.attrib]
    assert len(ids) == len(set(ids)), "an id appears twice"
    for element in page.iter():
        assert element.get("aria-labelledby", ids[0]) in ids
        for name in ("href", XLINK, "src"):
            target = element.get(name, f"#{ids[0]}")
            assert (target[:1], target[1:] in ids) == ("#", True), (
                f"loads something or leads nowhere: {target}"
            )
    assert not found.keys() & {"link", "iframe", "object", "img", "script"}
    assert len(page.findall(".//details/summary")) == len(found.get("summary", ()))
    assert all(svg.attrib["role"] == "img" and svg.attrib["aria-label"] for svg in found.get("svg", ()))
    assert len(found.get("caption", ())) == len(found.get("table", ()))
    assert all(cell.attrib["scope"] in {"row", "col"} for cell in found.get("th", ()))
    return page[1]


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
    assert [section.get("id") for section in page.iter("section")] == list(TITLES)
    assert [figure.get("id") for figure in page.iter("figure")] == ["figure-memory", "figure-training"]
    assert len([*page.iter("details")]) == 2, "every size that ran, and every trial"
    for fact in facts_of(run):
        assert fact.text in text_of(page), fact
    for wanted in ("2.13.0+cu130", "2026-11-21 14:05 UTC", run.command, "over the budget by 4 %"):
        assert wanted in text_of(page), wanted


@pytest.mark.usefixtures("no_pictures")
def test_a_part_that_did_not_run_has_no_section() -> None:
    parts = {"plan": "plan", "tuning": "tuning", "memory_curve": "memory"}
    for missing, section in parts.items():
        page = check(render(a_run(**{missing: None})))
        assert [link.attrib["href"][1:] for link in page.iter("a")] == [
            part for part in TITLES if part != section
        ]
    nothing = dict.fromkeys(("plan", "tuning", "training", "memory_curve", "command", "created"))
    page = check(render(a_run(**nothing, metrics=[], versions={})))
    assert [section.get("id") for section in page.iter("section")] == ["fits", "device"]


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


@pytest.mark.parametrize("left", ["its run", "nothing", "another run"])
@pytest.mark.usefixtures("no_pictures")
def test_a_notebook_shows_the_curves_of_a_run_if_that_is_still_there(tmp_path: Path, left: str) -> None:
    names = "device", "probe", "plan", "tuning", "training", "memory_curve"
    parts = {name: getattr(a_run(), name) for name in names}
    result = Result(**parts, created="2026-11-21T14:05:00+00:00", out=tmp_path / "run")
    another = msgspec.structs.replace(result, created="2027-01-01T00:00:00+00:00")
    content = {"its run": result.to_json(), "another run": another.to_json()}
    if left in content:
        result.out.mkdir()
        (result.out / "result.json").write_bytes(msgspec.json.encode(content[left]))
        lines = [msgspec.json.encode(record) for record in a_run().metrics]
        (result.out / "metrics.jsonl").write_bytes(b"\n".join(lines))
    shown = parsed(f"<div>{result._repr_html_()}</div>")
    tags = [element.tag for element in shown.iter()]
    assert not {"style", "script", "link", "iframe", "img", "html", "body"} & {*tags}
    assert str(result) in "".join(shown.itertext())
    assert tags.count("svg") == 1 + (left == "its run")


LONG = "a" * 200
WITH_LONG_WORDS = {
    "device": a_device(name=LONG, budget_source=f"--{LONG}", notes=[LONG]),
    **{"title": LONG, "command": f"autobatch fit {LONG}", "versions": {LONG: LONG}},
}


@pytest.mark.program
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize(
    ("width", "theme", "changes"), [(390, "dark", {}), (1280, "light", {}), (360, "light", WITH_LONG_WORDS)]
)
def test_the_page_at_a_width_in_a_theme(
    tmp_path: Path, width: int, theme: str, changes: dict[str, Any]
) -> None:
    page = render(a_run(**changes)).replace("color-scheme: light dark;", f"color-scheme: {theme};")
    seen, complaints = measure(tmp_path, page, width=width)
    assert complaints == []
    assert seen["overflow"] == 0, "the page scrolls sideways"
    assert seen["escaping"] == [], "words run out of their picture"
    assert seen["overlapping"] == [], "words stand on each other"
    assert seen["smallest"] >= min(10, width / 39), "too small to read"
    assert seen["paper"] == ("rgb(251, 251, 249)" if theme == "light" else "rgb(20, 24, 26)")
    assert seen["ink"] == ("rgb(27, 33, 38)" if theme == "light" else "rgb(230, 234, 232)")
