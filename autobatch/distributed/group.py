"""The ranks of a run as a process group of torch.distributed.

The group is one of gloo on the host. It carries votes and messages, so that none waits for a GPU, and the
tensors of ranks that train on the CPU. GPUs get a group of NCCL besides, from `Group.tensor_group`.
"""

from __future__ import annotations

import atexit
import datetime
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store, TCPStore  # type: ignore[attr-defined]

from autobatch.core.errors import CheckpointError, DoesNotFitError, InputError
from autobatch.core.progress import Broadcast, Progress
from autobatch.device.oom import is_oom
from autobatch.device.select import device_of_rank, gpu_uuid
from autobatch.distributed.ranks import Launch, Ranks, SignsOfLife
from autobatch.distributed.watch import (
    OUT,
    Activity,
    RankLost,
    Watch,
    check_earlier_starts,
    rank_lost,
    ranks_in_words,
)

LAUNCHED_TIMEOUT = datetime.timedelta(days=1)
"""Limit of torch for a collective of ranks that `Watch` watches, which ends them earlier."""
START_S = 300.0
"""Seconds in which all ranks must have started."""
LAUNCHER_S = 10.0
"""Seconds in which the store of a launcher must listen, which opens it before it starts a rank."""
ANSWER_S = 60.0
"""Seconds in which a store answers that has accepted a connection."""
LONGEST_PAUSE_S = 0.25
STARTS = "starts"
"""Key of the store that counts the starts of all ranks."""
ENDED = "ended"
"""Key of the store that counts the starts that ended well."""

T = TypeVar("T")


class Group(Ranks):
    """The processes of a group of torch.distributed.

    Args:
        rank: of this process.
        world: number of ranks.
        messages: the gloo group; None for the default group, which is one of gloo then.
    """

    def __init__(self, rank: int, world: int, messages: ProcessGroup | None) -> None:
        self.rank = rank
        self.world = world
        self.activity = Activity()
        self._messages = messages
        self._tensors: ProcessGroup | None = None

    def waiting(self, act: str) -> AbstractContextManager[None]:
        """See `Activity.waiting`."""
        return self.activity.waiting(act)

    def sign(self, doing: str) -> None:
        """See `Ranks.sign`."""
        self.activity.sign(doing)

    def listener(self, progress: Progress) -> Progress:
        """See `Ranks.listener`."""
        return Broadcast([progress, SignsOfLife(self)])

    def gather(self, value: T) -> list[T]:
        """See `Ranks.gather`."""
        found: list[Any] = [None] * self.world
        with self.waiting("exchange messages"):
            dist.all_gather_object(found, value, group=self._messages)
        return found

    def broadcast(self, value: T) -> T:
        """See `Ranks.broadcast`."""
        sent = [value if self.rank == 0 else None]
        with self.waiting("receive the data of rank 0"):
            dist.broadcast_object_list(sent, 0, group=self._messages)
        return value if self.rank == 0 else sent[0]  # type: ignore[return-value]

    def agree(self, flag: bool) -> bool:
        """See `Ranks.agree`."""
        vote = torch.tensor([int(flag)], device="cpu")
        with self.waiting("vote"):
            dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self._messages)
        return bool(vote)

    def once(self, act: Callable[[], T]) -> T:
        """See `Ranks.once`."""
        answer: Any = None
        error: Exception | None = None
        kind: type[CheckpointError] | type[DoesNotFitError] = CheckpointError
        if self.rank == 0:
            try:
                answer = act()
            except Exception as caught:
                if not (isinstance(caught, CheckpointError) or is_oom(caught)):
                    raise  # its verdict ends the others
                error, kind = caught, DoesNotFitError if is_oom(caught) else CheckpointError
        answer, kind, reason = self.broadcast((answer, kind, None if error is None else str(error)))
        if error is not None:
            raise error
        if reason is not None:
            raise kind(reason)
        return answer  # type: ignore[no-any-return]

    def tensor_group(self, device: torch.device) -> ProcessGroup | None:
        """Return the process group that sums tensors of a device; None for the default, which is gloo's.

        The first sum is made here, so that its memory counts as used.
        """
        if device.type != "cuda":
            return self._messages
        if self._tensors is None:
            torch.cuda.set_device(device)
            with self.waiting("connect the GPUs"):
                self._tensors = dist.new_group(backend="nccl")
                dist.all_reduce(torch.zeros(1, device=device), group=self._tensors)
        return self._tensors

    def start_sum(self, tensor: torch.Tensor) -> Callable[[], object]:
        """Begin to sum a tensor over the ranks in place; return a function that waits for the sum.

        Both are called within `waiting`. Only gloo sums sparse tensors.
        """
        group = self._messages if tensor.is_sparse else self.tensor_group(tensor.device)
        return dist.all_reduce(tensor, group=group, async_op=True).wait  # type: ignore[no-any-return]


