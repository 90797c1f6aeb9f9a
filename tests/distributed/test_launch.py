"""Ranks that this process starts: their environment, exit codes, restarts and signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

import pytest

from autobatch.distributed.launch import open_store, start_ranks
from tests.support.commandline import autobatch, command, environment

pytestmark = [pytest.mark.distributed, pytest.mark.skipif(sys.platform == "win32", reason="a shell script")]
WORKLOAD = """
import os, pathlib, signal, time, torch
from torch.nn.functional import cross_entropy
import autobatch
from tests.support.training import points

RANK, START = os.environ.get("RANK", "0"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
STEPS = pathlib.Path("run/metrics.jsonl")

def steps():
    return STEPS.read_text().count("\\n") if STEPS.exists() else 0

def loss(model, batch):
    EXTRA
    return cross_entropy(model(batch[0]), batch[1])

def workload():
    return autobatch.Workload(
        model=lambda: torch.nn.Linear(5, 3).double(), train_data=points(64), loss=loss, learning_rate=0.1,
        optimizer=lambda params, rate: torch.optim.SGD(params, lr=rate),
    )
"""
FIT = [
    "fit", "work.py", "--out", "run", "--target-batch", "14", "--memory-budget", "1GiB", "--ranks", "2",
    "--trials", "0",
]  # fmt: skip


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that starts two ranks of a shell script, and returns their end and their output."""

    def start(body: str) -> tuple[Any, list[str]]:
        script = tmp_path / "python"
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        monkeypatch.chdir(tmp_path)
        ended = start_ranks(["fit", "x.py"], 2)
        log = tmp_path / "log"
        return ended, sorted(log.read_text().splitlines()) if log.exists() else []

    return start


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one address for themselves")
def test_the_store_answers_one_address_only() -> None:
    store = open_store()
    store.set("key", "value")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), timeout=5)
    assert store.get("key") == b"value"


def test_every_rank_gets_its_place_and_the_words(ranks) -> None:
    ended, lines = ranks('echo "$RANK $LOCAL_RANK $WORLD_SIZE $TORCHELASTIC_RESTART_COUNT $*" >> log')
    assert ended == (0, None)
    assert lines == [f"{rank} {rank} 2 0 -P -m autobatch fit x.py" for rank in (0, 1)]


WAITS = "until grep -q 0 log; do sleep 0.02; done"  # else rank 0 may be ended before it has begun
START = "$TORCHELASTIC_RESTART_COUNT"


@pytest.mark.parametrize(
    ("body", "code", "lines"),
    [
        *(
            (f"echo $RANK >> log; [ $RANK = 0 ] && exec sleep 20; {WAITS}; exit {code}", code, ["0", "1"])
            for code in (1, 2, 3)
        ),
        (
            f"[ $RANK = 0 ] || exec sleep 0.1; echo {START} >> log; [ {START} = 2 ] || exit 77",
            0,
            ["0", "1", "2"],
        ),
        ("[ $RANK = 0 ] || exec sleep 20; echo $RANK >> log; exit 77", 77, ["0"] * 4),
    ],
)
def test_the_exit_code_is_that_of_a_rank_and_only_77_restarts(
    ranks, body: str, code: int, lines: list[str]
) -> None:
    assert ranks(body) == ((code, None), lines)


@pytest.mark.parametrize("name", ["KILL", "SEGV"])
def test_a_killed_rank_is_named(ranks, name: str) -> None:
    """The exit code is 1 whatever the others make of the SIGTERM that they get, or of the loss."""
    ended, _ = ranks(
        f"[ $RANK = 0 ] || kill -{name} $$; trap 'exit 143' TERM; while true; do sleep 0.05; done"
    )
    assert ended.code == 1
    assert ended.line is not None
    assert ended.line.startswith(f"rank 1 was ended by SIG{name}")


def test_a_signal_is_passed_on_and_decides_the_exit_code(ranks, tmp_path: Path) -> None:
    def stop() -> None:
        while not (tmp_path / "log").exists() or (tmp_path / "log").read_text().count("ready") < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=stop, daemon=True).start()
    ended, lines = ranks(
        "trap 'echo stopped >> log; exit 130' INT; echo ready >> log; while true; do sleep 0.05; done"
    )
    assert ended == (130, None)
    assert lines == ["ready", "ready", "stopped", "stopped"]


