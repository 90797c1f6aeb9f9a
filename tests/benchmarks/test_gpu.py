"""The measurements on a GPU: their journal, their process, their table, and a rehearsal on the stand-in."""

from __future__ import annotations

import itertools
import os
import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest

from autobatch.core.units import GiB, MiB
from autobatch.device.allocator.trace import FREE, Trace
from autobatch.device.hardware_profile import read_profile
from autobatch.device.profiles import load_profile
from benchmarks.gpu import claims, commands, footprint, keep, loop, probe
from benchmarks.gpu.__main__ import measure
from benchmarks.gpu.cases import case, vectors
from benchmarks.gpu.facts import FACTS, large_blocks
from benchmarks.gpu.golden import Mismatch, lasting, mismatches, reduced
from benchmarks.gpu.journal import BEGUN, CUT, DONE, FAILED, FILE, Journal, last_call, latest
from benchmarks.gpu.machine import CudaMachine, StandIn
from benchmarks.gpu.plan import perceptron, units_of
from benchmarks.gpu.work import LOST, Unit, work
from benchmarks.workloads import mlp
from tests.support.python_gpu import python_gpu


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


@pytest.mark.parametrize(
    ("capability", "size"), [((9, 0), 32 * MiB), ((12, 0), 32 * MiB), ((8, 9), 8_519_680), (None, 8_519_680)]
)
def test_workspaces_that_no_torch_tells_are_those_of_the_capability(capability, size):
    """A recording of torch 2.15 has no lasting workspace, from which a size could be read."""
    assert footprint.workspaces_of(SimpleNamespace(compute_capability=capability)) == (size, 2)


def test_an_allocation_that_failed_has_no_address():
    failed = {"action": "oom", "size": 1 << 40, "device_free": 0}
    assert reduced([failed, *entries(*BY_HAND)]) == reduced(entries(*BY_HAND))


def test_blocks_of_at_least_1_mib_are_counted():
    given = entries(
        ("alloc", 0, 32 * MiB), ("alloc", 1, 600), ("alloc", 2, 4 * MiB), ("free_completed", 2, 4 * MiB)
    )
    assert large_blocks(given) == {"taken": {32 * MiB: 1, 4 * MiB: 1}, "kept": {32 * MiB: 1}}


def test_a_dying_process_leaves_the_rows_before_it(tmp_path):
    journal = Journal(tmp_path, 1)
    journal.write("a/1", BEGUN)
    journal.write("a/1", DONE, found={"x": 1})
    journal.write("a/2", BEGUN)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"call": 1, "unit": "a/2", "sta')
    assert [row["status"] for row in journal.rows()] == [BEGUN, DONE, BEGUN]
    unfinished = journal.unfinished()
    assert unfinished is not None
    assert unfinished["unit"] == "a/2"
    assert last_call(tmp_path) == 1
    assert Journal(tmp_path, 2).unfinished() is None
    assert Journal(tmp_path, 2).tried_before() == {"a/1", "a/2"}


def test_what_was_measured_once_is_not_lost_by_a_later_failure():
    rows = [
        {"unit": "a", "status": DONE, "found": 1},
        {"unit": "a", "status": FAILED, "error": "late"},
        {"unit": "b", "status": BEGUN},
        {"unit": "b", "status": CUT},
    ]
    assert {name: row["status"] for name, row in latest(rows).items()} == {"a": DONE, "b": CUT}


def units(ran, *names, seconds=0.0):
    def run(name):
        def inner():
            ran.append(name)
            if "bad" in name:
                raise ValueError(f"{name} broke")
            return {"name": name}

        return inner

    return [Unit(name, seconds, run(name)) for name in names]


def test_a_failure_is_a_row_and_the_next_unit_follows(tmp_path):
    ran = []
    journal = Journal(tmp_path, 1)
    given = units(ran, "a/1", "a/bad", "b/1")
    assert work(given, journal, time.time() + 60, lambda: False) == 0
    assert ran == ["a/1", "a/bad", "b/1"]
    failed = latest(journal.rows())["a/bad"]
    assert failed["error"] == "ValueError: a/bad broke"
    assert any("test_gpu.py" in line for line in failed["where"])
    assert journal.done() == {"a/1", "b/1"}


def test_a_later_call_tries_first_what_no_call_has_tried(tmp_path):
    ran = []
    work(units(ran, "a/1", "a/bad"), Journal(tmp_path, 1), time.time() + 60, lambda: False)
    work(units(ran, "a/1", "a/bad", "b/1"), Journal(tmp_path, 2), time.time() + 60, lambda: False)
    assert ran == ["a/1", "a/bad", "b/1", "a/bad"]