class LaunchedGroup(Group):
    """The ranks that a launcher started, which watch each other until they are closed.

    Args:
        launch: the place of this process.
        store: the store of the run.
        start: of all ranks.
    """

    def __init__(self, launch: Launch, store: Store, start: Start) -> None:
        super().__init__(launch.rank, launch.world, None)
        self.host = launch.host
        self.restart = launch.restart
        self.earlier_out = Path(store.get(OUT).decode()) if store.check([OUT]) else None
        self.limit_wait(START_S)
        self._launch = launch
        self._store = store
        self._is_owner = not dist.is_initialized()
        self._watch = Watch(launch, store, self.activity, [f"{one}/sign" for one in start.keys(launch.world)])
        self.arrivals = self._watch.signals.arrivals
        place = {"store": PrefixStore(start.name, store), "rank": launch.rank, "world_size": launch.world}
        with self.waiting("join the other ranks"):
            self._messages = _open_gloo(timeout=LAUNCHED_TIMEOUT, **place)

    def device(self, spec: str) -> str:
        """See `Ranks.device`."""
        found = device_of_rank(
            spec,
            local_rank=self._launch.local_rank,
            local_world=self._launch.local_world,
            gpus=torch.cuda.device_count(),
        )
        check_gpus(self.gather((self.host, gpu_uuid(found))))
        return found

    def limit_wait(self, seconds: float) -> None:
        """See `Ranks.limit_wait`."""
        self.activity.limit_s = seconds

    def enter(self, out: Path) -> None:
        """See `Ranks.enter`."""
        self._watch.enter(out)

    def fail(self, line: str, code: int) -> int | None:
        """See `Ranks.fail`."""
        return self._watch.fail(line, code)

    def close(self) -> None:
        """See `Ranks.close`."""
        if self.rank == 0:
            self._store.add(ENDED, 1)
        self.agree(False)
        self._watch.close()
        if self._is_owner:
            dist.destroy_process_group()


def join_launch(launch: Launch) -> LaunchedGroup:
    """Join the ranks that a launcher started.

    Raises:
        EarlierVerdict: an earlier start of the same run ended for good.
        InputError: another process uses the port of the store.
        RankLost: a rank did not start.
    """
    try:
        hosts_store = launch.rank == 0 and not launch.has_agent_store
        connected = _connect(launch, is_master=True) if hosts_store else _reach(launch)
        store = PrefixStore(f"autobatch/{launch.run_id}", connected)
        start = meet(store, launch)
        check_earlier_starts(store, start.restart)
        return LaunchedGroup(replace(launch, restart=start.restart), store, start)
    except (RankLost, InputError):
        raise
    except RuntimeError as error:
        raise rank_lost("join the other ranks", error) from error


def join_loop() -> Group:
    """Join the processes of a training loop that a launcher has started.

    A default process group that exists is used. If there is none, it is made from the environment, and left
    when the interpreter ends.
    """
    try:
        if not dist.is_initialized():
            # The threads of a group that outlives the interpreter abort the process now and then.
            atexit.register(_leave)
            messages = _open_gloo()
        else:
            # A loop may join for every epoch, and each group takes threads and sockets.
            messages = None if dist.get_backend() == "gloo" else _open_gloo()
    except RuntimeError as error:
        raise rank_lost("join the other ranks", error) from error
    return Group(dist.get_rank(), dist.get_world_size(), messages)


def join_existing(world: int) -> Group | None:
    """Join the processes of a default group of this size; None if there is none."""
    if not dist.is_initialized() or dist.get_world_size() != world:
        return None
    return join_loop()


class Start(NamedTuple):
    """A start of all ranks, as rank 0 has announced it. A process that trains several times has several."""

    number: int = 0
    """From 1; 0 before rank 0 has opened one."""
    restart: int = 0
    """Starts before it that did not end well."""
    tokens: Sequence[str] = ()
    """What each rank has written to its key: differs for every process."""

    @property
    def name(self) -> str:
        """Front of its keys in the store."""
        return f"start/{self.number}"

    def keys(self, world: int) -> list[str]:
        """Return a key for each of this many ranks."""
        return [f"{self.name}/rank/{rank}" for rank in range(world)]


