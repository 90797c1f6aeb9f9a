"""Results as HTML: pages and notebook output, parsed with the standard library and measured in a browser."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autobatch import Estimates, PlanResult, ProbeResult, Result
from autobatch.core.records import MemoryHolder
from autobatch.report.facts import facts_of, headline, tiles_of
from autobatch.report.page import render, write_report
from autobatch.report.tables import compare_runs
from benchmarks.screenshots import CHROMIUM, IMAGES, MOST_BYTES, shoot
from tests.support.page_checker import Page, check, measure
from tests.support.planted import PLANTED
from tests.support.sample_run import a_device, a_probe, a_run, an_estimate

pytestmark = pytest.mark.xdist_group("pictures")
"""One worker draws the pictures that many tests look at."""

HOSTILE = "<script>alert(1)</script> \" ' &amp; ${x} $$ %s"
PARTS = ["memory", "fits", "plan", "tuning", "training", "device", "repeat"]


@pytest.fixture(scope="module", name="full")
def rendered_once():
    return render(a_run())


def test_the_whole_page_is_sound(full):
    page = check(full)
    assert [section["id"] for section in page.all("section")] == PARTS
    figures = [figure["id"] for figure in page.all("figure")]
    assert figures == [f"figure-{slug}" for slug in ("memory-over-time", "memory", "training")]
    assert len(page.all("svg")) == len(figures), "each is drawn once"
    assert len(page.all("details")) == 2, "every size that ran, and every trial"


def test_every_fact_and_every_tile_of_the_run_is_there(full):
    page = check(full)
    run = a_run()
    assert headline(run) in page.text
    rows = [fact for fact in facts_of(run) if fact.part != "files"]
    words = [word for fact in rows for word in (fact.label, fact.text)]
    words += [word for tile in tiles_of(run) for word in tile]
    for wanted in (*words, "2.13.0+cu130", "2026-11-21 14:05 UTC", run.command):
        assert wanted in page.text, wanted


@pytest.mark.parametrize(
    ("missing", "left"),
    [
        ({"probe", "memory_curve"}, PARTS[1:]),
        *(({part}, [one for one in PARTS if one != part]) for part in ("plan", "tuning")),
        ({"training", "metrics"}, [one for one in PARTS if one != "training"]),
        ({"versions", "command"}, PARTS[:-1]),
        (
            {"probe", "plan", "tuning", "training", "metrics", "memory_curve",
             "versions", "command", "predicted", "checkpoints", "created"},
            ["device"],
        ),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("no_pictures")
def test_a_part_that_did_not_run_has_no_section(missing, left):
    empty = dict.fromkeys(("probe", "plan", "tuning", "training", "memory_curve"))
    empty |= {"command": "", "created": "", "versions": {}}
    page = check(render(a_run(**{name: empty.get(name, []) for name in missing})))
    assert [section["id"] for section in page.all("section")] == left
    assert [link["href"] for link in page.all("a")] == [f"#{part}" for part in left]


def test_user_text_is_escaped():
    device = a_device(
        name=HOSTILE,
        budget_source=HOSTILE,
        notes=[HOSTILE],
        holders=[MemoryHolder(pid=1, name=HOSTILE, used_bytes=1)],
    )
    full = render(
        a_run(device=device, title=HOSTILE, command=HOSTILE, versions={HOSTILE: HOSTILE}, notes=[HOSTILE])
    )
    page = check(full)
    assert "<script" not in full
    assert page.text.count("<script>alert(1)</script>") >= 8


def planted(value: Any) -> Any:
    """Replace every text of a record by one that a terminal would obey, if the record may hold it."""
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            changed = msgspec.structs.replace(value, **{name: planted(getattr(value, name))})
            with suppress(msgspec.ValidationError):
                value = msgspec.convert(msgspec.to_builtins(changed), type(value))
        return value
    if isinstance(value, list):
        return [planted(one) for one in value]
    if isinstance(value, dict):
        return {PLANTED: PLANTED} if PLANTED in map(planted, value.values()) else value
    return PLANTED if isinstance(value, str) else value


@pytest.mark.usefixtures("no_pictures")
def test_every_text_of_a_run_is_harmless_in_the_page_and_printed() -> None:
    run = planted(a_run())
    fields = {name: getattr(run, name) for name in run.__struct_fields__}
    full, result = render(run), Result(**fields)
    assert msgspec.json.encode(run).count(b"<script>") > 20
    assert "<script>alert" not in full
    assert full.count("&lt;script&gt;alert(1)") > 20
    fragment = result._repr_html_()
    for shown in (*full.split("\n"), *str(result).split("\n"), *fragment.split("\n"), repr(result)):
        assert shown.isprintable(), shown
    estimates = Estimates(estimates=[planted(an_estimate())], notes=[PLANTED])
    assert "<script>" not in estimates._repr_html_()
    assert all(line.isprintable() for line in f"{estimates}\n{estimates._repr_html_()}".split("\n"))


@pytest.mark.usefixtures("no_pictures")
def test_the_same_page_is_written_again_and_atomically(tmp_path):
    path = write_report(tmp_path / "runs" / "one" / "report.html", a_run())
    assert path.read_text(encoding="utf-8") == render(a_run())
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]


def fields(record) -> dict:
    return {name: getattr(record, name) for name in record.__struct_fields__}


def a_result(**changes) -> Result:
    names = "device", "probe", "plan", "tuning", "training", "checkpoints"
    parts = {name: getattr(a_run(), name) for name in names}
    return Result(**(parts | {"created": "2026-11-21T14:05:00+00:00"} | changes))


def shown(record) -> Page:
    """Return the parsed notebook output, after the checks that hold for every fragment."""
    html = record._repr_html_()
    page = Page(html)
    assert not page.all("style", "script", "link", "iframe", "img", "html", "body")
    assert len(html.encode()) < 300_000
    return page


def test_a_notebook_shows_each_kind_of_result() -> None:
    page = shown(ProbeResult(**fields(a_probe()), device=a_device()))
    assert page.text.startswith("93 samples at a time in 6.00 GiB on NVIDIA GeForce RTX 4090; 94 ran and do")
    assert len(page.all("svg")) == 1
    assert "Every size that ran, in order" in page.text
    page = shown(PlanResult(**fields(a_run().plan), device=a_device(), probe=a_probe()))
    assert "batch 1,024 in 12 micro-batches (4 × 86, 8 × 85)" in page.text
    assert len(page.all("svg")) == 1
    assert shown(Result(device=a_device())).text.startswith("The memory budget is 6.00 GiB")


@pytest.mark.parametrize("left", ["its run", "nothing", "another run", "no result"])
@pytest.mark.usefixtures("no_pictures")
def test_a_result_is_shown_with_the_curves_of_its_run_if_that_is_still_there(
    tmp_path: Path, left: str
) -> None:
    result = a_result(out=tmp_path / "run")
    written = {"its run": result, "another run": a_result(created="2027-01-01T00:00:00+00:00")}
    if left != "nothing":
        result.out.mkdir()
        content = written[left].to_json() if left in written else []
        (result.out / "result.json").write_bytes(msgspec.json.encode(content))
        lines = [msgspec.json.encode(record) for record in a_run().metrics]
        (result.out / "metrics.jsonl").write_bytes(b"\n".join(lines))
    page = shown(result)
    for words in ("Held-out accuracy 93.12 %.", "at least 1.11 × faster: compiled", "step-120.pt"):
        assert words in page.text
    assert len(page.all("svg")) == 1 + (left == "its run")


def test_a_notebook_shows_estimates_with_one_row_per_gpu() -> None:
    none = an_estimate(profile="old", fits=False, micro_batch=0, plan=None, peak_reserved_bytes=None)
    exact = an_estimate(profile="new", micro_batch_low=90, micro_batch_high=90)
    page = shown(Estimates(estimates=[an_estimate(), none, exact], notes=["a note"]))
    assert page.text.startswith("Predicted to fit on 2 of 3 GPUs. No GPU was used.")
    for words in ("86 to 93", "does not fit", "a note"):
        assert words in page.text
    assert len(page.all("tr")) == 4


def test_runs_side_by_side() -> None:
    one = a_run()
    better = msgspec.structs.replace(
        one.training, validation={"accuracy": 0.95, "f1": 0.5}, peak_reserved_bytes=3 << 30
    )
    other = a_run(training=better, versions={"torch": "2.12.0"}, options={"seed": 1, "steps": None})
    found = compare_runs([one, other])
    rows = found.differing | found.reached
    assert rows["held-out accuracy"] == ["93.12 %", "95.00 %"]
    assert rows["held-out f1"] == ["", "0.5"]
    assert rows["split"] == ["12 micro-batches (4 × 86, 8 × 85)"] * 2
    assert rows["peak memory"] == ["", "3.00 GiB"]
    assert rows["torch"] == ["2.13.0+cu130", "2.12.0"]
    assert rows["--seed"] == ["not set", "1"]
    assert not {"tuned", "--steps"} & rows.keys(), "no run has them"


in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


@pytest.mark.program
@in_a_browser
@pytest.mark.parametrize(("width", "theme"), [(390, "dark"), (1280, "light")])
def test_the_page_at_a_width_in_a_theme(tmp_path, width, theme):
    page = render(a_run()).replace("color-scheme: light dark;", f"color-scheme: {theme};")
    seen, complaints = measure(tmp_path, page, width=width)
    assert complaints == []
    assert seen["overflow"] == 0, "the page scrolls sideways"
    assert seen["escaping"] == [], "words run out of their picture"
    assert seen["overlapping"] == [], "words stand on each other"
    assert seen["split"] == [], "options break across lines"
    assert seen["smallest"] >= 10, "too small to read"
    assert seen["tallest"] < 900
    assert seen["paper"] == ("rgb(251, 251, 249)" if theme == "light" else "rgb(20, 24, 26)")
    assert seen["ink"] == ("rgb(27, 33, 38)" if theme == "light" else "rgb(230, 234, 232)")


@pytest.mark.program
@in_a_browser
def test_a_picture_of_a_page_is_small_and_as_narrow_as_asked(tmp_path: Path) -> None:
    image = shoot(render(a_run()), tmp_path / "page.png", width=390, height=700, theme="dark").read_bytes()
    assert (int.from_bytes(image[16:20]), int.from_bytes(image[20:24])) == (390, 700)
    assert len(image) < MOST_BYTES
    assert all(path.stat().st_size <= MOST_BYTES for path in IMAGES.glob("*.png"))


@pytest.mark.program
@in_a_browser
def test_long_words_do_not_widen_a_phone(tmp_path):
    long = "a" * 200
    device = msgspec.structs.replace(
        a_device(), name=long, budget_source=f"--{long}", notes=[long, f"--{long}"]
    )
    page = render(a_run(device=device, title=long, command=f"autobatch fit {long}", versions={long: long}))
    seen, complaints = measure(tmp_path, page, width=360)
    assert complaints == []
    assert seen["overflow"] == 0
