"""Every picture of the report: its colours, ids and text, and the choice of points."""

from __future__ import annotations

import re

import matplotlib as mpl
import pytest

from autobatch.core.units import GiB, KiB, MiB, TiB
from autobatch.report.charts.curves import training_figure
from autobatch.report.charts.drawing import (
    NARROW,
    WIDE,
    bytes_unit,
    color,
    downsample,
    draw,
    evenly_spaced,
    series,
)
from autobatch.report.charts.memory import memory_curve_figure, memory_figure
from autobatch.report.charts.split import plan_figure
from autobatch.report.charts.trials import comparison_figure, trials_figure
from autobatch.report.theme import LIGHT
from tests.support.sample_run import a_run, a_step


def all_pictures():
    run = a_run()
    return [
        memory_figure(run.device, run.probe, run.predicted),
        plan_figure(run.plan),
        memory_curve_figure(run.memory_curve),
        trials_figure(run.tuning.history),
        comparison_figure(run.tuning.comparisons),
        training_figure(run.metrics, run.checkpoints),
    ]


@pytest.fixture(scope="module", name="pictures")
def drawn_once():
    return all_pictures()


def test_every_colour_comes_from_the_palette(pictures):
    for picture in pictures:
        bare = re.sub(r"var\(--[\w-]+, #[0-9a-f]{6}\)", "", picture.svg)
        assert not re.search(r"(fill|stroke)[:=] ?\"?#(?!ffffff)[0-9a-f]{6}", bare), picture.slug
        assert set(re.findall(r"var\(--([\w-]+)", picture.svg)) <= LIGHT.keys() | {"sans"}
        assert {mark.role for mark in picture.legend} <= LIGHT.keys()


def test_the_same_data_give_the_same_pictures(pictures):
    assert all_pictures() == pictures


def test_the_style_of_the_user_changes_nothing(pictures):
    with mpl.rc_context({"font.size": 40, "axes.facecolor": "red", "svg.fonttype": "path"}):
        assert plan_figure(a_run().plan) == pictures[1]
        assert mpl.rcParams["font.size"] == 40, "and it is restored"


def test_ids_of_all_pictures_differ(pictures):
    ids = [found for picture in pictures for found in re.findall(r'\bid="([^"]+)"', picture.svg)]
    assert len(ids) == len(set(ids))


def test_text_stays_text(pictures):
    assert "budget 6.00 GiB</text>" in pictures[0].svg
    assert pictures[1].svg.count(">86</text>") == 8, "four blocks, drawn wide and narrow"
    assert "optimizer step</text>" in pictures[5].svg


def test_every_picture_is_drawn_wide_and_narrow_with_a_description(pictures):
    for picture in pictures:
        widths = re.findall(r'<svg class="(\w+)" viewBox="0 0 (\d+)', picture.svg)
        assert widths == [("wide", str(WIDE)), ("narrow", str(NARROW))], picture.slug
        assert picture.svg.count("<title>") == picture.svg.count("<desc id=") == 2


def test_every_role_and_category_has_a_placeholder_of_its_own():
    assert len({color(role) for role in LIGHT}) == len(LIGHT)
    assert [series(number) for number in (0, 6, 7)] == [
        color("series-1"),
        color("series-7"),
        color("series-1"),
    ]


@pytest.mark.parametrize(
    ("size", "unit"),
    [
        (0, (1, "B")),
        (KiB - 1, (1, "B")),
        (KiB, (KiB, "KiB")),
        (5 * MiB, (MiB, "MiB")),
        (GiB, (GiB, "GiB")),
        (3000 * GiB, (TiB, "TiB")),
    ],
)
def test_the_unit_of_an_axis_is_the_largest_that_is_filled(size, unit):
    assert bytes_unit(size) == unit


def test_evenly_spaced_indices_keep_both_ends():
    assert evenly_spaced(3, 5) == [0, 1, 2]
    assert evenly_spaced(100, 3) == [0, 50, 99]


def test_downsampling_keeps_both_ends_and_the_extremes():
    values = [float((at * 37) % 101) for at in range(5000)]
    values[1234], values[4321] = 1e6, -1e6
    kept = downsample(values, 100)
    assert len(kept) <= 102
    assert kept == sorted(set(kept))
    assert {0, 1234, 4321, 4999} <= set(kept)
    assert downsample([3.0, 1.0], 2) == [0, 1]


@pytest.mark.parametrize("loss", [1e308, -1.7e308])
@pytest.mark.parametrize("steps", [1, 2, 50])
def test_a_figure_that_cannot_be_drawn_is_left_out_with_a_note(loss, steps):
    picture = training_figure([a_step(step, loss=loss) for step in range(1, steps + 1)])
    assert picture.svg.startswith("<p>The figure of Training is left out, it cannot be drawn (")
    assert len(picture.table.rows) == steps


def test_the_reason_of_a_figure_that_is_left_out_is_escaped_and_cut():
    def paint(*_):
        raise RuntimeError("<script>\x1b" + "x" * 100_000)

    note = draw("slug", "<b>", "description", paint, heights=(100, 100))
    assert "The figure of &lt;b&gt; is left out" in note
    assert "&lt;script&gt;\\x1b" in note
    assert len(note) < 1000
