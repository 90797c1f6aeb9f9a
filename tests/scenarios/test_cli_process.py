"""The command as a process: what a shell, a pipe, a full disk and a signal see."""

from __future__ import annotations

import json
import os
import pty
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.commandline import SMALL, Ran, autobatch, command, environment

SLOW = pytest.mark.slow
BUDGET = ("--memory-budget", "64MiB", "--device", "cpu")
FIT = ("fit", "train.py:workload", "--target-batch", 8, "--trials", 0, *BUDGET)
NOISY = """
import os
def noisy(model, batch):
    print("{from python"); os.write(1, b"{from below")
    return loss(model, batch)
def loud():
    print("{from the module")
    return small(loss=noisy)
"""


@pytest.fixture
def train(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SMALL)
    return path


def one_line(ran: Ran, code: int) -> str:
    assert ran.code == code, ran
    assert ran.err.count("\n") == 1, ran.err
    assert "Traceback" not in ran.err
    return ran.err.removeprefix("autobatch: ").rstrip("\n")


@pytest.mark.program
def test_fit_prints_one_json_object_to_stdout_and_all_else_to_stderr(tmp_path: Path, train: Path) -> None:
    train.write_text(SMALL + NOISY)
    ran = autobatch(
        tmp_path, "fit", "train.py:loud", *FIT[2:4], "--steps", 4, "--trials", 2, *BUDGET, "--json"
    )
    found = ran.json
    assert ran.code == 0
    assert "{from python" in ran.err
    assert "{from below" in ran.err
    contract: dict[str, set[str]] = {
        "device": {"kind", "name", "total_bytes", "budget_bytes", "other_processes_bytes"},
        "probe": {"micro_batch", "limited_by", "upper_bound_by", "predicted_micro_batch", "oom_count",
                  "attempts"},
        "plan": {"target_batch", "effective_batch", "world_size", "micro_batch", "accumulation_steps",
                 "micro_batches", "base_batch", "learning_rate", "learning_rate_rule", "precision"},
        "tuning": {"trials", "best", "baseline_samples_per_s", "best_samples_per_s", "study"},
        "training": {"optimizer_steps", "samples", "samples_per_s", "first_loss", "final_loss",
                     "oom_recoveries", "resumed_from", "checkpoint"},
    }  # fmt: skip
    assert {"schema", "autobatch", "profile", "report", *contract} <= found.keys()
    for part, names in contract.items():
        assert names <= found[part].keys(), part
    attempt = {"micro_batch", "fits", "peak_allocated_bytes", "peak_reserved_bytes", "seconds"}
    assert all(attempt <= one.keys() for one in found["probe"]["attempts"])
    assert found["schema"] == 3
    assert found["device"]["other_processes_bytes"] is None
    assert found["probe"]["attempts"][0]["peak_reserved_bytes"] is None
    assert found["training"]["resumed_from"] is None
    assert (found["training"]["optimizer_steps"], found["training"]["samples"]) == (4, 32)
    for path in (found["profile"], found["report"], found["training"]["checkpoint"]):
        assert (tmp_path / path).exists()
    assert json.loads((tmp_path / found["out"] / "result.json").read_text())["plan"] == found["plan"]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("plan", "--target-batch", 8), {"device", "probe", "plan", "profile", "report"}),
        (("probe",), {"device", "probe"}),
    ],
)
@SLOW
def test_plan_and_probe_print_only_their_parts(
    words: tuple[object, ...], parts: set[str], tmp_path: Path, train: Path
) -> None:
    ran = autobatch(tmp_path, *words, "train.py:workload", *BUDGET, "--json", "--quiet")
    assert ran.code == 0
    assert ran.json.keys() == {"schema", "autobatch"} | parts
    assert ran.json.get("report") is None
    assert "fits  " in ran.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.program
