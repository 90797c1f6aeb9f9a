"""The charts: what they show, and what holds for every drawing."""

from __future__ import annotations

import re
from typing import Any

import matplotlib as mpl
import pytest

from autobatch.core.records import MemoryCurve, RunRecord
from autobatch.core.units import GiB
from autobatch.report import page as charts
from tests.support.sample_run import a_device, a_memory_curve, a_probe, a_run, a_step

pytestmark = pytest.mark.xdist_group("pictures")
"""One worker draws the pictures that many tests look at."""


@pytest.fixture(scope="module", name="pictures")
def drawn_once() -> dict[str, Any]:
    return charts.pictures_of(a_run())


def trained(*records: Any) -> str:
    return charts.training_figure(records).svg


def contrast(color: str, page: str) -> float:
    """Return the contrast of two colours (WCAG 2.2)."""
    low, high = sorted(map(luminance, (color, page)))
    return (high + 0.05) / (low + 0.05)


def luminance(value: str) -> float:
    parts = [int(value[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_each_chart_is_one_drawing_that_is_readable_on_light_and_dark(pictures: dict[str, Any]) -> None:
    assert list(pictures) == ["memory", "training"]
    for picture in pictures.values():
        assert picture.svg.count("<svg") == 1
        assert re.match(r'<svg role="img" aria-label="[A-Z]', picture.svg)
        assert "</text>" in picture.svg, "text stays text"
        for color in set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", picture.svg)) - {charts.RULE[:7]}:
            assert min(contrast(color, page) for page in ("#ffffff", "#14181a")) >= 3, color
    ids = [name for picture in pictures.values() for name in re.findall(r'\bid="([^"]+)"', picture.svg)]
    assert len(ids) == len(set(ids))
    assert charts.pictures_of(RunRecord(device=a_device(), probe=a_probe())) == {}


def test_the_same_data_give_the_same_pictures_whatever_style_the_user_has(pictures: dict[str, Any]) -> None:
    with mpl.rc_context({"font.size": 40, "axes.facecolor": "red", "svg.fonttype": "path"}):
        assert charts.memory_figure(a_memory_curve(), 6 * GiB) == pictures["memory"]
        assert mpl.rcParams["font.size"] == 40, "and it is restored"


def test_memory_over_a_step_has_its_peak_and_the_budget_near_it() -> None:
    name = "$x^2$ <b> 学習率"
    curve = MemoryCurve(positions=[0.0, 1.0], categories={name: [GiB, GiB], "cached": [0, 2 * GiB]})
    picture = charts.memory_figure(curve, 3 * GiB)
    assert picture.note == "The peak at micro-batch 1 is 3.00 GiB of 3.00 GiB, in step."
    assert ">budget 3.00 GiB<" in picture.svg
    assert "$x^2$ &lt;b&gt; 学習率" in picture.svg, "a name is no formula"
    assert ">budget" not in charts.memory_figure(a_memory_curve(), 60 * GiB).svg, "far above"
    phases = {"forward 1": 0.0, "backward 1": 1.0, "forward 2": 2.0, "backward 2": 3.0}
    curve = MemoryCurve(positions=[0.0, 1.0, 2.0, 3.0], categories={"all": [1, 2, 1, 2]}, phases=phases)
    assert charts.memory_figure(curve, 9).note.startswith(
        "The peak at micro-batch 1 is 2 B of 9 B, in backward 1. Forward 2"
    )


def test_long_runs_are_thinned_and_smoothed_but_keep_their_spikes() -> None:
    spiky = trained(*(a_step(step, loss=9.0 if step == 7777 else 1.0) for step in range(1, 10_001)))
    assert len(spiky) < 200_000
    assert ">8</text>" in spiky, "its axis goes up to the spike"
    assert ">running mean</text>" in spiky


def test_each_term_and_each_held_out_figure_has_a_curve_if_it_has_a_course() -> None:
    steps = [a_step(at, terms={"boxes": 0.5}, validation={"f1": 0.5, "loss": 1.0}) for at in (1, 2)]
    titles = (">loss: boxes<", ">held-out f1<", ">held-out loss<")
    drawn = trained(*steps)
    assert all(title in drawn for title in titles)
    alone = trained(a_step(1), a_step(3, validation={"f1": 0.5}))
    assert not any(title in alone for title in (*titles, ">micro-batch<", ">running mean<"))
