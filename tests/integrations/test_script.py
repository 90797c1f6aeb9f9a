"""``probe``, ``plan`` and ``fit`` of a program as it is, which takes memory of a stand-in for torch.

`tests/gpu` has torch's own allocator.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from autobatch.cli import main as cli
from autobatch.core.records import DeviceRecord
from tests.support.commandline import Ran
from tests.support.leftovers import wait_until
from tests.support.stand_in_torch import TOTAL_BYTES, install

WEIGHTS, STATE, SAMPLE = 100, 200, 20
"""Mebibytes that the program takes."""
PROGRAM = f"""
import os, sys, time, torch
from torch.optim.optimizer import Optimizer

size = int(sys.argv[1])
weights, state, optimizer = torch.take({WEIGHTS}), None, Optimizer()
for step in range(100):
    activations = torch.take({SAMPLE} * size)
    state = state or torch.take({STATE})
    optimizer.step()
    torch.give(activations)
"""
STEPS_ALONE = """
from torch.optim.optimizer import Optimizer
optimizer = Optimizer()
for _ in range(9):
    optimizer.step()
"""

Run = Callable[..., Ran]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run ``NAME … -- python train.py WORDS`` with a program and a budget in mebibytes."""
    lib = install(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(lib))

    def run(
        *words: str,
        program: str = PROGRAM,
        budget: int = 1000,
        rest: tuple[str, ...] = ("{}",),
        launcher: tuple[str, ...] = (),
    ) -> Ran:
        Path("train.py").write_text(program, encoding="utf-8")
        device = DeviceRecord(
            kind="cuda",
            name="stand-in",
            total_bytes=TOTAL_BYTES,
            budget_bytes=budget << 20,
            budget_source="as set",
        )
        monkeypatch.setattr("autobatch.integrations.script.describe_gpu", lambda _: device)
        code = cli.run([*words, "--", sys.executable, *launcher, "train.py", *rest])
        return Ran(code, *capfd.readouterr())

    return run


def largest(budget: int) -> int:
    """The sizes that fit, counted."""
    return max(size for size in range(1000) if WEIGHTS + STATE + SAMPLE * size <= budget)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_command_is_refused_by_its_need(capfd):
    assert cli.run(["probe", "--", sys.executable, "{}"]) == 2
    assert "GPU" in capfd.readouterr().err


@pytest.mark.parametrize("budget", [400, 3001])
def test_the_limit_is_that_of_the_sum_in_few_runs(run, budget):
    found = run("probe", "--json", budget=budget).json["probe"]
    assert found["micro_batch"] == largest(budget)
    assert found["upper_bound_by"] in ("run", "replay")
    assert len(found["attempts"]) <= 4
    assert found["attempts"][-1]["fits"] or found["upper_bound_by"] == "run"


def test_one_run_confirms_a_saved_limit_until_the_program_changes(run):
    run("probe")
    again = run("probe", "--json").json["probe"]
    assert [attempt["micro_batch"] for attempt in again["attempts"]] == [largest(1000)]
    assert again["source"].startswith("saved")
    changed = run("probe", "--json", program=PROGRAM.replace("range(100)", "range(99)"))
    assert changed.json["probe"]["source"] == "search"


