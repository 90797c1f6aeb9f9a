import re

import msgspec
import pytest

from autobatch.core.records import Attempt, MemoryCurve, Trial
from autobatch.core.units import MiB
from autobatch.planning import make_plan
from autobatch.report.charts.curves import training_figure
from autobatch.report.charts.drawing import downsample, evenly_spaced
from autobatch.report.charts.memory import memory_curve_figure, memory_figure
from autobatch.report.charts.split import plan_figure
from autobatch.report.charts.trials import importance_figure, rates_figure, trials_figure
from autobatch.report.theme import DARK, LIGHT, style_sheet
from tests.support.sample_run import a_device, a_memory_curve, a_probe, a_run, a_step, some_rates, some_trials


def all_pictures():
    run = a_run()
    return [
        memory_figure(run.device, run.probe, run.predicted),
        plan_figure(run.plan),
        memory_curve_figure(run.memory_curve),
        trials_figure(run.tuning.history),
        importance_figure(run.tuning.importance),
        training_figure(run.metrics, run.checkpoints),
        rates_figure(some_rates()),
    ]


@pytest.fixture(scope="module", name="pictures")
def drawn_once():
    return all_pictures()


def test_every_colour_comes_from_the_palette(pictures):
    assert LIGHT.keys() == DARK.keys()
    for picture in pictures:
        bare = re.sub(r"var\(--[\w-]+, #[0-9a-f]{6}\)", "", picture.svg)
        assert not re.search(r"(fill|stroke)[:=] ?\"?#(?!ffffff)[0-9a-f]{6}", bare), picture.slug
        assert set(re.findall(r"var\(--([\w-]+)", picture.svg)) <= LIGHT.keys() | {"sans"}
        assert {mark.role for mark in picture.legend} <= LIGHT.keys()


def test_the_same_data_give_the_same_pictures(pictures):
    assert all_pictures() == pictures


def test_a_persons_own_style_changes_nothing(pictures):
    import matplotlib as mpl

    with mpl.rc_context({"font.size": 40, "axes.facecolor": "red", "svg.fonttype": "path"}):
        assert plan_figure(a_run().plan) == pictures[1]
        assert mpl.rcParams["font.size"] == 40, "and it is put back"


def test_ids_of_all_pictures_are_apart(pictures):
    ids = [found for picture in pictures for found in re.findall(r'\bid="([^"]+)"', picture.svg)]
    assert len(ids) == len(set(ids))


def test_text_stays_text(pictures):
    assert "budget 6.00 GiB</text>" in pictures[0].svg
    assert pictures[1].svg.count(">86</text>") == 8, "four blocks, drawn wide and narrow"
    assert "optimizer step</text>" in pictures[5].svg


def test_dollars_and_far_alphabets_are_no_formula():
    svg = importance_figure({"$x^2$ <b> 学習率": 1.0}).svg
    assert "$x^2$ &lt;b&gt; 学習率</text>" in svg


def test_nothing_to_draw_is_no_picture():
    nothing_ran = msgspec.structs.replace(a_probe(), attempts=[])
    assert memory_figure(a_device(), nothing_ran) is None
    assert training_figure([]) is None
    assert trials_figure([]) is None
    assert importance_figure({}) is None
    assert memory_curve_figure(MemoryCurve(positions=[], categories={})) is None
    assert rates_figure(msgspec.structs.replace(some_rates(), history=[])) is None


def test_learning_rates_stand_on_a_logarithmic_axis_with_plain_numbers():
    picture = rates_figure(some_rates())
    assert "0.0001</text>" in picture.svg
    assert "mathdefault" not in picture.svg
    assert [mark.label for mark in picture.legend] == [
        "a run", "taken, 0.0009", "the plan's own, 0.0003", "diverged, or ended early"
    ]  # fmt: skip
    assert [row[2] for row in picture.table.rows] == ["1.31", "1.12", "1.9", "not finite", "2.2", "1.1"]


def test_a_single_learning_rate_has_an_axis_too():
    found = some_rates()
    picture = rates_figure(msgspec.structs.replace(found, history=found.history[:1]))
    assert "0.0003" in picture.svg or "0.0001" in picture.svg