def test_a_unit_that_does_not_fit_in_the_time_is_left(tmp_path):
    ran = []
    given = [*units(ran, "a/long", seconds=100.0), *units(ran, "a/short")]
    work(given, Journal(tmp_path, 1), time.time() + 50, lambda: False)
    assert ran == ["a/short"]


def test_a_lost_context_ends_the_process_and_the_next_one_goes_on(tmp_path):
    ran = []
    given = units(ran, "a/1", "a/2")
    assert work(given, Journal(tmp_path, 1), time.time() + 60, lambda: True) == LOST
    assert work(given, Journal(tmp_path, 1), time.time() + 60, lambda: False) == 0
    assert ran == ["a/1", "a/2"]


BEGINS = (
    "import os, subprocess, sys, time; from pathlib import Path; from benchmarks.gpu.journal import *;"
    "folder = Path(sys.argv[1]); Journal(folder, 1).write('a/1', BEGUN);"
)


def test_the_unit_in_which_a_process_died_is_told(tmp_path):
    journal = Journal(tmp_path, 1)
    command = [sys.executable, "-c", BEGINS + "os._exit(5)", str(tmp_path)]
    assert measure(command, journal, time.time() + 60) is True
    assert journal.rows()[-1] == {
        "call": 1, "unit": "a/1", "status": FAILED, "error": "the process ended with 5"
    }  # fmt: skip


def test_a_process_that_dies_before_its_first_unit_is_not_started_again(tmp_path):
    command = [sys.executable, "-c", "raise SystemExit(1)"]
    assert measure(command, Journal(tmp_path, 1), time.time() + 60) is False


def test_a_unit_that_hangs_is_ended_and_the_next_process_goes_on(tmp_path):
    journal = Journal(tmp_path, 1)
    hangs = BEGINS.replace("BEGUN)", "BEGUN, until=time.time())") + "time.sleep(600)"
    assert measure([sys.executable, "-c", hangs, str(tmp_path)], journal, time.time() + 60) is True
    assert journal.rows()[-1] == {"call": 1, "unit": "a/1", "status": CUT, "error": "it took too long"}


@pytest.mark.program
def test_the_end_of_the_time_ends_the_processes_of_a_unit_too(tmp_path):
    journal = Journal(tmp_path, 1)
    child = BEGINS + (
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "(folder / 'pid').write_text(str(p.pid)); time.sleep(600)"
    )
    assert measure([sys.executable, "-c", child, str(tmp_path)], journal, time.time() + 3) is False
    assert journal.rows()[-1]["status"] == CUT
    pid = int((tmp_path / "pid").read_text())
    for _ in range(500):  # the kernel reaps it when it likes
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if "Z" in (tmp_path.__class__(f"/proc/{pid}/stat")).read_text().split()[2]:
            return
        time.sleep(0.01)
    pytest.fail("the process of the unit still runs")


def test_every_unit_has_its_own_name():
    names = [unit.name for unit in units_of(StandIn(), None)]
    assert len(set(names)) == len(names)


def test_the_first_call_answers_every_claim_but_the_gain_of_tuning(tmp_path):
    """A GPU may be there for nine minutes only."""
    given = units_of(CudaMachine(), tmp_path)
    ends = itertools.accumulate(unit.seconds for unit in given)
    first = {unit.name for unit, end in zip(given, ends, strict=True) if end <= 9 * 60}
    needed = {f"facts/{name}" for name in FACTS} | {
        "footprint/golden", "footprint/gpt bf16", "facts/traces gpt bf16", "probe/gpt-124m 8 GiB",
        "probe/resnet-50 8 GiB", "loop/small", "fit/demo", "fit/resume", "tests/gpu",
    }  # fmt: skip
    assert needed <= first