def test_nothing_fits_is_exit_3(tmp_path: Path, train: Path) -> None:
    ran = autobatch(tmp_path, "fit", "train.py:workload", *FIT[2:4], "--memory-budget", "30B", "--out", "out")
    line = one_line(ran, 3)
    assert line.startswith("a micro-batch of 1 does not fit in the budget of 30 B")
    assert "--memory-budget" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.program
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nowhere.py:workload",), "there is no file nowhere.py (looked from "),
        pytest.param(("--memory-budget", "900TiB"), "the memory budget is 900 TiB (900TiB), but", marks=SLOW),
        pytest.param(("--device", "cuda:7"), "cuda:7 was asked for, and torch", marks=SLOW),
        pytest.param(("--device", "cuda"), "cuda:0 was asked for, and torch", marks=SLOW),
        pytest.param(("--device", "sim:nope"), "no profile 'nope': known are a10", marks=SLOW),
        pytest.param(("train.py:wrkload",), "train.py has no 'wrkload'", marks=SLOW),
        pytest.param(("--resume",), "--resume found no run in runs/digits", marks=SLOW),
        pytest.param(("--out", "train.py/x"), "the run's folder train.py/x cannot be made", marks=SLOW),
        pytest.param(
            ("train.py:workload", "--lr-rule", "linear"), "--lr-rule linear needs the batch", marks=SLOW
        ),
    ],
)
def test_errors_that_are_found_late_are_one_line(
    words: tuple[str, ...], said: str, tmp_path: Path, train: Path
) -> None:
    before = sorted(tmp_path.rglob("*.py"))
    line = one_line(autobatch(tmp_path, "fit", "--target-batch", 8, *words), 2)
    assert line.startswith(said)
    assert sorted(tmp_path.rglob("*.py")) == before
    assert not (tmp_path / "runs").exists()


@pytest.mark.program
def test_an_error_in_the_workload_is_one_line_that_names_the_log(tmp_path: Path, train: Path) -> None:
    train.write_text(SMALL + "\ndef broken():\n    return small(loss=lambda model, batch: 1 / 0)\n")
    line = one_line(autobatch(tmp_path, "fit", "train.py:broken", *FIT[2:], "--out", "out"), 2)
    place = f"{train}:{len(train.read_text().splitlines())}"
    raised = "the workload's loss raised ZeroDivisionError: division by zero"
    assert line == f"{raised} ({place}); full traceback: out/run.log"
    log = (tmp_path / "out" / "run.log").read_text()
    assert "Traceback (most recent call last)" in log
    assert f'File "{train}", line' in log
    assert "autobatch fit train.py:broken" in log
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["run.log"]


def started(folder: Path, *words: object, until: Path) -> subprocess.Popen[str]:
    """Start the command, and wait until it has written ``until``."""
    process = subprocess.Popen(
        command(*words),
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not (until.exists() and until.stat().st_size):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    return process


@pytest.mark.program
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=SLOW)]
)
def test_a_stopped_run_prints_the_command_that_resumes_it(
    number: int, code: int, tmp_path: Path, train: Path
) -> None:
    words = (*FIT, "--steps", 3000, "--out", "out")
    process = started(tmp_path, *words, until=tmp_path / "out" / "metrics.jsonl")
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    line = one_line(Ran(process.returncode, "", err), code)
    assert "with checkpoint out/checkpoints/step-" in line
    again = line.partition("Resume with: autobatch ")[2].split()
    assert again[-1] == "--resume"
    resumed = autobatch(tmp_path, *again, "--json", "--quiet")
    assert resumed.code == 0
    assert resumed.json["training"]["optimizer_steps"] == 3000
    assert resumed.json["training"]["resumed_from"].startswith("out/checkpoints/step-")


SLEEPY = """
import pathlib, time
def sleepy(model, batch):
    pathlib.Path("asleep").write_text("now")
    time.sleep(600)
def sleeps():
    return small(loss=sleepy)
"""


CONTINUES = "before training; limits and trials so far are saved, and the same command continues with them"


@pytest.mark.program
@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGTERM, 143, "terminated"),
        pytest.param(signal.SIGUSR1, 143, "terminated", marks=SLOW),
        pytest.param(signal.SIGINT, 130, "interrupted", marks=SLOW),
    ],
)
def test_a_stopped_probe_leaves_no_process_behind(
    number: int, code: int, said: str, tmp_path: Path, train: Path
) -> None:
    train.write_text(SMALL + SLEEPY)
    process = started(tmp_path, "probe", "train.py:sleeps", *BUDGET, until=tmp_path / "asleep")
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=60)
    assert one_line(Ran(process.returncode, "", err), code) == f"{said} {CONTINUES}"
    while is_alive(process.pid):  # until the system has buried the last of them
        time.sleep(0.02)


@SLOW
def test_a_killed_probe_leaves_no_process_and_no_file_behind(tmp_path: Path, train: Path) -> None:
    train.write_text(SMALL + SLEEPY)
    process = started(tmp_path, "probe", "train.py:sleeps", *BUDGET, until=tmp_path / "asleep")
    process.kill()
    process.communicate(timeout=60)  # all processes hold this pipe
    while is_alive(process.pid):  # until the system has buried the last of them
        time.sleep(0.02)
    assert {path.name.partition("_")[0] for path in (tmp_path / "tmp").iterdir()} <= {"torchinductor"}