def test_a_plan_divides_the_target_exactly_and_fills_in_the_command(run):
    words = ("{}", "--accumulate={steps}", "--of-all={total_steps}", "a b")
    ran = run("plan", "--target-batch", "96", "--json", rest=words)
    plan, command = ran.json["plan"], ran.json["command"]
    limit = largest(1000)
    divisor = max(size for size in range(1, limit + 1) if 96 % size == 0)
    assert (plan["micro_batch"], plan["accumulation_steps"]) == (divisor, 96 // divisor)
    assert command[2:] == [str(divisor), f"--accumulate={96 // divisor}", f"--of-all={96 // divisor}", "a b"]
    assert shlex.join(command) in run("plan", "--target-batch", "96", rest=words).out
    assert "one size alone ran" in run("plan", "--target-batch", "4", rest=(*words, "c")).out


def test_fit_becomes_the_command(run, monkeypatch):
    became: list[list[str]] = []
    monkeypatch.setattr("os.execvpe", lambda name, words, environ: became.append([name, *words]))
    run("fit", "--target-batch", "96", rest=("{}", "{steps}"))
    assert became == [[sys.executable, sys.executable, "train.py", "32", "3"]]


LAUNCHER = """
import os, subprocess, sys

variables = {**os.environ, "WORLD_SIZE": "2"}
if "--ranks" not in sys.argv:
    sys.exit(subprocess.run([sys.executable, *sys.argv, "--ranks"], env=variables).returncode)
ranks = []
for rank in "01":
    variables |= {"RANK": rank, "LOCAL_RANK": rank}
    ranks.append(subprocess.Popen([sys.executable, *sys.argv[1:-1]], env=variables, start_new_session=True))
for rank in ranks:
    if rank.wait():
        raise subprocess.CalledProcessError(rank.returncode, sys.argv[1:])
"""
"""Passes its environment on as DeepSpeed's does on one host: a process copies it for one that copies it for
each rank. The sessions of ranks are those of torchrun, and the traceback is that of accelerate."""


@pytest.mark.parametrize("is_broken", [False, True])
def test_the_least_limit_of_all_ranks_of_a_launcher_holds(run, tmp_path, is_broken):
    (tmp_path / "launch.py").write_text(LAUNCHER, encoding="utf-8")
    unequal = PROGRAM.replace(f"take({WEIGHTS})", f"take({WEIGHTS} + 300 * int(os.environ['RANK']))")
    program = "raise ValueError('bad data')" if is_broken else unequal
    ran = run(
        *("plan", "--target-batch", "96", "--json"),
        program=program,
        rest=("{}", "{steps}"),
        launcher=("launch.py",),
    )
    if is_broken:
        assert ran.code == 2
        assert "ValueError: bad data" in ran.err
        return
    plan = ran.json["plan"]
    assert (ran.json["probe"]["micro_batch"], plan["world_size"]) == (largest(700), 2)
    assert plan["micro_batch"] * plan["accumulation_steps"] == 48


SETS = "import os\nos.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'max_split_size_mb:64'\n"
"""The budget holds whatever the program sets."""
CAUGHT = PROGRAM.replace(
    f"    activations = torch.take({SAMPLE} * size)",
    f"    try:\n        activations = torch.take({SAMPLE} * size)\n"
    f"    except torch.OutOfMemoryError:\n        activations = torch.take({SAMPLE})",
)
"""An error that the program catches is no fit."""


@pytest.mark.parametrize("program", [SETS + PROGRAM, CAUGHT], ids=["sets", "caught"])
def test_the_budget_holds(run, program):
    assert run("probe", "--json", program=program).json["probe"]["micro_batch"] == largest(1000)


def test_an_error_at_larger_sizes_bounds_the_answer_and_is_told(run):
    odd = PROGRAM.replace("for step", "if size > 20: raise KeyError('no such size')\nfor step")
    ran = run("probe", "--json", program=odd)
    assert (ran.json["probe"]["micro_batch"], ran.json["probe"]["upper_bound_by"]) == (20, "error")
    assert "KeyError: 'no such size'" in ran.err


def test_a_program_that_keeps_something_from_run_to_run_is_named(run):
    """Its sizes past the first would seem too large."""
    once = PROGRAM.replace("for step", "os.mkdir('run')\nfor step")
    ran = run("probe", program=once)
    assert ran.code == 2
    assert "ran at the size 4, and no longer does" in ran.err
    assert "FileExistsError" in ran.err


HELD = PROGRAM.replace("for step", "if {}: os.environ['OTHERS_HOLD'] = '7800'\nfor step")
"""Others hold all but 392 MiB, which are the weights and 14 samples."""


def test_a_refusal_of_the_gpu_is_repeated_and_if_it_lasts_told_and_not_saved(run):
    once = HELD.format("size > 14 and not os.path.exists('seen') and not open('seen', 'w').close()")
    ran = run("probe", "--json", program=once)
    assert (ran.json["probe"]["micro_batch"], ran.json["probe"]["oom_count"]) == (largest(1000), 0)
    lasting = run("probe", "--json", program=HELD.format("size > 14"))
    assert lasting.json["probe"]["micro_batch"] == 14
    assert "not the budget" in lasting.err
    assert lasting.json.get("profile") is None


def test_nothing_fits_in_the_budget_or_below_the_cap(run):
    ran = run("probe", budget=310)
    assert (ran.code, len(ran.err.splitlines())) == (3, 1)
    assert "--memory-budget" in ran.err
    ran = run("probe", "--max-micro-batch", "4", "--micro-batch-multiple", "8")
    assert (ran.code, len(ran.err.splitlines())) == (2, 1)
    assert "no multiple of 8" in ran.err


def test_its_output_is_in_the_log_and_with_verbose_on_the_screen(run, own_home):
    prints = "print('hello there', flush=True)\n" + PROGRAM
    quiet = run("probe", program=prints)
    assert "hello there" not in quiet.out + quiet.err
    (log,) = own_home.rglob("*-command.log")
    assert log.read_text().count("hello there") == quiet.out.count("\nprobe ")
    assert str(log) in quiet.out
    assert "hello there" in run("probe", "--verbose", program=prints).err


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("raise ValueError('bad data')", ["ValueError: bad data"]),
        ("import sys; print('usage: train'); sys.exit(4)", ["exit code 4", "usage: train"]),
        ("print('nothing to do')", ["exit code 0", "not known to have used a GPU", "nothing to do"]),
        (STEPS_ALONE, ["3 of 3", "not known to have used a GPU"]),
        (PROGRAM.replace("range(100)", "range(2)"), ["2 of 3 optimizer steps"]),
        (PROGRAM.replace("    optimizer.step()", "    step"), ["0 of 3 optimizer steps"]),
        (PROGRAM.replace("* size", "* 2"), ["same memory at the sizes 4 and 5", "{}"]),
        ("import os; os.kill(os.getpid(), 9)", ["exit code -9"]),
        ("import time\nprint('loading')\ntime.sleep(60)", ["steps, exit code none within 1 s", "loading"]),
    ],
)
def test_a_program_that_takes_no_step_is_one_line_with_its_last_words(run, program, words):
    ran = run("probe", *(("--seconds", "1") if "sleep" in program else ()), program=program)
    assert ran.code == 2
    (line,) = ran.err.splitlines()
    assert all(word in line for word in words), line


def test_ctrl_c_ends_the_program_and_all_that_it_started(run, monkeypatch):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run in the background
    program = f"""
import os, signal, subprocess, sys, time
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
open("pids", "w").write(f"{{os.getpid()}} {{other.pid}}")
os.kill({os.getpid()}, signal.SIGINT)
time.sleep(60)
"""
    assert run("probe", program=program).code == 130
    for pid in Path("pids").read_text().split():
        stat = Path(f"/proc/{pid}/stat")  # whose state is Z until the parent looks
        wait_until(lambda stat=stat: not stat.exists() or " Z " in stat.read_text(), stat)