def meet(store: Store, launch: Launch, seconds: float = START_S) -> Start:
    """Wait until all ranks have called this, in Python, where Ctrl-C ends it.

    Each torchrun counts the restarts of its own host, and a rank of an earlier start may still write. So rank
    0 opens a start, and announces it with the tokens of the ranks that have come to it.

    Args:
        store: the store of the run.
        launch: the place of this rank.
        seconds: longest wait.

    Raises:
        RankLost: some rank did not; it is named.
    """
    own, start = uuid4().hex, Start()

    def have_met() -> bool:
        nonlocal start
        opens = launch.rank == 0 and not start.number
        number = store.add(STARTS, int(opens))
        if number > start.number:
            start = Start(number, max(launch.restart, number - 1 - store.add(ENDED, 0)))
            if opens:
                for key in start.keys(launch.world):
                    store.set(f"{key}/sign", "")
            store.set(start.keys(launch.world)[launch.rank], own)
        if launch.rank == 0 and store.check(start.keys(launch.world)):
            tokens = [one.decode() for one in store.multi_get(start.keys(launch.world))]
            store.set(start.name, msgspec.json.encode(start._replace(tokens=tokens)).decode())
        if start.number and store.check([start.name]):
            start = msgspec.json.decode(store.get(start.name), type=Start)
        return own in start.tokens

    if not _becomes_true(have_met, seconds):
        keys = enumerate(start.keys(launch.world) if start.number else ())
        missing = [rank for rank, key in keys if not store.check([key])]
        raise RankLost(
            f"WORLD_SIZE is {launch.world}, and {ranks_in_words(missing or [0])} did not start within "
            f"{seconds:g} s: start all ranks, and look at their own logs"
        )
    return start


def check_gpus(places: list[tuple[str, str | None]]) -> None:
    """Check that no two ranks share a GPU.

    Args:
        places: host and GPU of each rank, the GPU by an identifier; None if the rank has none.

    Raises:
        InputError: two do.
    """
    for rank, place in enumerate(places):
        other = places.index(place)
        if place[1] is not None and other != rank:
            raise InputError(
                f"ranks {other} and {rank} share one GPU of {place[0]}: start one rank per GPU, with "
                "--nproc-per-node at most the number of GPUs"
            )


def reach_store(
    connect: Callable[[], T],
    address: str,
    port: int,
    *,
    start_s: float = START_S,
    answer_s: float = ANSWER_S,
) -> T:
    """Connect to the store of a run, which another process opens.

    torch waits outside of Python, where no signal ends it, and for the first answer it waits without a limit.
    So this waits until something listens, and connects in a thread, which lasts if no answer comes.

    Args:
        connect: connects.
        address: address of the store.
        port: its port.
        start_s: longest wait until something listens.
        answer_s: longest wait for its answer.

    Raises:
        RankLost: nothing listens there, or something that is no store.
    """
    reason = ""

    def listens() -> bool:
        nonlocal reason
        try:
            socket.create_connection((address, port), timeout=LONGEST_PAUSE_S * 20).close()
        except OSError as error:
            reason = error.strerror or str(error)
            return False
        return True

    if not _becomes_true(listens, start_s):
        raise RankLost(
            f"nobody answers at {address}:{port}, where the ranks meet, for {start_s:g} s ({reason}): check "
            "MASTER_ADDR, MASTER_PORT, the firewall, and that rank 0 runs"
        )
    answer: Future[T] = Future()

    def fetch() -> None:
        try:
            answer.set_result(connect())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=fetch, name="connect", daemon=True).start()
    try:
        return answer.result(answer_s)
    except TimeoutError:
        if answer.done():
            raise
        raise RankLost(
            f"what listens at {address}:{port} took the connection and gave no answer for {answer_s:g} s, so "
            "it is no store of torch: another program uses MASTER_PORT; give all ranks another"
        ) from None


def _reach(launch: Launch) -> TCPStore:
    start_s = LAUNCHER_S if launch.has_agent_store else START_S
    return reach_store(lambda: _connect(launch), launch.address, launch.port, start_s=start_s)


def _connect(launch: Launch, *, is_master: bool = False) -> TCPStore:
    timeout = datetime.timedelta(seconds=START_S)
    try:
        return TCPStore(launch.address, launch.port, None, is_master, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:
        if is_master and "EADDRINUSE" in str(error):
            raise InputError(
                f"MASTER_PORT is {launch.port}, which another process of {launch.host} uses: give another"
            ) from error
        raise


def _open_gloo(timeout: datetime.timedelta | None = None, **place: Any) -> ProcessGroup | None:
    """Open a gloo group: the default group if there is none; return another one.

    Without a timeout, a collective has the limit of torch.
    """
    if dist.is_initialized():
        return dist.new_group(backend="gloo", timeout=timeout)  # type: ignore[no-any-return]
    dist.init_process_group("gloo", timeout=timeout, **place)
    return None


def _leave() -> None:
    if dist.is_initialized():  # a user may have left before
        dist.destroy_process_group()


def _becomes_true(is_so: Callable[[], bool], seconds: float) -> bool:
    deadline, pause_s = time.monotonic() + seconds, 0.002
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(LONGEST_PAUSE_S, 1.5 * pause_s)
    return True
