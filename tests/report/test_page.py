import io
import subprocess
import sys

import msgspec
import pytest

from autobatch.cli.summary import describe_probe, describe_training
from autobatch.cli.terminal import Terminal
from autobatch.core.records import MemoryHolder, RunRecord
from autobatch.planning import make_plan
from autobatch.report.html import Markup, element
from autobatch.report.page import render, write_report
from autobatch.report.sentences import (
    decimal,
    fits_in_words,
    headline,
    rate_in_words,
    split_in_words,
    training_in_words,
)
from tests.support.page_checker import check
from tests.support.sample_run import a_device, a_probe, a_run

HOSTILE = "<script>alert(1)</script> \" ' &amp; ${x} $$ %s"
PARTS = ["device", "memory", "plan", "tuning", "training", "repeat"]


@pytest.fixture(scope="module", name="full")
def rendered_once():
    return render(a_run())


def test_the_whole_page(full):
    page = check(full)
    assert [section["id"] for section in page.all("section")] == PARTS
    figures = [figure["id"] for figure in page.all("figure")]
    assert figures == [
        f"figure-{slug}"
        for slug in ("memory", "memory-over-time", "plan", "trials", "importance", "rates", "training")
    ]
    assert len(page.all("svg")) == 2 * len(figures), "each is drawn wide and narrow"
    assert len(page.all("details")) == len(figures), "each has its data"


def test_every_figure_of_the_run_is_there(full):
    text = check(full).text
    for wanted in (
        "120 optimizer steps of exactly 1,024 samples in 6.00 GiB on NVIDIA GeForce RTX 4090;",
        "the loss went from 2.421 to 0.3618.",
        "93 ran and fits; 94 was run and did not fit. 6 sizes were run, 2 of them ran out of memory.",
        "/usr/bin/python3 -m notebook", "4312", "3.00 GiB", "4 micro-batches of 86 and 8 of 85", "0.0003, as",
        "0.0009 in the place of 0.0003: 15% of the fall of the loss gained, on average over",
        "3 draws of the data. 6 learning rates were tried in runs of 40 optimizer steps",
        "1,728 samples/s, 15% faster", "compile = True, workers = 3", "Validation accuracy", "0.9312",
        "runs/resnet-18/2026-11-21/checkpoints/step-120.pt", "2.13.0+cu130", "2026-11-21 14:05 UTC",
        "autobatch fit train.py:workload --target-batch 1024 --memory-budget 6GiB --steps 120",
    ):  # fmt: skip
        assert wanted in text, wanted


def test_the_same_data_give_the_same_page(full):
    assert render(a_run()) == full


@pytest.mark.parametrize(
    ("missing", "left"),
    [
        ({"probe", "memory_curve"}, ["device", "plan", "tuning", "training", "repeat"]),
        ({"plan"}, ["device", "memory", "tuning", "training", "repeat"]),
        ({"tuning"}, ["device", "memory", "plan", "training", "repeat"]),
        ({"training", "metrics"}, ["device", "memory", "plan", "tuning", "repeat"]),
        ({"versions", "command"}, PARTS[:-1]),
        (
            {"probe", "plan", "tuning", "training", "metrics", "memory_curve",
             "versions", "command", "predicted", "checkpoints", "created"},
            ["device"],
        ),
    ],
)  # fmt: skip
def test_a_part_that_did_not_run_is_not_there(missing, left):
    empty = dict.fromkeys(("probe", "plan", "tuning", "training", "memory_curve"))
    empty |= {"command": "", "created": "", "versions": {}}
    page = check(render(a_run(**{name: empty.get(name, []) for name in missing})))
    assert [section["id"] for section in page.all("section")] == left
    assert [link["href"] for link in page.all("a")[1:]] == [f"#{part}" for part in left]


def test_user_text_is_only_text():
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


def test_a_small_cpu_run_with_little_known():
    device = a_device(kind="cpu", holders=[], notes=[], other_processes_bytes=None)
    page = check(render(a_run(device=device, probe=None, tuning=None, training=None, metrics=[])))
    assert "Other processesunknown" in page.text


def test_it_is_written_whole(tmp_path, full):
    path = write_report(tmp_path / "runs" / "one" / "report.html", a_run())
    assert path.read_text(encoding="utf-8") == full
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]


