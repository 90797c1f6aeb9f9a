"""Program that trains in child processes, kills them at random, and resumes them, over and over.

    python -m tests.support.killing FOLDER KILLS SEED [fed]

With ``fed``, each child has another number of loader workers and seeds its samples one by one. The children
are forked, so that none has to import torch. This process never runs backward, after which a fork cannot
train.
"""

from __future__ import annotations

import ctypes
import multiprocessing.util
import os
import random
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import safetensors.torch  # noqa: F401, a writer imports it: most kills would hit that
import torch

from autobatch import Progress
from autobatch.training.checkpoint import list_checkpoints, load_newest
from autobatch.training.resume import restore_loop
from tests.support.feeds import fed_loop
from tests.support.kinds import run_of
from tests.support.runs import settings, train
from tests.support.training import averages, fingerprint

STEPS = 40
PR_SET_CHILD_SUBREAPER = 36
"""The option of Linux's prctl that adopts orphans."""


class Acknowledging(Progress):
    """Progress that writes down the last step with a checkpoint."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def stepped(self, step, of) -> None:
        os.write(self._file, f"{step.step - 1}\n".encode())


def resume(folder: Path, workers: int | None) -> None:
    """Resume from the newest checkpoint or start; write the fingerprint of weights and averages."""
    workload, options = run_of("augmented, averaged")
    saved = folder / "checkpoints"
    resumed = load_newest(saved) if list_checkpoints(saved) else None
    run = settings(folder, resumed=resumed, checkpoint_every=1, keep_last=2)
    fed = {"workers": workers or 0, "sample_seeds": workers is not None, "steps": STEPS}
    with fed_loop(workload, **fed, **options) as loop:
        if resumed is not None:
            restore_loop(loop, resumed, same_hardware=True)
        train(loop, run, Acknowledging(folder / "acknowledged"))
    (folder / "done").write_text(fingerprint(loop.train_state.model, *averages(loop.train_state.average)))


def forked(folder: Path, workers: int | None) -> int:
    """Start a child, and return its process id."""
    folder.mkdir(exist_ok=True, parents=True)
    pid = os.fork()
    if pid == 0:
        status = 1
        os.dup2(2, 1)  # whoever reads this program does not wait for a worker that outlives a killed child
        try:
            resume(folder, workers)
            status = 0
        finally:
            os._exit(status)
    return pid


def check_killed(folder: Path) -> None:
    """Check that no acknowledged checkpoint is lost."""
    path = folder / "acknowledged"
    acknowledged = int(path.read_text().split()[-1]) if path.exists() and path.stat().st_size else 0
    saved, step = folder / "checkpoints", 0
    if list_checkpoints(saved):
        newest = load_newest(saved)
        step = newest.state["counters"]["batches_seen"]
        assert not newest.passed_over, newest.passed_over
    assert step >= acknowledged, f"{step} < {acknowledged}"


def kill(root: Path, kills: int, seed: int, fed: bool = False) -> tuple[int, int]:
    """Kill so many children, and compare each run that ends with one that nothing disturbed; count both.

    Every loader worker of a killed child, whose parent this process is then, must end too.
    """
    torch.set_num_threads(1)
    if sys.platform == "linux":
        assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1) == 0
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # the first optimizer imports many modules
    multiprocessing.util.get_temp_dir()  # each killed child would leave one of its own
    draw, start = random.Random(seed), time.monotonic()
    assert os.waitpid(forked(root / "straight", 0 if fed else None), 0)[1] == 0
    whole = time.monotonic() - start
    killed, ended, folder = 0, 0, root / "killed"
    while killed < kills or not ended:
        pid = forked(folder, draw.choice([0, 1, 2]) if fed else None)
        if killed < kills:
            time.sleep(draw.uniform(0, whole / 2))
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        if os.WIFSIGNALED(status):
            killed += 1
            check_killed(folder)
        else:
            assert status == 0
            assert (folder / "done").read_text() == (root / "straight" / "done").read_text()
            assert len((folder / "metrics.jsonl").read_text().splitlines()) == STEPS
            assert not [path for path in (folder / "checkpoints").iterdir() if "tmp" in path.name]
            ended += 1
            shutil.rmtree(folder)
    deadline = time.monotonic() + 60
    with suppress(ChildProcessError):  # none is left
        while True:
            os.waitpid(-1, os.WNOHANG)
            assert time.monotonic() < deadline, "a loader worker outlives its killed parent"
            time.sleep(0.05)
    return killed, ended


if __name__ == "__main__":
    folder, kills, seed, *fed = sys.argv[1:]
    killed, ended = kill(Path(folder), int(kills), int(seed), bool(fed))
    sys.stdout.write(f"{killed} killed, {ended} ended with the weights of the run that was not\n")