def test_facts_limits_and_the_loop_are_measured_on_the_stand_in(tmp_path):
    given = [
        unit for unit in units_of(StandIn(), tmp_path) if unit.part in {"facts", "footprint", "probe", "loop"}
    ]
    journal = Journal(tmp_path, 1)
    work(given, journal, time.time() + 600, lambda: False)
    last = latest(journal.rows())
    assert {name: row.get("error") for name, row in last.items() if row["status"] != DONE} == {}
    assert last["probe/perceptron 8 GiB"]["found"]["exact"] is True
    assert last["facts/cap"]["found"]["fixed"]["pieces"] > 30
    assert last["facts/sessions"]["found"]["reserved_bytes"] == [0, 0, 0]
    assert last["facts/traces mlp fp32"]["found"]["same_twice"] is True
    text = claims.table(journal.rows())
    assert "1 of 1 exact; 1 runs and 0 out-of-memory errors" in text
    assert "| tuning gains over the largest micro-batch | not measured |" in text

    kept = keep.keep_fixtures(tmp_path, tmp_path / "kept", "stand-in")
    assert [file.name for file in kept] == ["stand-in_golden.json.gz", "stand-in_traces.jsonl.gz"]
    assert mismatches(keep.read_golden(kept[0])) == []
    traced = keep.read_traces(kept[1])["mlp", "fp32"]
    assert sorted(traced) == [2, 8, 16, 31, 32, 48, 64]
    assert all(any(size == FREE for _, size in events) for events in traced.values())


def test_a_table_without_any_row_says_so():
    text = claims.table([])
    assert text.count(claims.UNKNOWN) == len(claims.CLAIMS)


def test_a_table_by_hand():
    limit = {"exact": True, "runs": 3, "ooms": 1}
    rows = [
        {"unit": "facts/versions", "status": DONE, "found": {"gpu": "A", "torch": "2", "cuda": "13"}},
        {"unit": "probe/a", "status": DONE, "found": limit},
        {"unit": "probe/b", "status": DONE, "found": limit | {"exact": False, "runs": 5}},
        {"unit": "facts/context", "status": DONE, "found": {"first": GiB, "last": GiB + 65 * MiB}},
        {"unit": "loop/a", "status": FAILED, "error": "RuntimeError: no"},
    ]
    plain = {"losses": [2.0, 1.0], "seconds": 0.2, "reserved_bytes": 1}
    compiled = plain | {"losses": [2.0, 1.001], "seconds": 0.1}
    modes = {"off": plain, "default": compiled, "reduce-overhead": "RuntimeError: overwritten"}
    rows.append({"unit": "loop/graphs", "status": DONE, "found": modes})
    text = claims.table(rows)
    assert "default: 2.00 times as fast, losses within 1.0e-03; reduce-overhead: RuntimeError: over" in text
    assert text.startswith("A, torch 2, CUDA 13\n")
    assert "1 of 2 exact; 4 runs and 1 out-of-memory errors in the median, 5 and 1 at most" in text
    assert "65.0 MiB more (more than the notable 64 MiB)" in text
    assert "- loop/a: RuntimeError: no" in text


def test_the_pool_of_a_graph_is_named_where_torch_names_it():
    row = {"entries": ["None"], "segments": ["(0, 0)", "(0, 1)"], "is_refused": True}
    assert claims.pools({"facts/pools": row}) == "yes, its pool is named in segments"
    assert claims.pools({"facts/pools": row | {"segments": [], "is_refused": False}}).startswith("no, ")


@pytest.mark.parametrize(
    ("equal", "repeatable", "said"),
    [
        (True, True, "equal weights"),
        (False, True, "other weights: exits [0, 143, 0]"),
        (False, False, "other weights, as of two uninterrupted runs: the kernels are not deterministic"),
    ],
)
def test_kernels_that_are_not_deterministic_are_no_fault_of_a_resume(equal, repeatable, said):
    row = {"exits": [0, 143, 0], "stopped_within": True, "equal": equal, "repeatable": repeatable}
    assert claims.resume({"fit/resume": row}) == said


def test_measured_figures_enter_a_profile(tmp_path):
    found = {
        "facts/versions": {"gpu": "NVIDIA H200", "torch": "2.11.0+cu130", "total_bytes": 150_000_000_000},
        "facts/context": {"a": 500, "b": 700},
        "facts/speeds": {"bytes_per_second": 4.1e12, "bf16_per_second": 7.9e14},
    }
    before = load_profile("h200", user_dir=tmp_path)
    after = keep.measured(before, found)
    file = tmp_path / "h200.toml"
    file.write_text(keep.format_profile(after))
    assert read_profile(file) == after
    assert (after.total.value, after.total.measured) == (150_000_000_000, True)
    assert (after.context.value, after.dense_bf16.value) == (700, 790_000_000_000_000)
    assert after.nvml_total == before.nvml_total
    assert keep.slug_of(found) == "nvidia-h200-torch-2.11.0"


