"""Processes of a run with loader workers, stopped by signals and by errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from autobatch import fit
from autobatch.core.signals import stop_on_signals
from autobatch.workload.feed import open_feed
from autobatch.workload.order import GlobalBatchSampler
from tests.support.commandline import SMALL, autobatch, command, environment
from tests.support.feeds import loader_workers
from tests.support.training import Rows, make_workload, points

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SLOW = """
import time, os, random, numpy
class Slow(torch.utils.data.Dataset):
    def __init__(self, data): self.data = data
    def __len__(self): return len(self.data)
    def __getitem__(self, index):
        time.sleep(0.002)
        inputs, targets = self.data[index]
        return inputs + random.random() + float(numpy.random.normal()) + torch.randn(4), targets
def workload():
    return small(train_data=Slow(data()))
"""


OPTIONS: dict[str, Any] = {
    "target_batch": 16,
    "max_micro_batch": 4,
    "trials": 0,
    "device": "cpu",
    "memory_budget": "64MiB",
}


def comes_true(condition: Callable[[], bool], seconds: float = 120.0) -> bool:
    """Wait for a condition; return False after a time limit."""
    deadline = time.monotonic() + seconds
    while not (is_true := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_true


def have_ended(processes: list[int]) -> bool:
    """Check that processes are gone or zombies."""
    return all(state_of(pid) in (None, "Z") for pid in processes)


def has_lines(path: Path, lines: int) -> bool:
    return path.exists() and len(path.read_text().splitlines()) >= lines


def state_of(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


@LINUX
@pytest.mark.program
def test_a_signal_to_the_whole_group_stops_the_run_with_one_checkpoint(tmp_path: Path) -> None:
    """The resumed run, with other workers, ends with the weights of a run that was never stopped."""
    (tmp_path / "train.py").write_text(SMALL + SLOW)
    words = [word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", value)]
    with subprocess.Popen(
        command("fit", "train.py:workload", "--out", "run", *words, "--steps", 1000, "--workers", 2),
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        metrics = tmp_path / "run" / "metrics.jsonl"
        try:
            assert comes_true(lambda: process.poll() is not None or has_lines(metrics, 3))
            assert process.poll() is None, process.communicate()[1]
            os.killpg(process.pid, signal.SIGTERM)
            _, err = process.communicate(timeout=120)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 143, err
    assert "Traceback" not in err
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step-"))
    options = {**OPTIONS, "steps": step + 3}
    fit(f"{tmp_path / 'train.py'}:workload", out=tmp_path / "run", resume=True, workers=0, **options)
    fit(f"{tmp_path / 'train.py'}:workload", out=tmp_path / "straight", workers=1, **options)
    weights = [tmp_path / folder / "model.safetensors" for folder in ("run", "straight")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@LINUX
@pytest.mark.program
def test_workers_send_although_the_folder_for_temporary_files_has_a_long_path(tmp_path: Path) -> None:
    """A socket below it would have a name that no system takes, and a worker without one sends nothing."""
    (tmp_path / "train.py").write_text(SMALL)
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    asked = [word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", value)]
    more = ("--steps", 2, "--workers", 1)
    done = autobatch(tmp_path, "fit", "train.py:workload", *asked, *more, TMPDIR=str(folder))
    assert done.code == 0, done.err


class Slow(Rows):
    def __getitem__(self, index: int):
        time.sleep(0.05)
        return super().__getitem__(index)


def feed_forever(pipe: int) -> None:
    """Read micro-batches without end, and write to a pipe if a signal came, and the ids of the workers."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # where a second signal leads
    workload = make_workload(train_data=Slow(*points().columns))
    sampler = GlobalBatchSampler(samples=24, target_batch=7, seed=0, steps=10**9)
    with stop_on_signals() as asked, open_feed(workload, sampler, workers=2) as feed:
        for batch in sampler.batches():
            for _ in feed.collated(batch, 7):
                workers = [child.pid for child in loader_workers()]
                os.write(pipe, f"{json.dumps([asked.is_asked, workers])}\n".encode())


@LINUX
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("signals", [[signal.SIGTERM, signal.SIGINT], [signal.SIGKILL]])
def test_the_workers_of_a_killed_run_end_with_it(signals: list[int]) -> None:
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            feed_forever(writable)
        finally:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as lines:
        _, workers = json.loads(lines.readline())
        assert len(workers) == 2
        for number in signals:
            send = os.kill if number == signal.SIGKILL else os.killpg
            send(pid, number)
            # Two signals that wait at once are handled in any order.
            assert number != signal.SIGTERM or any(json.loads(line)[0] for line in islice(lines, 1000))
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signals[-1]
        assert comes_true(lambda: have_ended(workers))