def test_unknown_peaks_and_nothing_that_fits():
    probe = msgspec.structs.replace(
        a_probe(),
        attempts=[
            Attempt(
                micro_batch=1, fits=True, peak_allocated_bytes=None, peak_reserved_bytes=None, seconds=0.1
            ),
            Attempt(
                micro_batch=2, fits=True, peak_allocated_bytes=MiB, peak_reserved_bytes=None, seconds=0.1
            ),
            Attempt(
                micro_batch=3, fits=False, peak_allocated_bytes=None, peak_reserved_bytes=None, seconds=0.1
            ),
        ],
    )
    picture = memory_figure(a_device(), probe)
    assert "peak allocated memory, GiB</text>" in picture.svg
    assert [row[2:4] for row in picture.table.rows] == [
        ["unknown", "unknown"],
        ["1.00 MiB", "unknown"],
        ["unknown", "unknown"],
    ]
    blind = msgspec.structs.replace(probe, attempts=probe.attempts[:1])
    assert memory_figure(a_device(), blind).legend == []
    failed = msgspec.structs.replace(probe, attempts=probe.attempts[2:])
    assert [mark.label for mark in memory_figure(a_device(), failed).legend] == [
        "did not fit (what it needs is not known)"
    ]


@pytest.mark.parametrize(
    ("target", "limit", "ranks", "rows"),
    [
        (1, 1, 1, [["0", "1", "1 × 1"]]),
        (1024, 93, 1, [["0", "1,024", "4 × 86, 8 × 85"]]),
        (7, 2, 2, [["0", "4", "2 × 2"], ["1", "3", "1 × 2, 1 × 1"]]),
    ],
)
def test_the_plan_shows_each_ranks_share(target, limit, ranks, rows):
    plan = make_plan(target_batch=target, micro_batch_limit=limit, learning_rate=0.1, world_size=ranks)
    assert plan_figure(plan).table.rows == rows


def test_many_ranks_and_many_micro_batches_stay_small():
    wide = plan_figure(make_plan(target_batch=4096, micro_batch_limit=8, learning_rate=0.1, world_size=64))
    assert len(wide.table.rows) == 8
    assert "first 8 ranks" in wide.table.caption
    assert wide.note
    long = plan_figure(make_plan(target_batch=10_000, micro_batch_limit=1, learning_rate=0.1))
    assert len(long.svg) < 20_000
    assert long.legend[0].label == "micro-batches, too many to be drawn apart"


def test_long_runs_are_thinned_but_keep_their_spikes():
    records = [a_step(step, loss=9.0 if step == 7777 else 1.0) for step in range(1, 20_001)]
    picture = training_figure(records)
    assert len(picture.svg) < 150_000
    assert len(picture.table.rows) == 50
    assert picture.table.rows[0][0] == "1"
    assert picture.table.rows[-1][0] == "20,000"
    drawn = downsample([record.loss for record in records], 600)
    assert 7776 in drawn
    assert len(drawn) <= 602


def test_windows_that_ran_again_count_once_and_gaps_have_no_speed():
    records = [a_step(1, loss=5.0), a_step(2), a_step(1, loss=4.0), a_step(5, applied=False, loss=None)]
    rows = training_figure(records).table.rows
    assert [row[0] for row in rows] == ["1", "2", "5"]
    assert rows[0][1] == "4"
    assert rows[1][3] != ""
    assert rows[2][1:4:2] == ["", ""]
    assert rows[2][-1] == "no optimizer step was taken"


def test_one_step_is_drawn_as_a_point():
    assert training_figure([a_step(1)]).svg.count("<use") >= 6, "three curves, wide and narrow"


def test_trials_without_a_figure_are_refused_or_left_blank():
    refused = Trial(number=0, samples_per_s=None, feasible=False, note="no")
    picture = trials_figure([refused])
    assert picture.table.rows == [["1", "", "no", "no"]]
    assert picture.note == "0 trials measured, 1 not feasible."
    assert len(trials_figure(some_trials() * 40).table.rows) == 200


def test_a_single_point_of_memory_is_drawn():
    curve = MemoryCurve(positions=[0.0], categories={"parameters": [0]})
    assert memory_curve_figure(curve).table.rows == [["0", "0 B"]]
    long = MemoryCurve(
        positions=[float(at) for at in range(20_000)], categories={"a": [at % 7 for at in range(20_000)]}
    )
    assert len(memory_curve_figure(long).svg) < 100_000
    assert memory_curve_figure(a_memory_curve()).note == "It peaks at 4.98 GiB."


def test_even_choice():
    assert evenly_spaced(3, 5) == [0, 1, 2]
    assert evenly_spaced(100, 3) == [0, 50, 99]


def test_each_role_reads_on_its_paper():
    def luminance(value):
        parts = [int(value[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one, other):
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    for palette in (LIGHT, DARK):
        for role in ("ink", "muted", "accent", "bad", "warn"):
            assert contrast(palette[role], palette["paper"]) >= 4.5, role
        assert contrast(palette["on-accent"], palette["accent"]) >= 4.5
    assert "prefers-color-scheme:dark" in style_sheet()
