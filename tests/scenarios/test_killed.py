"""A run that is killed again and again ends with the same weights as an uninterrupted run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autobatch.training.run_folder import claim_folder


def run(folder: Path, kills: int, *words: str) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.killing", str(folder), str(kills), "1", *words],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.program
@pytest.mark.parametrize(("kills", "words"), [(20, ()), (6, ("fed",))])
def test_kills_lose_no_acknowledged_checkpoint_whatever_the_number_of_loader_workers(
    kills: int, words: tuple[str, ...], tmp_path: Path
) -> None:
    result = run(tmp_path, kills, *words)
    assert result["killed"] >= kills
    assert result["finished"] >= 1


LOADING = """
import ctypes, os, sys, time
from pathlib import Path
from autobatch.core.signals import PR_SET_PDEATHSIG
from autobatch.training.run_folder import claim_folder
from autobatch.workload.feed import open_feed
from tests.support.training import make_loop, make_workload

class Slow:
    def __len__(self):
        return 24

    def __getitem__(self, index):
        # This worker outlives its parent for a while, as one does that the kernel has not killed yet.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)
        os.write(1, b"fetching\\n")
        time.sleep(600)

workload = make_workload(train_data=Slow())
loop = make_loop(workload)
with (
    claim_folder(Path(sys.argv[1])),
    open_feed(workload, loop.sampler, workers=2) as feed,
):
    next(feed.collated(next(loop.sampler.batches(0)), 5))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
def test_the_folder_of_a_killed_run_with_loader_workers_is_free_at_once(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LOADING, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as run:
        try:
            assert run.stdout is not None
            assert run.stdout.readline() == "fetching\n"
            run.kill()
            run.wait()
            with claim_folder(tmp_path):
                os.killpg(run.pid, 0)  # a worker is still there
        finally:
            os.killpg(run.pid, signal.SIGKILL)
