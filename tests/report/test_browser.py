"""The page in a real browser: nothing complains, nothing overflows, the right pictures show."""

import json
import re
import shutil
import subprocess
from html import escape

import msgspec
import pytest

from autobatch.report.page import render
from tests.support.sample_run import a_device, a_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PROBE = """
<script>
onload = () => {
  const page = document.getElementById("page").contentDocument, root = page.documentElement
  const shows = (node) => node.getBoundingClientRect().width > 0
  const colour = (node, name) => getComputedStyle(node)[name]
  page.querySelectorAll("details").forEach((details) => { details.open = true })
  const line = page.querySelector("#figure-training svg path[style*='--accent']")
  document.getElementById("answer").textContent = JSON.stringify({
    overflow: root.scrollWidth - root.clientWidth,
    wide: [...page.querySelectorAll("svg.wide")].filter(shows).length,
    narrow: [...page.querySelectorAll("svg.narrow")].filter(shows).length,
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
    cut: [...page.querySelectorAll("section > .scroll")].filter((box) => box.scrollWidth > box.clientWidth)
      .map((box) => box.getAttribute("aria-label")),
    paper: colour(page.body, "backgroundColor"),
    accent: colour(line, "stroke"),
  })
}
</script>
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]


def look(tmp_path, page, *, width):
    """Open a page in a frame of ``width`` pixels and measure it, with its tables opened."""
    frame = (
        f'<iframe id="page" srcdoc="{escape(page)}" style="width:{width}px;height:900px;border:0"></iframe>'
    )
    file = tmp_path / "frame.html"
    file.write_text(f'<!doctype html><body><pre id="answer"></pre>{frame}{PROBE}', encoding="utf-8")
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
        "--disable-background-networking", "--enable-logging=stderr", "--virtual-time-budget=4000",
        f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={max(width, 800) + 100},1000",
        "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    found = re.search(r'<pre id="answer">(.*?)</pre>', done.stdout, re.DOTALL)
    return json.loads(found[1]), complaints


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_a_page_at_a_width_in_a_theme(tmp_path, width, theme):
    page = render(a_run()).replace('<html lang="en">', f'<html lang="en" data-theme="{theme}">')
    seen, complaints = look(tmp_path, page, width=width)
    assert complaints == []
    assert seen["overflow"] == 0, "the page scrolls sideways"
    assert (seen["wide"], seen["narrow"]) == ((0, 7) if width == 360 else (7, 0))
    assert seen["escaping"] == [], "words run out of their picture"
    assert seen["cut"] == [], "columns of a table are out of sight"
    assert seen["smallest"] >= 10, "too small to read"
    assert seen["tallest"] < 900
    assert seen["paper"] == ("rgb(251, 251, 249)" if theme == "light" else "rgb(20, 24, 26)")
    assert seen["accent"] == ("rgb(11, 107, 114)" if theme == "light" else "rgb(92, 192, 196)")


def test_long_words_do_not_widen_a_phone(tmp_path):
    long = "a" * 200
    device = msgspec.structs.replace(a_device(), name=long, budget_source=long, notes=[long])
    page = render(a_run(device=device, title=long, command=f"autobatch fit {long}", versions={long: long}))
    seen, complaints = look(tmp_path, page, width=360)
    assert complaints == []
    assert seen["overflow"] == 0
