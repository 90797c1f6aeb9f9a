"""The report page: parsed with the standard library, and measured in a browser."""

import subprocess
import sys

import msgspec
import pytest

from autobatch.core.records import MemoryHolder
from autobatch.report.facts import facts_of, headline, tiles_of
from autobatch.report.page import render, write_report
from tests.support.page_checker import CHROMIUM, check, measure
from tests.support.sample_run import a_device, a_run

HOSTILE = "<script>alert(1)</script> \" ' &amp; ${x} $$ %s"
PARTS = ["fits", "plan", "tuning", "training", "device", "repeat"]


@pytest.fixture(scope="module", name="full")
def rendered_once():
    return render(a_run())


def test_the_whole_page_is_sound(full):
    page = check(full)
    assert len(page.all("h3")) == 1, "the time of the training"
    assert [section["id"] for section in page.all("section")] == PARTS
    figures = [figure["id"] for figure in page.all("figure")]
    assert figures == [
        f"figure-{slug}"
        for slug in ("memory", "memory-over-time", "plan", "comparison", "trials", "training")
    ]
    assert len(page.all("svg")) == 2 * len(figures), "each is drawn wide and narrow"
    assert len(page.all("details")) == len(figures), "each has its data"


def test_every_fact_and_every_tile_of_the_run_is_there(full):
    page = check(full)
    run = a_run()
    assert headline(run) in page.text
    words = [word for fact in facts_of(run) if fact.part != "files" for word in (fact.label, fact.text)]
    words += [word for tile in tiles_of(run) for word in tile]
    for wanted in (*words, "backward 48 %", "2.13.0+cu130", "2026-11-21 14:05 UTC", run.command):
        assert wanted in page.text, wanted


def test_the_same_data_give_the_same_page(full):
    assert render(a_run()) == full


@pytest.mark.parametrize(
    ("missing", "left"),
    [
        ({"probe", "memory_curve"}, PARTS),
        ({"plan"}, ["fits", "tuning", "training", "device", "repeat"]),
        ({"tuning"}, ["fits", "plan", "training", "device", "repeat"]),
        ({"training", "metrics"}, ["fits", "plan", "tuning", "device", "repeat"]),
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
    assert [link["href"] for link in page.all("a")[1:]] == [f"#{part}" for part in left]


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
    # The only script is that of the button that copies the command.
    assert full.count("<script") == full.count("<script>(() => {") == 1
    assert page.text.count("<script>alert(1)</script>") >= 8


@pytest.mark.usefixtures("no_pictures")
def test_a_cpu_run_with_few_figures():
    device = a_device(kind="cpu", holders=[], notes=[], other_processes_bytes=None)
    page = check(render(a_run(device=device, probe=None, tuning=None, training=None, metrics=[])))
    assert "others" not in page.text


def test_the_page_is_written_atomically(tmp_path, full):
    path = write_report(tmp_path / "runs" / "one" / "report.html", a_run())
    assert path.read_text(encoding="utf-8") == full
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]


def test_a_report_needs_no_torch(tmp_path):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import autobatch.report.page, autobatch.report.result\n"
        "import autobatch.device.profiles\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=tmp_path, env={"PYTHONPATH": ":".join(sys.path)}
    )


in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


@pytest.mark.program
@in_a_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_at_a_width_in_a_theme(tmp_path, width, theme):
    page = render(a_run()).replace('<html lang="en">', f'<html lang="en" data-theme="{theme}">')
    seen, complaints = measure(tmp_path, page, width=width)
    assert complaints == []
    assert seen["overflow"] == 0, "the page scrolls sideways"
    assert (seen["wide"], seen["narrow"]) == ((0, 6) if width == 360 else (6, 0))
    assert seen["escaping"] == [], "words run out of their picture"
    assert seen["cut"] == [], "columns of a table are out of sight"
    assert seen["split"] == [], "options break across lines"
    assert seen["smallest"] >= 10, "too small to read"
    assert seen["tallest"] < 900
    assert seen["copied"] == [a_run().command]
    assert seen["button"] == "Copied"
    assert seen["paper"] == ("rgb(251, 251, 249)" if theme == "light" else "rgb(20, 24, 26)")
    assert seen["accent"] == ("rgb(11, 107, 114)" if theme == "light" else "rgb(92, 192, 196)")


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
