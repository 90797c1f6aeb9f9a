"""Processes of a run with loader workers, stopped by signals and by errors."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from itertools import islice
from pathlib import Path

import pytest

from autobatch.core.signals import stop_on_signals
from autobatch.workload.feed import open_feed
from autobatch.workload.order import GlobalBatchSampler
from tests.support.feeds import loader_workers
from tests.support.training import Rows, make_workload, points


def has_ended(pid: int) -> bool:
    """Return whether a process is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
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
        deadline = time.monotonic() + 120
        while not all(map(has_ended, workers)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
