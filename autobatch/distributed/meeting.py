"""A group of the ranks' child processes, which try a batch together and can be thrown away.

The children meet at the store of the run under a name of their own. If one of them fails, it says so there,
and the others end at once, whatever they wait for.
"""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from autobatch.distributed.launch import OTHER_FAILED
from autobatch.distributed.messages import Messages, as_rank_lost

TIMEOUT = datetime.timedelta(seconds=120)
"""Longest wait of a child for the others."""
LOOK_S = 0.2
"""Time between two looks at the store."""
GRACE_S = 1.0
"""Time in which a child may answer after another has failed, before it ends itself."""
FAILED = "failed"


class MeetingPlace(NamedTuple):
    """The store of a run, and the name under which children meet there: plain values."""

    address: str
    port: int
    name: str
    """Differs from one meeting to the next."""
    rank: int
    world: int


class Children(Messages):
    """Messages of the child of one rank to those of the others."""

    def __init__(self, place: MeetingPlace, store: Store) -> None:
        super().__init__(place.rank, place.world, None)
        self._store = store
        self._over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def fail(self) -> None:
        """Tell the others that this child has failed."""
        self._over.set()
        self._store.set(FAILED, "1")

    def end(self) -> None:
        """Stop watching."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            if self._store.check([FAILED]):
                if not self._over.wait(GRACE_S):
                    os._exit(OTHER_FAILED)
                return


def forget_group() -> list[object]:
    """Forget the process group that this copy of a rank inherited, so that it can make its own.

    Returns:
        What must live until the copy ends: its end would wait for threads that the copy does not have.
    """
    if not dist.is_initialized():
        return []
    world = dist.distributed_c10d._world
    kept: list[object] = [dist.group.WORLD, *world.pg_map]
    # This is what destroy_process_group does, which waits for those threads too.
    dist.distributed_c10d._update_default_pg(None)
    for known in (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
        world.tags_to_pg,
        world.pg_coalesce_state,
    ):
        known.clear()
    dist.distributed_c10d._unregister_all_process_groups()  # type: ignore[attr-defined]
    world.group_count = 0
    return kept


@contextmanager
def met(place: MeetingPlace) -> Iterator[Children]:
    """Be one of the children that meet within the block, in place of any group that this process has.

    Raises:
        RankLost: another child has ended.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    with as_rank_lost("meet the other ranks' children"):
        base = TCPStore(place.address, place.port, None, False, timeout=TIMEOUT, wait_for_workers=False)
        store = PrefixStore(f"children/{place.name}", base)
        # A connection of its own, because the main thread may wait in the other.
        watched = TCPStore(place.address, place.port, None, False, timeout=TIMEOUT, wait_for_workers=False)
        group = PrefixStore("group", store)
        dist.init_process_group("gloo", store=group, rank=place.rank, world_size=place.world, timeout=TIMEOUT)
    children = Children(place, PrefixStore(f"children/{place.name}", watched))
    try:
        yield children
    except BaseException:
        children.fail()
        raise
    finally:
        children.end()
        dist.destroy_process_group()
