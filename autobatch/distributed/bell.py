"""The failure bell: the first rank that fails tells all others, and they leave at once with its exit code.

Without it, torchrun ends the survivors of a failure only 30 seconds later, because a rank that waits in a
collective cannot answer a signal. The bell is a key in the store that torchrun keeps. A thread of each rank
reads it, and ends the process whatever the main thread waits for. The first verdict counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from autobatch.core.errors import AutobatchError
from autobatch.core.files import write_atomic
from autobatch.core.records import Record
from autobatch.distributed.launch import VERDICT

POLL_S = 0.25
"""Seconds between two looks at the bell."""
MISSES = 4
"""Failed looks in a row after which the store counts as gone."""
OUT = "out"
"""Key of the store that keeps the folder of the run."""
FINAL_CODES = (2, 3)
"""Exit codes that a restart cannot change."""


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that the bell needs."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys exist."""

    def get(self, key: str, /) -> bytes:
        """Return a value."""

    def set(self, key: str, value: str, /) -> None:
        """Set a value."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key that has the expected value, or none; return its value now."""


class Verdict(Record, frozen=True, kw_only=True):
    """The end of a run over ranks and its cause; ``verdict.json`` in its folder."""

    run_id: str
    restart: int
    rank: int
    host: str
    code: int
    """Exit code, which torchrun replaces by 1."""
    line: str


def write_verdict(out: Path, verdict: Verdict) -> None:
    """Write a verdict into the folder of a run, if the folder exists and takes it."""
    if out.is_dir():
        with suppress(OSError):
            write_atomic(out / VERDICT, msgspec.json.format(msgspec.json.encode(verdict)))


class EarlierVerdict(AutobatchError):  # noqa: N818 - an event, not a fault
    """An earlier start of the run ended in a way that a restart cannot change."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.line)
        self.exit_code = verdict.code


class Bell:
    """The bell of one start of a run.

    Args:
        store: the store of the run.
        restart: number of the start.
    """

    def __init__(self, store: Store, restart: int) -> None:
        self._store = store
        self._key = _key(restart)
        self._closed = threading.Event()

    def ring(self, verdict: Verdict) -> Verdict:
        """Ring the bell, and return the first verdict, which may be another rank's."""
        # The thread must not end this process while it reports its own failure.
        self._closed.set()
        found = self._store.compare_set(self._key, "", msgspec.json.encode(verdict).decode())
        return msgspec.json.decode(found, type=Verdict)

    def watch(
        self,
        client: Store,
        connect: Callable[[], Store],
        leave: Callable[[Verdict | None], None],
        look: Callable[[Store], None] = lambda _: None,
    ) -> None:
        """Start the thread that listens to the bell.

        Args:
            client: a client of the store, for the thread alone.
            connect: opens another one after a failure, or raises soon.
            leave: ends the process after a verdict; None if the store is gone.
            look: called with the store every time.
        """
        thread = threading.Thread(
            target=self._listen, args=(client, connect, leave, look), name="bell", daemon=True
        )
        thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._closed.set()

    def _listen(
        self,
        client: Store,
        connect: Callable[[], Store],
        leave: Callable[[Verdict | None], None],
        look: Callable[[Store], None],
    ) -> None:
        misses = 0
        store: Store | None = client
        while not self._closed.wait(POLL_S):
            try:
                store = store or connect()
                verdict = _read(store, self._key)
                look(store)
                misses = 0
            except RuntimeError:  # the store does not answer
                store, verdict, misses = None, None, misses + 1
            if (verdict is not None or misses >= MISSES) and not self._closed.is_set():
                leave(verdict)
                return


def check_earlier_starts(store: Store, restart: int) -> None:
    """Check that no earlier start of the run ended in a way that a restart cannot change.

    Raises:
        EarlierVerdict: one did.
    """
    for earlier in range(restart):
        verdict = read_verdict(store, earlier)
        if verdict is not None and verdict.code in FINAL_CODES:
            raise EarlierVerdict(verdict)


def read_verdict(store: Store, restart: int) -> Verdict | None:
    """Return the first verdict of a start of the run; None if no rank rang the bell."""
    return _read(store, _key(restart))


def _key(restart: int) -> str:
    return f"verdict/{restart}"


def _read(store: Store, key: str) -> Verdict | None:
    return msgspec.json.decode(store.get(key), type=Verdict) if store.check([key]) else None
