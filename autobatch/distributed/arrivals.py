"""The ranks that wait for each other in a step, so that one that never comes can be named.

A collective cannot tell who is missing. So each rank counts the meetings that it has come to, and the thread
of the bell publishes the number. A rank that has waited for too long compares the numbers of all.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from autobatch.distributed.bell import Store


class Arrivals:
    """The meetings of one rank with all others.

    Args:
        rank: this rank.
        world: number of ranks.
        restart: number of the start.
        clock: returns seconds.
    """

    def __init__(
        self, rank: int, world: int, restart: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit_s = float("inf")
        """Longest wait."""
        self._rank = rank
        self._keys = [f"arrived/{restart}/{one}" for one in range(world)]
        self._clock = clock
        self._count = 0
        self._since: float | None = None
        self._published = 0

    def arrive(self) -> None:
        """Count a meeting to which this rank has come."""
        self._count += 1
        self._since = self._clock()

    def leave(self) -> None:
        """End the wait."""
        self._since = None

    def look(self, store: Store) -> str | None:
        """Publish the meetings of this rank; return who is missing in words, None if nobody has to be named.

        Runs in another thread than `arrive` and `leave`.
        """
        count, since = self._count, self._since
        if count != self._published:
            store.set(self._keys[self._rank], str(count))
            self._published = count
        if since is None or self._clock() - since <= self.limit_s:
            return None
        known = [int(store.get(key)) if store.check([key]) else 0 for key in self._keys]
        missing = [str(rank) for rank, other in enumerate(known) if other < count]
        if not missing:
            return None
        who = f"rank {missing[0]} lets" if len(missing) == 1 else f"ranks {', '.join(missing)} let"
        return (
            f"{who} the other ranks wait for more than the --collective-timeout of {self.limit_s:g} s: it "
            "hangs, or its step takes that long. Look at its process, or raise --collective-timeout"
        )