def is_alive(group: int) -> bool:
    """Return whether a process of the group is alive (not a zombie)."""
    listed = subprocess.run(["ps", "-eo", "pgid=,stat="], capture_output=True, text=True, check=True)
    rows = [line.split() for line in listed.stdout.splitlines()]
    return any(row[0] == str(group) and not row[1].startswith("Z") for row in rows)


@SLOW
def test_training_continues_after_the_reader_closed_the_pipe(tmp_path: Path, train: Path) -> None:
    with subprocess.Popen(
        command(*FIT, "--steps", 40, "--out", "out"),
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b"autobatch ")
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
    assert json.loads((tmp_path / "out" / "result.json").read_text())["training"]["optimizer_steps"] == 40


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("fit", "--help"),
        pytest.param(("probe", "train.py:workload", *BUDGET, "--json", "--quiet"), marks=SLOW),
        pytest.param(("profiles", "list"), marks=SLOW),
    ],
)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
def test_a_full_standard_output_is_one_line(words: tuple[str, ...], tmp_path: Path, train: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command(*words),
            cwd=tmp_path,
            env=environment(tmp_path),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    said = "autobatch: cannot write to standard output: No space left on device"
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == said
    assert done.stderr.count("autobatch: ") == 1
    assert "Traceback" not in done.stderr


@SLOW
def test_a_full_disk_is_one_line_and_earlier_checkpoints_stay(tmp_path: Path, train: Path) -> None:
    def no_file_over_a_few_kib() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))

    done = subprocess.run(
        command(*FIT, "--steps", 500, "--out", "out", "--checkpoint-every", 2),
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=no_file_over_a_few_kib,
        check=False,
    )
    line = one_line(Ran(done.returncode, "", done.stderr), 1)
    assert "out/metrics.jsonl cannot be written: File too large" in line or "checkpoint" in line
    saved = list((tmp_path / "out").rglob("step-*"))
    assert all((one / "manifest.json").exists() for one in saved if one.is_dir())


@SLOW
def test_an_unwritable_cache_is_a_note_and_no_failure(tmp_path: Path, train: Path) -> None:
    (tmp_path / "home").write_text("no folder")
    ran = autobatch(tmp_path, "probe", "train.py:workload", *BUDGET)
    assert ran.code == 0
    assert ran.err == ""
    assert "note: the limit was not saved: " in ran.out
    assert ran.out.splitlines()[-2].startswith("fits  ")