@pytest.mark.parametrize("ready", [0, 1])
def test_a_signal_while_the_ranks_start_ends_all_of_them(
    ranks, monkeypatch: pytest.MonkeyPatch, ready: int
) -> None:
    started = []

    def open_and_signal(*args: object, **more: object) -> subprocess.Popen[bytes]:
        started.append(opened(*args, **more))
        if len(started) == ready + 1:
            signal.raise_signal(signal.SIGTERM)
        return started[-1]

    opened = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", open_and_signal)
    before = signal.getsignal(signal.SIGTERM)
    ended, _ = ranks("exec sleep 20")
    assert ended == (143, None)
    assert [process.returncode for process in started] == [-signal.SIGTERM] * 2
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_between_two_starts_is_the_end(ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_and_signal(*_: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("autobatch.distributed.watch.read_verdict", read_and_signal)
    ended, lines = ranks("[ $RANK = 0 ] || exec sleep 20; echo $RANK >> log; exit 77")
    assert ended == (143, None)
    assert lines == ["0"]


def fit(folder: Path, *options: str, extra: str = "pass"):
    (folder / "work.py").write_text(WORKLOAD.replace("EXTRA", extra))
    return autobatch(folder, *FIT, *options, timeout=240, PYTHONPATH=str(Path(__file__).parents[2]))


@pytest.mark.slow
def test_out_of_memory_in_the_step_starts_the_ranks_again_in_smaller_micro_batches(tmp_path: Path) -> None:
    extra = (
        "if RANK == '1' and START == '0' and steps() == 2: "
        "torch.optim.SGD.step = lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError('no memory'))"
    )
    options = ("--steps", "5", "--max-micro-batch", "4", "--checkpoint-every", "1", "--json")
    ran = fit(tmp_path, *options, extra=extra)
    assert ran.code == 0, ran.err
    assert ran.json["plan"]["world_size"] == 2
    assert ran.json["training"]["resumed_from"] is not None
    assert "out of memory" in ran.err


@pytest.mark.slow
def test_a_killed_rank_ends_all_and_the_user_is_told(tmp_path: Path) -> None:
    kills = "RANK == '1' and steps() > 3 and os.kill(os.getpid(), 9)"
    options = ("--steps", "40", "--checkpoint-every", "1")
    ran = fit(tmp_path, *options, extra=kills)
    assert ran.code == 1
    line = "rank 1 was ended by SIGKILL: the system may be out of memory; --resume continues from the newest"
    assert line in ran.err
    verdict = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert (verdict["rank"], verdict["code"]) == (1, 1)
    assert verdict["line"].startswith(line)
    again = fit(tmp_path, *options, "--resume")
    assert again.code == 0, again.err
    assert not (tmp_path / "run" / "verdict.json").exists()


def begin_run(folder: Path, *, pause: str, steps: int, stderr: int | IO[str]) -> subprocess.Popen[str]:
    """Start a run whose loss pauses, and go on beside it."""
    (folder / "work.py").write_text(WORKLOAD.replace("EXTRA", pause))
    return subprocess.Popen(
        command(*FIT, "--steps", str(steps)),
        cwd=folder,
        env=environment(folder, PYTHONPATH=str(Path(__file__).parents[2])),
        stderr=stderr,
        stdout=subprocess.DEVNULL,
        text=True,
    )


@pytest.mark.slow
def test_a_signal_leaves_one_checkpoint(tmp_path: Path) -> None:
    process = begin_run(tmp_path, pause="time.sleep(0.1)", steps=900, stderr=subprocess.PIPE)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 2):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1
    assert json.loads((tmp_path / "run" / "verdict.json").read_text())["code"] == 130
    assert err.replace("autobatch: stopping after this step", "").count("autobatch: ") == 1


@pytest.mark.slow
def test_a_second_signal_leaves_no_checkpoint_although_native_code_runs(tmp_path: Path) -> None:
    pause = "steps() and torch.linalg.eigvals(torch.rand(2000, 2000))"
    process = begin_run(tmp_path, pause=pause, steps=900, stderr=subprocess.PIPE)
    while process.poll() is None and not (tmp_path / "run" / "metrics.jsonl").exists():
        time.sleep(0.1)
    for _ in range(2):
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_ranks_end_if_what_started_them_is_killed(tmp_path: Path) -> None:
    with (tmp_path / "errors").open("w") as errors:
        process = begin_run(tmp_path, pause="time.sleep(0.05)", steps=100_000, stderr=errors)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and not metrics.exists():
        time.sleep(0.1)
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    assert len(ranks) == 2
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{rank}").exists() for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = [int(rank) for rank in ranks if Path(f"/proc/{rank}").exists()]
    for rank in left:
        os.kill(rank, signal.SIGKILL)
    assert not left
    lines = (tmp_path / "errors").read_text().splitlines()
    assert {line.partition(":")[0] for line in lines if "is gone" in line} == {"autobatch"}
    assert not [line for line in lines if line.startswith(("frame #", "[rank"))]
