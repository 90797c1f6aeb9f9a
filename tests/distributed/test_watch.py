"""What a rank learns of the others: the first failure, and a signal that leads to no progress."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from torch.distributed import HashStore

from autobatch.distributed.ranks import Launch
from autobatch.distributed.verdict import EarlierVerdict, Verdict, check_earlier_starts, read_verdict
from autobatch.distributed.watch import STOP_S, Activity, SignalDeadline, Watch
from tests.support.signalled import preserved_handlers


def watch_of(store: HashStore, rank: int) -> Watch:
    launch = Launch(rank=rank, world=2, address="here", port=1, host="h", run_id="r")
    keys = ["signs/0", "signs/1"]
    for key in keys:
        store.set(key, "")
    return Watch(launch, store, Activity(), keys)


def test_the_first_verdict_counts(tmp_path: Path) -> None:
    store = HashStore()
    first, second = watch_of(store, 1), watch_of(store, 0)
    for one in (first, second):
        one.enter(tmp_path)
    assert first.fail("memory ran out", 77) is None
    assert second.fail("a rank was lost", 1) == 77
    expected = Verdict(run_id="r", restart=0, rank=1, host="h", code=77, line="memory ran out")
    assert read_verdict(store, 0) == expected
    assert msgspec.json.decode((tmp_path / "verdict.json").read_bytes(), type=Verdict) == expected
    assert read_verdict(store, 1) is None
    for one in (first, second):
        one.close()


@pytest.mark.parametrize(("code", "ends"), [(2, True), (3, True), (77, False), (1, False), (143, False)])
def test_only_what_a_restart_cannot_change_ends_it(code: int, ends: bool) -> None:
    store = HashStore()
    watch = watch_of(store, 1)
    watch.fail("the line", code)
    watch.close()
    check_earlier_starts(store, 0)
    if not ends:
        check_earlier_starts(store, 2)
        return
    with pytest.raises(EarlierVerdict, match="the line") as caught:
        check_earlier_starts(store, 2)
    assert caught.value.exit_code == code


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def deadline(clock: Clock) -> Iterator[SignalDeadline]:
    with preserved_handlers():
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        found = SignalDeadline(clock)
        yield found
        found.arrivals.close()
        assert signal.set_wakeup_fd(-1) == -1


def test_a_signal_counts_from_its_first_arrival(deadline: SignalDeadline, clock: Clock) -> None:
    assert deadline.expired(3) is None
    os.kill(os.getpid(), signal.SIGUSR1)
    assert deadline.expired(3) is None
    clock.now = STOP_S
    os.kill(os.getpid(), signal.SIGTERM)
    assert deadline.expired(3) is None
    clock.now = STOP_S + 0.1
    assert deadline.expired(3) == signal.SIGUSR1
    assert deadline.expired(4) is None, "a wait has ended since"


def test_other_signals_are_not_requests(deadline: SignalDeadline, clock: Clock) -> None:
    os.kill(os.getpid(), signal.SIGHUP)
    assert deadline.expired(0) is None
    clock.now = STOP_S + 9.0
    assert deadline.expired(0) is None


def test_another_library_and_another_thread_keep_the_pipe(clock: Clock) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    try:
        thread = threading.Thread(target=SignalDeadline)
        thread.start()
        thread.join()
        assert SignalDeadline(clock).expired(0) is None
        assert signal.set_wakeup_fd(writer) == writer
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)
