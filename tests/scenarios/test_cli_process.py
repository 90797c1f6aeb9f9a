"""The command as a process: what a shell, a pipe, a full disk and a signal see."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autobatch.cli import main as cli
from autobatch.core.signals import ENDING
from tests.support.commandline import SMALL, Ran, autobatch, command, environment, run

BUDGET = ("--memory-budget", "64MiB", "--device", "cpu")
FIT = ("fit", "train.py:workload", "--target-batch", 8, "--trials", 0, *BUDGET)
NOISY = """
import argparse, os, socket
argparse.ArgumentParser().parse_args()
def refuse(*_, **__):
    raise OSError("a connection was tried")
socket.socket.connect = socket.getaddrinfo = refuse
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
    """It never uses the network."""
    train.write_text(SMALL + NOISY)
    words = (*FIT[2:4], "--steps", 4, "--trials", 2, *BUDGET, "--json", "--verbose")
    ran = autobatch(tmp_path, "fit", "train.py:loud", *words)
    found = ran.json
    assert ran.code == 0
    assert {"python", "below"} <= {*re.findall("{from (python|below)", ran.err)}
    assert (found["schema"], found["training"]["optimizer_steps"], found["training"]["samples"]) == (3, 4, 32)
    for path in (found["profile"], found["report"], found["training"]["checkpoint"]):
        assert (tmp_path / path).exists()
    assert json.loads((tmp_path / found["out"] / "result.json").read_text())["plan"] == found["plan"]


