"""The figures of the footprint benchmarks, and the GPU benchmark on a simulated GPU."""

from __future__ import annotations

import pytest

from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.device.allocator.trace import replay
from autobatch.setup.attempt import attempt
from benchmarks.footprint import table
from benchmarks.footprint.truth import profiled
from tests.support.step_workloads import WORKLOADS, setup


def test_figures_by_hand():
    found = table.figures([-0.05, 0.01, -0.019, 0.0])
    assert found == {
        "cases": 4, "median": pytest.approx(0.0145), "worst": -0.05, "lowest": -0.05, "under": 1,
        "under_share": 0.25,
    }  # fmt: skip
    assert table.figures([])["median"] is None
    assert table.relative(98, 100) == pytest.approx(-0.02)


def test_a_summary_leaves_out_unused_predictions_and_counts_errors():
    def row(name, predicted, notes=()):
        peaks = {"allocated": predicted, "reserved": predicted}
        true = {"allocated": 100, "reserved": 100}
        return {
            "workload": name,
            "precision": "fp32",
            "notes": list(notes),
            "cpu_seconds": 2.0,
            "sizes": [{"micro_batch": 7, "predicted": peaks, "tensors": true, "process": true}],
            "memtracker": {"peak_bytes": 90, "live_bytes": 100, "cpu_seconds": 1.0, "failure": None},
            "limits": [
                {"it_runs": True, "one_more_runs": False, "a_probe_agrees": True},
                {"it_runs": predicted > 90, "one_more_runs": False, "a_probe_agrees": False},
            ],
        }

    rows = [row("a", 100), row("b", 90), row("c", 1, ["recurrent layers: …"])]
    found = table.summary(rows)
    assert found["workloads"] == 2
    assert found["allocated_against_tensors"]["under"] == 1
    assert (found["limits"], found["limits_exact"], found["limits_too_high"]) == (4, 3, 1)
    assert found["memtracker"]["median"] == pytest.approx(0.1)
    content = {
        "date": "d", "hardware": "h", "command": "c", "wall_seconds": 1, "estimates": [], "workloads": rows,
        "versions": {"torch": "t", "python": "p"}, "summary": found,
    }  # fmt: skip
    text = table.markdown(content)
    assert "| c * | fp32 | -99.00%" in text
    assert "| b | fp32 | -10.00% | -10.00% | -10.00% | -10.00% | 1 of 2 |" in text


def test_the_profiler_and_a_meter_agree():
    """torch's profiler and the tracker of storages share no code."""
    one = setup(WORKLOADS["transformer"]())
    seen = replay(profiled(one, 6), CountingAllocator()).peak_allocated_bytes
    assert seen == pytest.approx(attempt(one, 6).attempt.peak_allocated_bytes, rel=0.02)
