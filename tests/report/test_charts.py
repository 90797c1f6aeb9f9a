"""The charts: what they show, and what holds for every drawing."""

from __future__ import annotations

import re
from typing import Any

import matplotlib as mpl
import msgspec
import pytest

from autobatch.core.records import Attempt, MemoryCurve
from autobatch.core.units import GiB, MiB
from autobatch.report import charts
from autobatch.report.page import sections_of
from autobatch.report.tables import attempts_table
from tests.support.sample_run import a_device, a_memory_curve, a_probe, a_run, a_step

pytestmark = pytest.mark.xdist_group("pictures")
"""One worker draws the pictures that many tests look at."""


@pytest.fixture(scope="module", name="pictures")
def drawn_once() -> dict[str, Any]:
    pictures = [section.picture for section in sections_of(a_run()) if section.picture]
    return {picture.slug: picture for picture in pictures}


def drawn(picture: Any | None) -> Any:
    assert picture is not None
    return picture


def trained(*records: Any) -> Any:
    return drawn(charts.training_figure(records))


def luminance(value: str) -> float:
    """Return the relative luminance of a colour (WCAG 2.2)."""
    parts = [int(value[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(color: str, page: str) -> float:
    low, high = sorted((luminance(color), luminance(page)))
    return (high + 0.05) / (low + 0.05)


def test_each_chart_is_one_drawing_that_is_readable_on_light_and_dark(pictures: dict[str, Any]) -> None:
    assert list(pictures) == ["memory-over-time", "memory", "training"]
    for picture in pictures.values():
        assert picture.svg.count("<svg") == 1
        assert re.match(r'<svg role="img" aria-label="[A-Z]', picture.svg)
        assert "</text>" in picture.svg, "text stays text"
        for color in set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", picture.svg)) - {charts.RULE[:7]}:
            assert min(contrast(color, page) for page in ("#ffffff", "#14181a")) >= 3, color
    ids = [name for picture in pictures.values() for name in re.findall(r'\bid="([^"]+)"', picture.svg)]
    assert len(ids) == len(set(ids))


def test_the_same_data_give_the_same_pictures_whatever_style_the_user_has(pictures: dict[str, Any]) -> None:
    with mpl.rc_context({"font.size": 40, "axes.facecolor": "red", "svg.fonttype": "path"}):
        run = a_run()
        assert charts.memory_figure(run.device, run.probe, run.predicted) == pictures["memory"]
        assert mpl.rcParams["font.size"] == 40, "and it is restored"


def test_nothing_to_draw_gives_no_picture() -> None:
    assert charts.training_figure([]) is None
    assert charts.memory_figure(a_device(), msgspec.structs.replace(a_probe(), attempts=[])) is None
    assert charts.memory_curve_figure(MemoryCurve(positions=[], categories={}), 1) is None


def test_unknown_peaks_and_nothing_that_fits() -> None:
    def attempt(size: int, allocated: int | None = None, *, fits: bool = True) -> Attempt:
        return Attempt(
            micro_batch=size, fits=fits, peak_allocated_bytes=allocated, peak_reserved_bytes=None, seconds=0.1
        )

    attempts = [attempt(1), attempt(2, MiB), attempt(3, fits=False)]
    probe = msgspec.structs.replace(a_probe(), attempts=attempts)
    picture = drawn(charts.memory_figure(a_device(), probe))
    assert "peak allocated memory, GiB</text>" in picture.svg
    assert [row[2] for row in attempts_table(attempts).rows] == ["unknown", "1.00 MiB", "unknown"]
    failed = msgspec.structs.replace(probe, attempts=2 * attempts[2:])
    assert "ran and fits" not in drawn(charts.memory_figure(a_device(), failed)).svg


def test_memory_over_a_step_has_its_peak_and_the_budget_near_it() -> None:
    curve = MemoryCurve(positions=[0.0, 1.0], categories={"parameters": [GiB, GiB], "cached": [0, 2 * GiB]})
    picture = drawn(charts.memory_curve_figure(curve, 3 * GiB))
    assert picture.note == "The peak is 3.00 GiB of 3.00 GiB, in step."
    assert ">budget 3.00 GiB<" in picture.svg
    assert ">budget" not in drawn(charts.memory_curve_figure(a_memory_curve(), 60 * GiB)).svg, "far above"


def test_two_micro_batches_of_a_step_are_explained() -> None:
    phases = {"forward 1": 0.0, "backward 1": 1.0, "forward 2": 2.0, "backward 2": 3.0}
    curve = MemoryCurve(positions=[0.0, 1.0, 2.0, 3.0], categories={"all": [1, 2, 1, 2]}, phases=phases)
    assert "forward 2 and backward 2 a further one" in drawn(charts.memory_curve_figure(curve, 9)).note


def test_dollars_and_distant_alphabets_are_no_formulas() -> None:
    curve = MemoryCurve(positions=[0.0, 1.0], categories={"$x^2$ <b> 学習率": [GiB, GiB]})
    assert "$x^2$ &lt;b&gt; 学習率" in drawn(charts.memory_curve_figure(curve, GiB)).svg


def test_long_runs_are_thinned_but_keep_their_spikes() -> None:
    spiky = trained(*(a_step(step, loss=9.0 if step == 7777 else 1.0) for step in range(1, 10_001)))
    assert len(spiky.svg) < 200_000
    assert ">8</text>" in spiky.svg, "its axis goes up to the spike"
    assert "running mean" in spiky.svg


def test_steps_that_ran_again_count_once() -> None:
    again, once = (
        trained(a_step(1, loss=5.0), a_step(2), a_step(1, loss=4.0)),
        [a_step(1, loss=4.0), a_step(2)],
    )
    assert again == trained(*once)


def test_each_term_of_a_loss_has_a_curve() -> None:
    several = trained(*(a_step(step, terms={"boxes": 0.5, "classes": 1.0}) for step in (1, 2)))
    assert [several.svg.count(f">loss: {name}</text>") for name in ("boxes", "classes")] == [1, 1]


def test_held_out_figures_are_curves_and_one_figure_is_none() -> None:
    steps = [a_step(at, validation={"f1": 0.5, "loss": 1.0} if at < 3 else {"f1": None}) for at in (1, 2, 3)]
    assert ">held-out f1</text>" in drawn(charts.training_figure(steps[:2], held_out={"f1": 0.75})).svg
    alone = trained(a_step(1), *steps[2:]).svg
    assert ">held-out f1</text>" not in alone
    assert ">micro-batch</text>" not in alone, "it did not change"
    assert "loss: " not in alone
    assert "running mean" not in alone


def test_a_noisy_curve_is_smoothed() -> None:
    noisy = [1.0 + (-1) ** at for at in range(1000)]
    assert all(abs(value - 1.0) < 0.1 for value in charts.smoothed(noisy)[20:-20])


@pytest.mark.parametrize("loss", [1e308, -1.7e308])
def test_a_figure_that_cannot_be_drawn_is_left_out_with_a_note(loss: float) -> None:
    picture = trained(*(a_step(step, loss=loss) for step in range(1, 51)))
    assert picture.svg.startswith("<p>The figure of Training is left out, it cannot be drawn (")


def test_the_reason_of_a_figure_that_is_left_out_is_escaped_and_cut() -> None:
    def paint(*_: object) -> None:
        raise RuntimeError("<script>\x1b" + "x" * 100_000)

    words = charts.draw("slug", "<b>", paint, height=100).svg
    assert "&lt;b&gt; is left out" in words
    assert "&lt;script&gt;\\x1b" in words
    assert len(words) < 1000