@pytest.mark.usefixtures("warm_children")
def test_an_error_in_the_workload_is_one_line_that_names_the_log_if_it_can_be_written(
    tmp_path: Path,
    train: Path,
    own_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    train.write_text(SMALL + "\ndef broken():\n    return small(loss=lambda model, batch: 1 / 0)\n")
    words = ["fit", "train.py:broken", *map(str, FIT[2:]), "--out", "out"]
    line = one_line(Ran(cli.run(words), "", capsys.readouterr().err), 2)
    place = f"{train}:{len(train.read_text().splitlines())}"
    raised = "the workload's loss raised ZeroDivisionError: division by zero"
    said, _, log_file = line.partition("; full traceback: ")
    assert said == f"{raised} ({place})"
    assert [*(own_home / "logs").iterdir()] == [Path(log_file)]
    log = Path(log_file).read_text()
    assert "Traceback (most recent call last)" in log
    assert f'File "{train}", line' in log
    assert log.splitlines()[0].endswith(f"autobatch {' '.join(words)}")
    assert not (tmp_path / "out").exists(), "nothing was written"
    monkeypatch.setenv("AUTOBATCH_HOME", str(train))
    assert one_line(Ran(cli.run(words), "", capsys.readouterr().err), 2).endswith("add --verbose")


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


SLOW = """
import time
class Slow(TensorDataset):
    def __getitem__(self, index):
        time.sleep(0.002)
        return super().__getitem__(index)
def workload():
    return small(train_data=Slow(*data().tensors))
"""


@pytest.mark.program
@pytest.mark.skipif(sys.platform != "linux", reason="workers end with their parent on Linux")
def test_a_stopped_run_goes_on(tmp_path: Path, train: Path) -> None:
    """It prints how. The signal comes to the whole group, with the loader workers."""
    train.write_text(SMALL + SLOW)
    words = (*FIT, "--out", "out", "--workers", 2, "--steps", 1000)
    process = started(tmp_path, *words, until=tmp_path / "out" / "metrics.jsonl")
    os.killpg(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    answer = "autobatch: stopping and saving a checkpoint"  # unless the step ended at once
    line = one_line(Ran(process.returncode, "", re.sub(f"^{answer}.*\n", "", err)), 143)
    (checkpoint,) = (tmp_path / "out" / "checkpoints").iterdir()
    assert f"with checkpoint out/checkpoints/{checkpoint.name}" in line
    again = line.partition("Resume with: autobatch ")[2].split()
    assert again[-1] == "--resume"
    steps = str(int(checkpoint.name.removeprefix("step-")) + 3)
    again[again.index("--steps") + 1] = steps
    resumed = autobatch(tmp_path, *again, "--json", "--quiet")
    assert resumed.code == 0
    assert resumed.json["training"]["optimizer_steps"] == int(steps)
    assert resumed.json["training"]["resumed_from"] == f"out/checkpoints/{checkpoint.name}"


@pytest.mark.program
@pytest.mark.skipif(sys.platform != "linux", reason="other systems start workers in another way")
def test_workers_send_although_the_folder_for_temporary_files_has_a_long_path(
    tmp_path: Path, train: Path
) -> None:
    """A socket below it would have a name that no system takes, and a worker without one sends nothing."""
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    done = autobatch(tmp_path, *FIT, "--steps", 2, "--workers", 1, TMPDIR=str(folder))
    assert done.code == 0, done.err


SLEEPY = """
import pathlib, time
def sleepy(model, batch):
    pathlib.Path("asleep").write_text("now")
    time.sleep(600)
def sleeps():
    return small(loss=sleepy)
"""


@pytest.mark.program
def test_a_stopped_probe_leaves_no_process_behind(tmp_path: Path, train: Path) -> None:
    train.write_text(SMALL + SLEEPY)
    process = started(tmp_path, "probe", "train.py:sleeps", *BUDGET, until=tmp_path / "asleep")
    os.killpg(process.pid, ENDING[-1])
    _, err = process.communicate(timeout=60)
    assert one_line(Ran(process.returncode, "", err), 143).startswith("terminated; what was saved")
    while is_alive(process.pid):  # until the system has buried the last of them
        time.sleep(0.02)


def is_alive(group: int) -> bool:
    """Return whether a process of the group is alive (not a zombie)."""
    listed = subprocess.run(["ps", "-eo", "pgid=,stat="], capture_output=True, text=True, check=True)
    rows = [line.split() for line in listed.stdout.splitlines()]
    return any(row[0] == str(group) and not row[1].startswith("Z") for row in rows)


@pytest.mark.parametrize(
    "words", [("--version",), pytest.param((*FIT, "--steps", 2, "--out", "out"), marks=pytest.mark.program)]
)
@pytest.mark.usefixtures("train")
def test_a_command_runs_with_closed_outputs(words: tuple[object, ...], tmp_path: Path) -> None:
    done = run(tmp_path, ["sh", "-c", f"exec {' '.join(command(*words))} >&- 2>&-"])
    assert done.code == 0
    assert (tmp_path / "out" / "model.safetensors").exists() == ("fit" in words)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
def test_a_full_standard_output_is_one_line(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command("--help"), stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    line = one_line(Ran(done.returncode, "", done.stderr), 1)
    assert line.startswith("standard output: No space left on device")


LIBRARY = """
import asyncio
{small}
class Local:
    def __reduce__(self):
        raise TypeError("cannot be pickled")

def run():
    import autobatch
    local = Local()
    mine = small(loss=lambda model, batch: loss(model, batch) if local else None)
    result = autobatch.fit(mine, target_batch=8, steps=3, trials=1, device="cpu", memory_budget="64MiB")
    assert result.training.optimizer_steps == 3
    return result.model(torch.zeros(1, 4)).shape

async def in_a_loop():
    return run(), await asyncio.to_thread(run)
"""


@pytest.mark.program
def test_a_library_call_works_with_objects_that_cannot_be_pickled(tmp_path: Path) -> None:
    """In an event loop, and in a thread beside it."""
    code = LIBRARY.replace("{small}", SMALL) + "\nprint(asyncio.run(in_a_loop()))\n"
    # As a notebook runs its cells: in __main__, from no file.
    program = f"exec(compile({code!r}, '<cell 1>', 'exec'), globals())"
    done = run(tmp_path, [sys.executable, "-W", "error", "-c", program])
    assert done.code == 0, done.err
    assert "torch.Size([1, 1])" in done.out
    # A second run says that it goes on with the study of the first.
    assert all(line.startswith("an earlier run") for line in done.err.splitlines())
