"""The failure bell, over a store in memory."""

from __future__ import annotations

import queue
import threading

import pytest

from autobatch.distributed import bell as bell_module
from autobatch.distributed.bell import Bell, EarlierVerdict, Verdict, check_earlier_starts


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bell_module, "POLL_S", 0.02)


class Store:
    """A store of torch.distributed in one process."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.lock = threading.Lock()

    def check(self, keys: list[str], /) -> bool:
        return all(key in self.content for key in keys)

    def get(self, key: str, /) -> bytes:
        return self.content[key]

    def set(self, key: str, value: str, /) -> None:
        self.content[key] = value.encode()

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        with self.lock:
            if self.content.get(key, b"").decode() == expected:
                self.content[key] = desired.encode()
            return self.content[key]


class Broken(Store):
    def check(self, keys: list[str], /) -> bool:
        raise RuntimeError("connection closed")


def verdict(rank: int = 0, code: int = 77, restart: int = 0) -> Verdict:
    return Verdict(run_id="r", restart=restart, rank=rank, host="h", code=code, line=f"line of {rank}")


def test_the_first_verdict_counts() -> None:
    store = Store()
    assert Bell(store, 0).ring(verdict(1)) == verdict(1)
    assert Bell(store, 0).ring(verdict(0)) == verdict(1)


def test_a_rung_bell_ends_the_others() -> None:
    store = Store()
    heard: queue.Queue[Verdict | None] = queue.Queue()
    Bell(store, 0).watch(store, lambda: store, heard.put)
    Bell(store, 0).ring(verdict(1))
    assert heard.get(timeout=20) == verdict(1)


def test_a_bell_of_another_start_is_not_heard() -> None:
    store = Store()
    Bell(store, 0).ring(verdict(1))
    heard: queue.Queue[Verdict | None] = queue.Queue()
    bell = Bell(store, 1)
    bell.watch(store, lambda: store, heard.put)
    with pytest.raises(queue.Empty):
        heard.get(timeout=0.2)
    bell.close()


def test_a_rank_leaves_if_the_store_is_gone() -> None:
    heard: queue.Queue[Verdict | None] = queue.Queue()
    Bell(Store(), 0).watch(Broken(), Broken, heard.put)
    assert heard.get(timeout=20) is None


def test_a_rank_that_rings_does_not_hear_itself() -> None:
    store = Store()
    heard: queue.Queue[Verdict | None] = queue.Queue()
    bell = Bell(store, 0)
    bell.watch(store, lambda: store, heard.put)
    bell.ring(verdict())
    with pytest.raises(queue.Empty):
        heard.get(timeout=0.2)


@pytest.mark.parametrize(("code", "ends"), [(2, True), (3, True), (77, False), (1, False), (143, False)])
def test_only_what_a_restart_cannot_change_ends_it(code: int, ends: bool) -> None:
    store = Store()
    Bell(store, 0).ring(verdict(1, code))
    check_earlier_starts(store, 0)
    if not ends:
        check_earlier_starts(store, 2)
        return
    with pytest.raises(EarlierVerdict, match="line of 1") as caught:
        check_earlier_starts(store, 2)
    assert caught.value.exit_code == code
