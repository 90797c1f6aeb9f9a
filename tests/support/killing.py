"""Program that trains in child processes, kills them at random, and resumes them, over and over.

    python -m tests.support.killing FOLDER KILLS SEED [fed]

With ``fed``, each child has another number of loader workers and seeds its samples one by one. The children
are forked, so that none has to import torch. This process never runs backward, after which a fork cannot
train. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

from autobatch.core.progress import Progress
from autobatch.training.checkpoint import clean_leftovers, load_newest
from autobatch.training.loop_state import restore_loop
from autobatch.training.run import RunSettings, train
from autobatch.training.run_folder import CHECKPOINTS, METRICS
from autobatch.workload.loader import open_feed
from tests.support.kinds import RUNS
from tests.support.training import fingerprint, make_loop

STEPS = 40


class Acknowledging(Progress):
    """Progress that writes down the last step with a checkpoint."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def stepped(self, step, of) -> None:
        os.write(self._file, f"{step.step - 1}\n".encode())


def child(folder: Path, workers: int | None) -> None:
    """Resume from the newest checkpoint or start; write the fingerprint of weights and averages."""
    workload, options = RUNS["augmented, averaged"]()
    loop = make_loop(workload, target_batch=7, micro_batch=3, steps=STEPS, **options)
    clean_leftovers(folder / CHECKPOINTS)
    resumed = load_newest(folder / CHECKPOINTS)
    if resumed is not None:
        restore_loop(loop, resumed.state, same_hardware=True)
    settings = RunSettings(out=folder, checkpoint_every=1, keep_last=2, facts={}, resume_hint="")
    with open_feed(
        workload, loop.sampler.batches, seed=0, workers=workers or 0, sample_seeds=workers is not None
    ) as loop.feed:
        train(loop, settings, Acknowledging(folder / "acknowledged"), resumed)
    assert loop.train_state.average is not None
    (folder / "done").write_text(fingerprint(loop.train_state.model, *loop.train_state.average.tensors()))


def forked(folder: Path, workers: int | None) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            child(folder, workers)
            status = 0
        finally:
            os._exit(status)
    return pid


def check(folder: Path) -> None:
    """Check that no acknowledged checkpoint is lost."""
    lines = (folder / "acknowledged").read_text().splitlines() if (folder / "acknowledged").exists() else []
    acknowledged = max((int(line) for line in lines), default=0)
    found = load_newest(folder / CHECKPOINTS)
    step = 0 if found is None else found.state["counters"]["batches_seen"]
    assert step >= acknowledged, f"{step} < {acknowledged}"
    assert found is None or not found.passed_over, found.passed_over


def main(root: Path, kills: int, seed: int, *, fed: bool) -> dict[str, object]:
    torch.set_num_threads(1)
    # The first optimizer of a process imports many modules: do it once, not in each child.
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    draw = random.Random(seed)
    straight = root / "straight"
    straight.mkdir(parents=True)
    start = time.monotonic()
    assert os.waitpid(forked(straight, 0 if fed else None), 0)[1] == 0
    whole = time.monotonic() - start
    expected = (straight / "done").read_text()
    killed = finished = 0
    folder = root / "killed"
    while killed < kills or not finished:
        folder.mkdir(exist_ok=True)
        pid = forked(folder, draw.choice([0, 1, 2]) if fed else None)
        if killed < kills:
            time.sleep(draw.uniform(0, whole / 5))
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        if os.WIFSIGNALED(status):
            killed += 1
            check(folder)
            continue
        assert status == 0
        assert (folder / "done").read_text() == expected
        assert len((folder / METRICS).read_text().splitlines()) == STEPS
        assert not [p for p in (folder / CHECKPOINTS).iterdir() if "tmp" in p.name or "trash" in p.name]
        finished += 1
        shutil.rmtree(folder)
    return {"killed": killed, "finished": finished}


if __name__ == "__main__":
    result = main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), fed="fed" in sys.argv[4:])
    sys.stdout.write(json.dumps(result) + "\n")
