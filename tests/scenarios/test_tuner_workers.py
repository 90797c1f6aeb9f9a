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
TRIALS = 29
"""Of 32 configurations, so that one of the four fastest is among them in any order of the workers."""
SCRIPT = """
import json, sys, time
from pathlib import Path
from autobatch.core.knobs import SearchAxis
from autobatch.tuning.configuration import Budget, Measurement, StudyLocation
from autobatch.tuning.find_fastest import find_fastest

name, storage, trials = sys.argv[1], sys.argv[2], int(sys.argv[3])
choices = {"a": (0, 1, 2, 3), "b": ("x", "y"), "c": (False, True), "d": ("m", "n")}
axes = [SearchAxis(*pair) for pair in choices.items()]

def measure(values):
    if name == "victim":
        Path(storage).with_name("caught").touch()
        time.sleep(600)
    time.sleep(0.05)
    return Measurement(1000.0 + 100 * values["a"] + 50 * (values["b"] == "y"), 8)

place = StudyLocation("shared", storage, {"model": "m"})
found = find_fastest(measure, measure, axes, budget=Budget(trials), seed=0, place=place)
print(json.dumps([found.tuning.trials, found.tuning.best]))
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
    ended = open_journal(tmp_path / "study.log", "shared").trials
    done = [trial for trial in ended if trial.state is TrialState.COMPLETE]
    distinct = {tuple(sorted(trial.params.items())) for trial in done}
    # Each of the others may have been running a last trial when the count was reached.
    assert TRIALS <= len(distinct) <= TRIALS + WORKERS - 2
    default = {"a": 0, "b": "x", "c": False, "d": "m"}
    assert default in [trial.params for trial in done]
    for count, best in answers:
        assert count <= TRIALS + WORKERS - 2
        assert (best["a"], best["b"]) == (3, "y")
