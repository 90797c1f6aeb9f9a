"""The figures of the footprint benchmarks, and the GPU benchmark on a simulated GPU."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from autobatch.core.units import GiB, KiB, MiB
from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.device.allocator.trace import FREE, Trace, replay
from autobatch.device.profiles import load_profile
from autobatch.device.simulated import SimulatedDevice
from autobatch.footprint.predict import footprint
from autobatch.probing.attempt import attempt
from benchmarks.footprint import table
from benchmarks.footprint.truth import profiled
from benchmarks.gpu import cases as gpus
from benchmarks.gpu import footprint as gpu
from benchmarks.gpu.golden import Mismatch, lasting, mismatches, reduced
from benchmarks.workloads import mlp
from tests.support.step_workloads import WORKLOADS, setting, setup


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


def test_a_limit_that_is_too_high_is_an_underestimate():
    limit = {"gpu": 100, "predicted": 103, "predicted_low": 99, "predicted_high": 104, "runs": 2, "ooms": 0}
    found = table.gpu_summary([{"workload": "a", "notes": [], "sizes": [], "limits": [limit]}])
    assert found["limits"]["under"] == 1
    assert (found["limits_exact"], found["limits_in_interval"]) == (0, 1)


def entries(*actions):
    return [{"action": action, "addr": 4096 + address, "size": size} for action, address, size in actions]


BY_HAND = [
    ("segment_alloc", 0, 2 * MiB),
    ("alloc", 0, 600),  # small: a segment of 2 MiB
    ("alloc", 1024, 512),  # in the same
    ("segment_alloc", 16 * MiB, 20 * MiB),
    ("alloc", 16 * MiB, 5 * MiB),  # under 10 MiB: a segment of 20
    ("alloc", 21 * MiB, 15 * MiB),  # fills it
    ("free_requested", 16 * MiB, 5 * MiB),
    ("free_completed", 16 * MiB, 5 * MiB),
    ("alloc", 16 * MiB, 3 * MiB),  # the hole that was left
    ("segment_alloc", 64 * MiB, 12 * MiB),
    ("alloc", 64 * MiB, 11 * MiB),  # of its own size, in steps of 2 MiB
    ("free_completed", 64 * MiB, 11 * MiB),
    ("segment_free", 64 * MiB, 12 * MiB),  # the cache was emptied
    ("alloc", 2048, 512),
]


def test_the_entries_of_the_allocator_by_hand():
    small = reduced(entries(*BY_HAND))
    assert small[0] == ("segment_alloc", 0, 2 * MiB)
    assert not [action for action, _, _ in small if action == "free_requested"]
    assert mismatches(small) == []


def test_a_gpu_that_allocates_differently_is_noticed():
    other = [(action, address, 4 * MiB if size == 2 * MiB else size) for action, address, size in BY_HAND]
    assert mismatches(other)[0] == Mismatch(1, 4 * MiB, 2 * MiB)


def test_workspaces_are_blocks_that_stay():
    size = 8_519_680
    trace = Trace(((0, size), (1, 5), (2, size), (3, size), (3, FREE), (4, 32 * MiB), (1, FREE)))
    assert lasting(trace) == {size: 2, 32 * MiB: 1}


def test_the_profiler_and_a_meter_agree():
    """torch's profiler and the tracker of storages share no code."""
    one = setup(WORKLOADS["transformer"]())
    seen = replay(profiled(one, 6), CountingAllocator()).peak_allocated_bytes
    assert seen == pytest.approx(attempt(one, 6).attempt.peak_allocated_bytes, rel=0.02)


def test_without_a_gpu_one_line_is_printed(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["gpu", "--out", str(tmp_path / "none")])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu.main()
    assert capsys.readouterr().out.count("\n") == 1
    assert not (tmp_path / "none").exists()


def test_the_whole_run_on_a_simulated_gpu(monkeypatch, capsys, tmp_path):
    class Properties:
        name, major, minor, total_memory = "NVIDIA Simulated", 9, 0, 140 * GiB

    def device(*, index, memory_budget):
        budget = GiB if memory_budget is None else memory_budget * KiB // GiB * 256
        return SimulatedDevice(load_profile("h200", user_dir=tmp_path), budget)

    small = partial(gpus.case, "mlp", mlp(64, 2), partial(gpus.vectors, width=32))
    answers = {
        "is_available": True, "get_device_properties": Properties, "get_device_capability": (9, 0),
        "mem_get_info": (139 * GiB, 140 * GiB), "memory_reserved": 0, "get_device_name": "Simulated",
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda _: {"device_traces": [entries(*BY_HAND)]})
    monkeypatch.setattr(gpu, "CudaDevice", device)
    monkeypatch.setattr(gpu, "CASES", {"mlp": small})
    monkeypatch.setattr(gpu, "SIZES", (4, 16))
    monkeypatch.setattr(gpu, "SAMPLES", 40)
    monkeypatch.setattr(gpu, "GOLDEN", ("mlp", "bf16", 4))
    monkeypatch.setattr(gpu, "workspaces", dict)
    monkeypatch.setattr(
        "sys.argv",
        ["gpu", "--out", str(tmp_path), "--only", "mlp", "--caps", "8", "--precisions", "fp32", "bf16"],
    )
    gpu.main()
    said = capsys.readouterr().out
    assert "underestimates over 2 %" in said
    found = json.loads(next(tmp_path.glob("footprint_*.json")).read_text())
    assert [row["precision"] for row in found["workloads"]] == ["fp32", "bf16"]
    for row in found["workloads"]:
        assert [size["micro_batch"] for size in row["sizes"]] == list(gpu.SIZES)
        assert [limit["cap_bytes"] for limit in row["limits"]] == [8 * GiB]
        assert all(limit["gpu"] > 0 for limit in row["limits"])
    assert found["golden"]["mismatches"] == 0
    golden = json.loads(gzip.decompress((tmp_path / found["golden"]["file"]).read_bytes()))
    assert mismatches([tuple(entry) for entry in golden["entries"]]) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", gpus.CASES)
def test_every_case_for_a_gpu_can_be_traced(name):
    case = gpus.CASES[name]()
    with torch.device("meta"):
        model = case.workload.model()
    one = setting(setup(WORKLOADS["perceptron"](), precision="bf16"), capability=(9, 0), steps=(1, 2, 2))
    made = replace(one, workload=case.workload, model=model, batch_of=case.batch_of, knobs=case.knobs)
    traced = footprint(made)
    assert replay(traced.program.at(64), CountingAllocator()).peak_allocated_bytes > 16 * MiB
