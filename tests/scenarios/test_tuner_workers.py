"""A study that several processes share, one of which is killed during a trial."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from tests.support.commandline import environment
from tests.support.trials import open_journal

WORKERS = 4
TRIALS = 24
SCRIPT = """
import json, sys, time
from pathlib import Path
from autobatch.core.knobs import SearchAxis
from tests.support.trials import FakeTrials, search

name, storage, trials = sys.argv[1], sys.argv[2], int(sys.argv[3])
choices = {"a": (0, 1, 2, 3), "b": ("x", "y"), "c": (False, True), "d": ("m", "n")}

def speed(values):
    if name == "victim" and values.get("a", 0):
        Path(storage).with_name("caught").touch()
        time.sleep(600)
    time.sleep(0.01)
    return 1000.0 + 100 * values.get("a", 0) + 50 * ("b" in values)

axes = [SearchAxis(*pair) for pair in choices.items()]
found = search(FakeTrials(speed), axes, budget=trials, storage=storage)
print(json.dumps([found.trials, found.best]))
"""


def start(folder: Path, name: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", SCRIPT, name, str(folder / "study.log"), str(TRIALS)]
    return subprocess.Popen(
        words, cwd=folder, env=environment(folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def answer(worker: subprocess.Popen[str]) -> Any:
    out, err = worker.communicate(timeout=240)
    assert worker.returncode == 0, err
    return json.loads(out)


@pytest.mark.program
@pytest.mark.distributed
def test_four_workers_share_a_study_and_one_that_is_killed_does_not_stop_it(tmp_path: Path) -> None:
    victim = start(tmp_path, "victim")
    others = []
    try:
        deadline = time.monotonic() + 240
        while not (tmp_path / "caught").exists():
            assert victim.poll() is None, victim.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        others = [start(tmp_path, f"worker {number}") for number in range(WORKERS - 1)]
        victim.send_signal(signal.SIGKILL)
        victim.communicate()
        answers = [answer(worker) for worker in others]
    finally:
        for worker in (victim, *others):
            worker.kill()
            worker.communicate()
    ended = open_journal(tmp_path / "study.log").trials
    done = [trial for trial in ended if trial.state is TrialState.COMPLETE]
    # Each of the others may have been running a last trial when the count was reached.
    assert TRIALS <= len(done) <= TRIALS + WORKERS - 2
    assert [trial.state for trial in ended].count(TrialState.RUNNING) == 1, "that of the killed process"
    for _, best in answers:
        assert (best["a"], best["b"]) == (3, "y")