def on_a_terminal(folder: Path, *words: object, **variables: str) -> tuple[int, str]:
    """Run the command on a terminal of 80 columns; return the exit code and the output."""
    ours, theirs = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    env = environment(folder, TERM="xterm-256color", **variables)
    del env["COLUMNS"]
    with subprocess.Popen(command(*words), cwd=folder, env=env, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        written = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the terminal is gone with its last writer
                break
            if not part:
                break
            written += part
    os.close(ours)
    return process.returncode, written.decode()


@pytest.mark.parametrize(("variables", "is_red"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_an_error_is_red_on_a_terminal_with_colours(
    tmp_path: Path, variables: dict[str, str], is_red: bool
) -> None:
    code, text = on_a_terminal(tmp_path, "probe", "missing.py", **variables)
    assert code == 2
    assert ("\x1b[31mautobatch: " in text) == is_red
    assert "autobatch: there is no file missing.py" in text.splitlines()[-1]


@SLOW
def test_a_terminal_shows_a_live_line_without_colour_if_asked(tmp_path: Path, train: Path) -> None:
    code, text = on_a_terminal(tmp_path, *FIT, "--steps", 40, "--out", "out", NO_COLOR="1")
    assert code == 0
    assert "\x1b[2K" in text  # a line that is drawn anew
    assert "40/40" in text
    assert "\x1b[3" not in text  # no colour
    assert "memory" in text


TUNE = ("tune", "train.py:workload", "--target-batch", 8, "--trials", 1, *BUDGET)


@SLOW
def test_an_unusable_storage_is_reported_before_the_probe(tmp_path: Path, train: Path) -> None:
    (tmp_path / "file").touch()
    for words in (TUNE, (*FIT, "--tune-lr")):
        ran = autobatch(tmp_path, *words, "--storage", "file/s.log")
        assert "the storage file/s.log of the study cannot be opened" in one_line(ran, 2)
        assert "probe " not in ran.out
    assert not (tmp_path / "runs").exists()


@SLOW
def test_an_unwritable_data_directory_keeps_the_study_in_memory(tmp_path: Path, train: Path) -> None:
    (tmp_path / "file").touch()
    ran = autobatch(
        tmp_path, *TUNE, "--tune-lr", "--lr-trials", 1, "--lr-steps", 4, AUTOBATCH_HOME=str(tmp_path / "file")
    )
    assert ran.code == 0, ran.err
    assert "is kept in memory and cannot be continued later: " in ran.out
    assert "set AUTOBATCH_HOME to a writable directory" in ran.out


BROKEN = """
import ctypes, multiprocessing, sys
class Broken(torch.optim.SGD):
    def step(self, closure=None):
        # In a trial the optimizer is made by the tuner's modules, and by the attempt's in a probe.
        if multiprocessing.parent_process() is not None and "autobatch.tuning.measure" in sys.modules:
            ctypes.string_at(0)
        return super().step(closure)
def workload():
    return small(optimizer=lambda params, learning_rate: Broken(params, lr=learning_rate))
"""


@SLOW
def test_the_plan_stays_if_every_trial_crashes(tmp_path: Path, train: Path) -> None:
    train.write_text(SMALL + BROKEN)
    ran = autobatch(tmp_path, *TUNE, "--trials", 2, "--knobs", "optimizer", "--json")
    assert ran.code == 0, ran.err
    tuning = ran.json["tuning"]
    assert [one["feasible"] for one in tuning["history"]] == [False, False]
    assert tuning["notes"][0].startswith("kept the plan: none of 2 configurations ran")
    assert "(SIGSEGV)" in tuning["notes"][0]
    assert ran.json["plan"]["micro_batches"] == [8]
    assert "kept the default: it could not be measured" in ran.err


SLOW_STEPS = """
import time
class Slow(torch.optim.SGD):
    def step(self, closure=None):
        if self.param_groups[0]["lr"] == 0.04:  # the second trial of the learning rate
            open("caught", "w").close()
            time.sleep(0.2)
        return super().step(closure)
def workload():
    return small(optimizer=lambda params, learning_rate: Slow(params, lr=learning_rate))
"""


@SLOW
def test_an_interrupt_of_the_learning_rate_study_keeps_the_default(tmp_path: Path, train: Path) -> None:
    train.write_text(SMALL + SLOW_STEPS)
    words = command(*TUNE, "--tune-lr", "--json")
    with subprocess.Popen(
        words,
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while not (tmp_path / "caught").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "interrupted: kept the learning rate" in err
    found = json.loads(out)
    assert (found["plan"]["learning_rate"], found["tuning"]["trials"]) == (0.01, 1)
    assert found["tuning"]["learning_rate"] is None


REFUSES = """
import socket
def refuse(*_, **__):
    raise OSError("a connection was tried")
socket.socket.connect = socket.getaddrinfo = refuse
"""


@SLOW
def test_fit_never_uses_the_network(tmp_path: Path, train: Path) -> None:
    train.write_text(SMALL + REFUSES)
    assert autobatch(tmp_path, *FIT, "--steps", 2).code == 0


LIBRARY = """
import asyncio, threading
{small}
class Local:
    def __reduce__(self):
        raise TypeError("cannot be pickled")

def run(**options):
    import autobatch
    local = Local()
    mine = small(loss=lambda model, batch: loss(model, batch) if local else None)
    options = dict(device="cpu", memory_budget="64MiB") | options
    planned = autobatch.plan(mine, target_batch="8", **options)
    assert planned.micro_batches == [8] and planned.plan is planned and planned.probe.micro_batch == 8
    assert autobatch.probe(mine, max_micro_batch=4, **options).micro_batch == 4
    tuned = autobatch.tune(mine, target_batch=8, trials=1, **options)
    assert tuned.tuning.trials == 1 and tuned.training is None
    result = autobatch.fit(mine, target_batch=8, steps="3", trials=0, **options)
    assert result.training.optimizer_steps == 3
    return result.model(torch.zeros(1, 4)).shape

def in_a_thread():
    box = []
    thread = threading.Thread(target=lambda: box.append(run()))
    thread.start(); thread.join()
    return box[0]

async def in_a_loop():
    return run(), await asyncio.to_thread(run)
"""


@pytest.mark.program
@pytest.mark.parametrize(
    "how",
    [
        pytest.param("run()", marks=SLOW),
        pytest.param("in_a_thread()", marks=SLOW),
        "asyncio.run(in_a_loop())",
    ],
)
def test_a_library_call_works_with_objects_that_cannot_be_pickled(how: str, tmp_path: Path) -> None:
    code = LIBRARY.replace("{small}", SMALL) + f"\nprint({how})\n"
    # As a notebook runs its cells: in __main__, from no file.
    program = f"exec(compile({code!r}, '<cell 1>', 'exec'), globals())"
    done: Any = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "torch.Size([1, 1])" in done.stdout
    # A second run says that it goes on with the study of the first.
    assert all(line.startswith("the study has") for line in done.stderr.splitlines())