def test_outcomes_of_tests_are_counted(tmp_path):
    report = tmp_path / "tests.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="a" name="one"/>'
        '<testcase classname="a" name="two"><failure message="it broke">x</failure></testcase>'
        '<testcase classname="a" name="three"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    assert commands.outcomes(report) == {
        "passed": 1, "skipped": 1, "failed": 1, "failures": {"a::two": "it broke"}
    }  # fmt: skip


def test_a_python_without_pytest_is_named(tmp_path, monkeypatch):
    said = SimpleNamespace(returncode=1, stdout="", stderr="python: No module named pytest\n")
    monkeypatch.setattr(commands.subprocess, "run", lambda *_, **__: said)
    with pytest.raises(RuntimeError, match=r"no report \(exit 1\): python: No module named pytest"):
        commands.tests(StandIn(), [], tmp_path)


def test_commands_find_the_packages_that_were_carried_along(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/carried")
    with commands.fresh_home() as environ:
        assert environ["PYTHONPATH"] == os.pathsep.join([str(commands.ROOT), "/carried"])
    monkeypatch.delenv("PYTHONPATH")
    with commands.fresh_home() as environ:
        assert environ["PYTHONPATH"] == str(commands.ROOT)


def test_a_command_that_fails_is_a_failure_with_its_last_words(tmp_path, monkeypatch):
    said = SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nModuleNotFoundError: msgspec\n")
    monkeypatch.setattr(commands.subprocess, "run", lambda *_, **__: said)
    journal = Journal(tmp_path, 1)
    work([Unit("fit/doctor", 0.0, commands.doctor)], journal, time.time() + 60, lambda: False)
    row = latest(journal.rows())["fit/doctor"]
    assert row["status"] == FAILED
    assert row["error"].splitlines()[0] == "RuntimeError: exit 1 of doctor --json"
    assert row["error"].endswith("ModuleNotFoundError: msgspec")
    assert journal.done() == set()


def test_the_tests_for_a_gpu_are_found():
    assert "tests/device/test_cuda.py" in commands.gpu_tests()


class SmallerGpu(CudaMachine):
    """The code for a real GPU, on one of CPU tensors, whose budgets are smaller."""

    def budget(self, budget_bytes):
        return budget_bytes // 512


def read_facts(out):
    with python_gpu(64 * GiB):
        machine = SmallerGpu()
        found = {name: FACTS[name](machine) for name in FACTS if name not in TOO_MUCH}
        found["golden"] = footprint.golden(machine, small_case(), "fp32", 4, out)
        found["limit"] = probe.limit(machine, perceptron, 4 * GiB)
        found["loop"] = loop.ratio(machine, perceptron(), 32, 2)
        machine.empty()
    return found


TOO_MUCH = {"context", "attention", "speeds", "pools"}
"""Facts that need a GPU: its attention, products that take long on the CPU, and graphs."""


def small_case():
    return case("mlp", mlp(64, 2, 32), partial(vectors, width=32))


@pytest.mark.program
def test_the_code_for_a_real_gpu_runs_on_one_of_cpu_tensors(server, tmp_path):
    home = {"AUTOBATCH_HOME": str(tmp_path)}
    (found,) = server.values(read_facts, tmp_path, world=1, environ=home)
    assert found["versions"]["gpu"] == "Python GPU"
    assert found["refused"]["keys"] == ["action", "device_free", "pool_id", "size", "stream", "time_us"]
    assert found["sessions"] == {"reserved_bytes": [0, 0, 0]}
    assert found["cap"]["fixed"]["pieces"] == 50
    assert found["norms"]["fp32"]["taken"]
    assert found["golden"]["entries"] > 20
    assert found["limit"]["exact"] is True
    assert found["loop"]["waits_within_a_step"] is None


@pytest.mark.slow
def test_the_whole_rehearsal(tmp_path):
    """Run commands, tests and tuning, too."""
    journal = Journal(tmp_path, 1)
    command = [sys.executable, "-m", "benchmarks.gpu.work", "--out", str(tmp_path), "--call", "1"]
    command += ["--until", str(time.time() + 900), "--device", "stand-in", "--part", "tests", "fit", "tune"]
    assert measure(command, journal, time.time() + 900) is False
    last = latest(journal.rows())
    assert {name: row.get("error") for name, row in last.items() if row["status"] != DONE} == {}
    assert [row["exit"] for row in last["fit/demo"]["found"].values()] == [0, 0]
    assert last["fit/resume"]["found"]["equal"] is True
    assert last["tests/gpu"]["found"]["failed"] == 0
