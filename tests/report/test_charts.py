"""The charts: what they say in words, their data, and what holds for every drawing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
import msgspec
import pytest

from autobatch.core.records import Attempt, MemoryCurve, Trial
from autobatch.core.units import GiB, MiB
from autobatch.report import charts, drawing
from autobatch.report.page import sections_of
from tests.support.sample_run import a_device, a_memory_curve, a_probe, a_run, a_step, some_trials
from tests.support.snapshots import check_snapshot

pytestmark = pytest.mark.xdist_group("pictures")
"""One worker draws the pictures that many tests look at."""


def all_pictures() -> list[Any]:
    return [picture for section in sections_of(a_run()) for picture in section.pictures]


@pytest.fixture(scope="module", name="pictures")
def drawn_once() -> dict[str, Any]:
    return {picture.slug: picture for picture in all_pictures()}


def drawn(picture: Any | None) -> Any:
    assert picture is not None
    return picture


def described(picture: Any | None) -> str:
    return re.findall(r"<desc [^>]*>([^<]*)<", drawn(picture).svg)[0]


def trained(*records: Any) -> Any:
    return drawn(charts.training_figure(records))


def test_every_drawing_has_colours_of_the_palette_and_is_drawn_wide_and_narrow(
    pictures: dict[str, Any],
) -> None:
    for picture in pictures.values():
        bare = re.sub(r"var\(--[\w-]+, #[0-9a-f]{6}\)", "", picture.svg)
        assert not re.search(r"(fill|stroke)[:=] ?\"?#(?!ffffff)[0-9a-f]{6}", bare), picture.slug
        assert set(re.findall(r"var\(--([\w-]+)", picture.svg)) <= drawing.PALETTE.keys() | {"sans"}
        assert re.findall(r'<svg class="(\w+)" viewBox="0 0 (\d+)', picture.svg) == [
            ("wide", "720"),
            ("narrow", "328"),
        ]
        assert picture.svg.count("<title>") == picture.svg.count("<desc id=") == 2
        assert "</text>" in picture.svg, "text stays text"
        assert not re.search(r"<svg[^>]* width=", picture.svg), "its container decides on its size"
    ids = [found for one in pictures.values() for found in re.findall(r'\bid="([^"]+)"', one.svg)]
    assert len(ids) == len(set(ids))


def test_the_same_data_give_the_same_pictures_whatever_style_the_user_has(
    pictures: dict[str, Any],
) -> None:
    with mpl.rc_context({"font.size": 40, "axes.facecolor": "red", "svg.fonttype": "path"}):
        assert charts.trials_figure(a_run().tuning.history) == pictures["trials"]
        assert mpl.rcParams["font.size"] == 40, "and it is restored"


def test_what_is_drawn_is_in_words_in_the_legend_and_in_a_table(pictures: dict[str, Any]) -> None:
    """The file has, of each chart, what it says, its labels, and the ends of its table."""
    parts = []
    for slug, picture in pictures.items():
        wide = picture.svg.partition('<svg class="narrow"')[0]
        labels = {" ".join(text.split()) for text in re.findall(r">([^<]*[a-z][^<]*)</text>", wide)}
        head, rows = picture.table[1:]
        ends = rows if len(rows) <= 13 else [*rows[:2], *rows[40:42], rows[60], *rows[-2:]]
        cells = [" | ".join(row).rstrip() for row in (head, *ends)]
        parts.append("\n".join([f"## {slug}", described(picture), *sorted(labels), *cells]))
    check_snapshot(Path(__file__).with_name("charts.txt"), "\n\n".join(parts) + "\n")


def test_nothing_to_draw_gives_no_picture() -> None:
    assert charts.training_figure([]) is None
    assert charts.trials_figure(some_trials()[:1]) is None, "one trial says nothing"
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
    assert [row[2] for row in picture.table.rows] == ["unknown", "1.00 MiB", "unknown"]
    failed = msgspec.structs.replace(probe, attempts=2 * attempts[2:])
    assert "ran and fits" not in drawn(charts.memory_figure(a_device(), failed)).svg


def test_memory_over_a_step_is_stacked_with_cached_memory_in_grey() -> None:
    curve = MemoryCurve(positions=[0.0, 1.0], categories={"parameters": [GiB, GiB], "cached": [0, 2 * GiB]})
    picture = drawn(charts.memory_curve_figure(curve, 3 * GiB))
    assert picture.note == "Predicted. The peak is 3.00 GiB of 3.00 GiB, in step."
    assert re.search(r"fill: var\(--rule", picture.svg)
    assert ">budget 3.00 GiB<" in picture.svg
    assert ">budget" not in drawn(charts.memory_curve_figure(a_memory_curve(), 60 * GiB)).svg, "far above"
    empty = MemoryCurve(positions=[0.0], categories={"parameters": [0]})
    assert drawn(charts.memory_curve_figure(empty, GiB)).table.rows == [["step, 0 %", "0 B", "0 B"]]


def test_phases_are_equally_wide(pictures: dict[str, Any]) -> None:
    places = json.loads(re.findall('data-x="([^"]*)"', pictures["memory-over-time"].svg)[0])
    assert [places[at] for at in (0, 30, 60, 88, 116)] == [0, 0.5, 1, 1.5, 2]


def test_a_pointer_finds_each_row_on_the_panels_of_a_chart(pictures: dict[str, Any]) -> None:
    for slug, panels in {"memory-over-time": 1, "memory": 1, "trials": 1, "training": 4}.items():
        picture = pictures[slug]
        for places in re.findall('data-x="([^"]*)"', picture.svg):
            assert len(json.loads(places)) == len(picture.table.rows), slug
        for width, height, found in re.findall(
            'viewBox="0 0 ([^ ]+) ([^"]+)" data-panels="([^"]*)"', picture.svg
        ):
            boxes = json.loads(found)
            assert len(boxes) == panels
            for left, top, right, bottom, *_ in boxes:
                assert 0 <= left < right <= float(width)
                assert 0 <= top < bottom <= float(height)


def test_trials_count_from_one_and_infeasible_ones_have_no_speed() -> None:
    infeasible = Trial(number=0, note="no")
    rows = [["1", "", "", "no"]] * 2
    assert drawn(charts.trials_figure([infeasible] * 2)).table.rows == rows
    numbers = [row[0] for row in drawn(charts.trials_figure(some_trials())).table.rows]
    assert numbers == [str(number) for number in range(1, 14)]


def test_dollars_and_distant_alphabets_are_no_formulas() -> None:
    curve = MemoryCurve(positions=[0.0, 1.0], categories={"$x^2$ <b> 学習率": [GiB, GiB]})
    assert "$x^2$ &lt;b&gt; 学習率" in drawn(charts.memory_curve_figure(curve, GiB)).svg


def test_long_runs_are_thinned_but_keep_their_spikes() -> None:
    flat = trained(*(a_step(step, loss=1.0) for step in range(1, 20_001)))
    spiky = trained(*(a_step(step, loss=9.0 if step == 7777 else 1.0) for step in range(1, 20_001)))
    assert len(spiky.svg) < 200_000
    assert [spiky.table.rows[at][0] for at in (0, -1)] == ["1", "20,000"]
    assert len(spiky.table.rows) == charts.TABLE_ROWS + 1, "the recovery is always there"
    # The spike is in the curve: its axis goes up to it.
    assert ">8</text>" in spiky.svg
    assert ">8</text>" not in flat.svg


def test_steps_that_ran_again_count_once_and_what_is_unknown_is_left_empty() -> None:
    untimed = a_step(5, applied=False, loss=None, samples_per_s=None)
    rows = trained(a_step(1, loss=5.0), a_step(2), a_step(1, loss=4.0), untimed).table.rows
    assert [row[0] for row in rows] == ["1", "2", "5"]
    assert rows[0][1] == "4"
    assert rows[1][3] != ""
    assert rows[2][1:4:2] == ["", ""]
    assert rows[2][-1] == "no optimizer step was taken"


def test_held_out_figures_are_curves_and_one_step_is_a_point() -> None:
    assert trained(a_step(1)).svg.count("<use") >= 6, "three curves, wide and narrow"
    steps = [a_step(at, validation={"f1": 0.5, "loss": 1.0} if at < 3 else {"f1": None}) for at in (1, 2, 3)]
    assert described(trained(*steps)).startswith(
        "loss, held-out loss, held-out f1, learning rate, samples/s over 3"
    )
    assert described(trained(a_step(1), *steps[2:])).startswith("loss, learning rate, samples/s over 2")
    ended = drawn(charts.training_figure([*steps[:2], a_step(3)], held_out={"f1": 0.75}))
    assert [row[-2] for row in ended.table.rows] == ["f1 0.5, loss 1", "f1 0.5, loss 1", "f1 0.75"]


def test_a_micro_batch_that_did_not_change_is_not_drawn() -> None:
    assert ">micro-batch</text>" not in trained(a_step(1), a_step(2)).svg


def test_a_long_noisy_curve_has_a_smoothed_line_over_it() -> None:
    assert charts.smoothed([1.0] * 1000) == pytest.approx([1.0] * 1000)
    noisy = [1.0 + (-1) ** at for at in range(1000)]
    assert all(abs(value - 1.0) < 0.1 for value in charts.smoothed(noisy)[20:-20])
    few, many = (trained(*(a_step(step) for step in range(1, steps))) for steps in (100, 1000))
    assert "running mean" in many.svg
    assert "running mean" not in few.svg


@pytest.mark.parametrize("loss", [1e308, -1.7e308])
@pytest.mark.parametrize("steps", [1, 50])
def test_a_figure_that_cannot_be_drawn_is_left_out_with_a_note(loss: float, steps: int) -> None:
    picture = trained(*(a_step(step, loss=loss) for step in range(1, steps + 1)))
    assert picture.svg.startswith("<p>The figure of Training is left out, it cannot be drawn (")
    assert len(picture.table.rows) == steps


def test_the_reason_of_a_figure_that_is_left_out_is_escaped_and_cut(pictures: dict[str, Any]) -> None:
    def paint(*_: object) -> None:
        raise RuntimeError("<script>\x1b" + "x" * 100_000)

    table = pictures["memory"].table
    note = drawing.draw("slug", "<b>", "description", paint, table, heights=(100, 100)).svg
    assert "The figure of &lt;b&gt; is left out" in note
    assert "&lt;script&gt;\\x1b" in note
    assert len(note) < 1000


def luminance(value: str) -> float:
    """Return the relative luminance of a colour (WCAG 2.2)."""
    parts = [int(value[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_are_readable_by_the_contrast_of_wcag() -> None:
    assert round(contrast("#000000", "#ffffff"), 9) == 21
    paper, on_accent = drawing.PALETTE["paper"], drawing.PALETTE["on-accent"]
    for role in ("ink", "muted", "accent", "bad", "warn"):
        colors = drawing.PALETTE[role]
        assert contrast(colors.light, paper.light) >= 4.5, role
        assert contrast(colors.dark, paper.dark) >= 4.5, role
    for one, other in zip(drawing.PALETTE["accent"], on_accent, strict=True):
        assert contrast(one, other) >= 4.5
    for role in drawing.PALETTE.keys() - {"paper", "surface", "ink", "rule", "on-accent"}:
        for page in ("#ffffff", "#1e1e1e", "#111111"):
            assert contrast(drawing.PALETTE[role].either, page) >= 3, (role, page)


def test_runs_are_drawn_over_each_other_by_samples_and_by_the_phases_of_a_step() -> None:
    run = a_run()
    half = [
        msgspec.structs.replace(
            one, samples=512 * one.step, validation={"accuracy": 0.5} if one.step == 60 else {}
        )
        for one in run.metrics
    ]
    bare = a_run(metrics=[], training=None, memory_curve=None)
    runs, names = [run, a_run(metrics=half), bare], ["a", "b", "c"]
    picture = drawn(charts.curves_figure(runs, names))
    titles = ["loss", "samples/s", "held-out accuracy", "peak memory of a step, GiB"]
    assert all(picture.svg.count(f">{title}</text>") == 2 for title in titles)
    head, rows = picture.table.head, {row[0]: row for row in picture.table.rows}
    at = {(name, title): head.index(f"{name}, {title}") for title in titles for name in "ab"}
    assert len(head) == 1 + len(at), "the third run has no curves"
    losses = {one.samples: one.loss for one in run.metrics}
    assert float(rows["40,960"][at["a", "loss"]]) == pytest.approx(losses[40960], abs=1e-4)
    assert float(rows["30,720"][at["b", "loss"]]) == pytest.approx(half[59].loss, abs=1e-4)
    assert (rows["30,720"][at["b", "held-out accuracy"]], rows["30,720"][at["a", "held-out accuracy"]]) == (
        "0.5",
        "",
    )
    assert (
        rows["61,440"][at["b", "held-out accuracy"]]
        == rows["122,880"][at["a", "held-out accuracy"]]
        == "0.9312"
    )
    assert rows["122,880"][at["b", "loss"]] == "", "the second run had ended"
    assert {row[at["a", "peak memory of a step, GiB"]] for row in picture.table.rows} == {"5", ""}
    memory = drawn(charts.memory_curves_figure(runs, names))
    assert memory.table.head == ["Phases of one optimizer step", "a, live memory, GiB", "b, live memory, GiB"]
    peak = max(map(sum, zip(*run.memory_curve.categories.values(), strict=True))) / GiB
    assert max(float(row[1]) for row in memory.table.rows) == pytest.approx(peak, rel=1e-3)
    assert charts.curves_figure([bare], ["c"]) is charts.memory_curves_figure([bare], ["c"]) is None
