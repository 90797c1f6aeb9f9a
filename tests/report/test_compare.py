"""Runs side by side."""

from __future__ import annotations

from pathlib import Path

import msgspec

from autobatch.report.compare import comparison_page, comparison_table, losses_figure, write_comparison
from tests.support.sample_run import a_run

ONE = a_run()
OTHER = a_run(
    training=msgspec.structs.replace(
        ONE.training, validation={"accuracy": 0.95, "f1": 0.5}, peak_reserved_bytes=3 << 30
    ),
    versions={"torch": "2.12.0"},
)
NAMES = ["runs/a", "runs/b"]


def test_each_figure_is_a_row_and_each_run_a_column() -> None:
    rows = {row[0]: row[1:] for row in comparison_table([ONE, OTHER], NAMES).rows}
    assert rows["held-out accuracy"] == ["93.12 %", "95.00 %"]
    assert rows["held-out f1"] == ["", "0.5"]
    assert rows["split"] == ["12 micro-batches (4 × 86, 8 × 85)"] * 2
    assert rows["peak memory"] == ["", "3.00 GiB"]
    assert rows["torch"] == ["2.13.0+cu130", "2.12.0"]
    assert "tuned" not in rows, "no run has it"


def test_runs_that_did_not_train_have_no_curve() -> None:
    bare = a_run(training=None, plan=None, metrics=[])
    assert losses_figure([bare], ["x"]) is None
    picture = losses_figure([ONE, bare], NAMES)
    assert picture is not None
    assert [mark.label for mark in picture.legend] == ["runs/a"]
    assert "held-out accuracy" not in {row[0] for row in comparison_table([bare], ["x"]).rows}


def test_the_page_is_sound_and_names_are_escaped(tmp_path: Path) -> None:
    page = comparison_page([ONE, OTHER], ["<b>a</b>", "b"])
    assert "&lt;b&gt;a&lt;/b&gt;" in page
    assert "<b>a</b>" not in page
    assert "<script" not in page
    assert page.count("<figure ") == 1
    path = write_comparison(tmp_path / "compare.html", [ONE, OTHER], NAMES)
    assert path.read_text(encoding="utf-8") == comparison_page([ONE, OTHER], NAMES)