def test_a_report_needs_no_torch(tmp_path):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import autobatch.report.page, autobatch.report.result\n"
        "import autobatch.device.profiles, autobatch.probing.cache\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=tmp_path, env={"PYTHONPATH": ":".join(sys.path)}
    )


def test_figures_of_averaged_weights_and_checkpoints_that_failed_are_told():
    plain = a_run().training
    averaged = msgspec.structs.replace(plain, ema=0.999, failed_checkpoints=[40, 80])
    assert "held-out accuracy 93.12%" in describe_training(plain)
    assert "averaged weights' held-out accuracy 93.12%" in describe_training(averaged)
    changed = msgspec.structs.replace(plain, skipped_steps=1, validation={"accumulated": 7.0, "x": None})
    assert f"{plain.optimizer_steps:,} steps and 1 skipped, " in describe_training(changed)
    assert "held-out accumulated 7.0000, held-out x not finite" in describe_training(changed)
    assert training_in_words(averaged) == (
        training_in_words(plain) + " 2 checkpoints on the way could not be written."
        " Held-out figures are of the averaged weights (decay 0.999)."
    )


def test_sentences():
    run = a_run(training=None)
    assert headline(run) == (
        "Exactly 1,024 samples an optimizer step in 6.00 GiB on NVIDIA GeForce RTX 4090: "
        "4 micro-batches of 86 and 8 of 85."
    )
    probed = a_run(training=None, plan=None)
    assert headline(probed).startswith("93 is the largest micro-batch that fits in 6.00 GiB")
    assert headline(a_run(training=None, plan=None, probe=None)).startswith("There is a budget of 6.00 GiB")
    plan = make_plan(
        target_batch=8, micro_batch_limit=4, learning_rate=0.1, world_size=2, base_batch=2, rule="sqrt"
    )
    assert split_in_words(plan) == "1 micro-batch of 4 on each of 2 ranks"
    uneven = make_plan(target_batch=7, micro_batch_limit=2, learning_rate=0.1, world_size=2)
    assert split_in_words(uneven) == "2 micro-batches of 2 on each of 2 ranks, or one sample less"
    assert rate_in_words(plan).startswith("0.2: the sqrt rule, times 2 (")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, ("largest", "micro-batch 93, limited by memory")),
        ({"limited_by": "max_micro_batch"}, ("largest", "micro-batch 93, limited by --max-micro-batch")),
        (
            {"upper_bound_by": None, "stopped_by": "time limit"},
            ("fits", "micro-batch 93, and more may: the time limit ended the search"),
        ),
        ({"source": "asked", "limited_by": "max_micro_batch"}, ("fits", "micro-batch 93")),
    ],
)
def test_only_what_is_the_largest_is_called_so(changes, line):
    probe = msgspec.structs.replace(a_probe(), **changes)
    assert describe_probe(probe) == line
    stream = io.StringIO()
    Terminal(stream).probed(probe)
    assert ("largest" in stream.getvalue()) == (line[0] == "largest")
    sentence = headline(RunRecord(device=a_device(), probe=probe))
    assert ("is the largest" in sentence) == line[1].endswith("by memory")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"upper_bound_by": "replay"}, "94 does not fit by the replay"),
        ({"upper_bound_by": "cap", "limited_by": "dataset"}, "94 was not tried, for 93 is the whole dataset"),
        (
            {"upper_bound_by": None, "stopped_by": "time limit"},
            "whether 94 fits is not known: stopped by time limit",
        ),
        ({"source": "saved 2026-11-20"}, "a saved 2026-11-20 answer that was confirmed"),
        ({"oom_count": 0}, "6 sizes were run, none ran out of memory"),
    ],
)
def test_how_the_limit_is_known(changes, words):
    assert words in fits_in_words(msgspec.structs.replace(a_probe(), **changes))


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, "unknown"),
        (0, "0"),
        (0.00012345, "0.0001234"),
        (1234.5, "1,234"),
        (123456.7, "123,457"),
        (2, "2"),
    ],
)
def test_decimals(number, text):
    assert decimal(number) == text


def test_markup_escapes_what_is_not_markup():
    assert element("p", "<b>", Markup("<i></i>"), None, ["a", Markup("&amp;")], title='"', hidden=True) == (
        '<p title="&quot;" hidden>&lt;b&gt;<i></i>a&amp;</p>'
    )
