"""The ranks that a launcher started: their meeting, the work of rank 0 alone, and their end.

A collective of a step has a limit, the ``--collective-timeout``: it fails on every rank if one has ended,
hangs or is cut off. Then each rank answers a roll call in the store of the launcher, and the one that reports
names those that did not. Work of rank 0 alone, such as a save or a trial, may take longer. Meanwhile it beats
in the store, and the others wait there.

    start/N                the tokens of the ranks that have met in the N-th start
    start/N/beat           grows while rank 0 works alone
    start/N/alone/K        exists once rank 0 has done its K-th work
    start/N/lost/RANK      exists once a collective has failed on this rank
    start/N/verdict        the first failure of a rank, with its exit code and cause
    out                    the folder of the run, until it has ended well
"""

from __future__ import annotations

import ctypes
import datetime
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from autobatch.core.errors import AutobatchError, InputError
from autobatch.core.files import UNREADABLE, write_atomic
from autobatch.core.records import Record
from autobatch.core.signals import PR_SET_PDEATHSIG
from autobatch.device.select import device_of_rank, gpu_uuid
from autobatch.distributed.group import Group, RankLost, rank_lost
from autobatch.distributed.ranks import VERDICT, Launch, ranks_in_words, write_error_file

START_S = 300.0
"""Seconds in which all ranks must have started, as they import torch at different times."""
ALONE_S = 86_400.0
"""Longest work of rank 0 alone."""
ROLL_CALL_S = 4.0
"""Seconds in which a rank answers after a collective has failed."""
REPORT_S = 1.5
"""Further seconds in which the first of the ranks that have answered reports who is missing."""
PAUSE_S = 0.1
FINAL_CODES = (2, 3)
"""Exit codes that a restart cannot change."""
OUT = "out"

T = TypeVar("T")


class EarlierVerdict(AutobatchError):  # noqa: N818 - an event, not a fault
    """An earlier start of the run ended in a way that a restart cannot change."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.line)
        self.exit_code = verdict.code


class Verdict(Record, frozen=True, kw_only=True):
    """The end of a run over ranks and its cause; ``verdict.json`` in its folder."""

    run_id: str
    restart: int
    rank: int
    """The rank that reports."""
    host: str
    code: int
    """Exit code, which torchrun replaces by 1."""
    line: str


class LaunchedGroup(Group):
    """The ranks that a launcher started.

    Args:
        launch: the place of this process.
        store: the store of the run.
        number: of this start of the ranks, from 1.
        earlier_out: folder of the run at an earlier start; None if this is the first.
    """

    def __init__(self, launch: Launch, store: Store, number: int, earlier_out: Path | None) -> None:
        super().__init__(launch.rank, launch.world, None)
        self.host = launch.host
        self.earlier_out = earlier_out
        self._launch = launch
        self._run = store
        self._number = number
        self._store = PrefixStore(f"start/{number}", store)
        self._limit = datetime.timedelta(seconds=START_S)
        self._works = 0
        """Works of rank 0 alone so far."""
        self._out: Path | None = None
        self._is_owner = not dist.is_initialized()
        with self.waiting("join the other ranks"):
            if self._is_owner:
                dist.init_process_group(
                    "gloo",
                    store=self._store,
                    rank=launch.rank,
                    world_size=launch.world,
                    timeout=self._limit,
                )
            else:
                self._messages = dist.new_group(backend="gloo", timeout=self._limit)

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
        limit = datetime.timedelta(seconds=seconds)
        if limit != self._limit:
            self._limit = limit
            with self.waiting("join the other ranks"):
                self._messages = dist.new_group(backend="gloo", timeout=limit)

    def once(self, act: Callable[[], T]) -> T:
        """See `Ranks.once`."""
        self._works += 1
        done = f"alone/{self._works}"
        if self.rank:
            self._wait_for_rank_0(done)
            return super().once(act)

        def work() -> T:
            with self._beating(done):
                return act()

        return super().once(work)

    @contextmanager
    def _beating(self, done: str) -> Iterator[None]:
        """Show the other ranks within the block that this process works, from a thread."""
        has_ended = threading.Event()

        def beat() -> None:
            with suppress(RuntimeError):  # the store is gone, and the others know
                while not has_ended.wait(min(1.0, self._limit_s / 4)):
                    self._store.add("beat", 1)

        thread = threading.Thread(target=beat, name="beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            has_ended.set()
            thread.join(self._limit_s)
            with suppress(RuntimeError):
                self._store.set(done, "")

    def _wait_for_rank_0(self, done: str) -> None:
        """Wait until rank 0 has done its work, or for the store to be gone.

        Pauses without a beat are counted, and not read from a clock, because this process may be stopped.

        Raises:
            RankLost: rank 0 shows no sign of life.
        """
        beats, has_ended = [0], threading.Event()

        def listen() -> None:
            store = self._store
            while not has_ended.is_set():
                with suppress(dist.DistStoreError):  # not yet
                    store.wait([done], datetime.timedelta(seconds=0.5))
                    return
                beats[0] = store.add("beat", 0)

        listening, silent_s, known = in_thread(listen), 0.0, 0
        try:
            for _ in range(int(ALONE_S / PAUSE_S)):
                if wait(
                    [listening], PAUSE_S
                ).done:  # or the store is gone: the broadcast that follows shows it
                    return
                silent_s, known = (silent_s + PAUSE_S if beats[0] == known else 0.0), beats[0]
                if silent_s > self._limit_s:
                    break
        finally:
            has_ended.set()
        raise self.lost("wait for rank 0", TimeoutError(f"no sign of life for {self._limit_s:g} s"))

    def lost(self, act: str, error: Exception) -> RankLost:
        """See `Group.lost`. The connections are closed first, so that every rank notices at once."""
        heard = set[int]()

        def call() -> None:
            store = self._store
            store.set(f"lost/{self.rank}", "")
            heard.add(self.rank)
            since = time.monotonic()
            while not store.check(["verdict"]):
                heard.update(rank for rank in range(self.world) if store.check([f"lost/{rank}"]))
                is_over = len(heard) == self.world or time.monotonic() - since > ROLL_CALL_S
                if is_over and self.rank == min(heard):
                    return
                time.sleep(PAUSE_S)

        self._disconnect()
        with suppress(TimeoutError, RuntimeError):
            in_thread(call).result(ROLL_CALL_S + REPORT_S)
        who = f"the store of the run at {self._launch.address}:{self._launch.port}"
        if heard:
            missing = [rank for rank in range(self.world) if rank not in heard]
            who = ranks_in_words(missing) if missing else "the network failed, or a rank"
        return rank_lost(act, error, who)

    def _disconnect(self) -> None:
        messages, self._messages = self._messages, None
        with suppress(RuntimeError, ValueError):
            dist.destroy_process_group(messages)

    def enter(self, out: Path) -> None:
        """See `Ranks.enter`."""
        self._out = out
        if self.rank == 0:
            self._run.set(OUT, str(out.absolute()))

    def fail(self, line: str, code: int) -> int | None:
        """See `Ranks.fail`. The first failure counts, in the store or, if that is gone, in the folder."""
        write_error_file(self._launch.error_file, line, self._out)
        own = first = Verdict(
            run_id=self._launch.run_id,
            restart=self._number - 1,
            rank=self.rank,
            host=self.host,
            code=code,
            line=line,
        )

        def publish() -> Verdict:
            kept = self._store.compare_set("verdict", "", msgspec.json.encode(own).decode())
            return msgspec.json.decode(kept, type=Verdict)

        with suppress(TimeoutError, RuntimeError):  # the store is gone
            first = in_thread(publish).result(ROLL_CALL_S)
        if self._out is not None:
            found = read_verdict(self._out)
            if found is None:
                with suppress(OSError):  # a full disk must not hide the cause
                    write_atomic(self._out / VERDICT, msgspec.json.format(msgspec.json.encode(first)))
            elif first == own:
                first = found
        return None if first == own else first.code

    def close(self) -> None:
        """See `Ranks.close`."""
        self.agree(False)
        if self.rank == 0:
            self._run.delete_key(OUT)
        self._disconnect()
        if self._is_owner and dist.is_initialized():
            dist.destroy_process_group()

    @property
    def _limit_s(self) -> float:
        assert self._limit is not None
        return self._limit.total_seconds()


def join_launch(launch: Launch) -> LaunchedGroup:
    """Join the ranks that a launcher started.

    Raises:
        EarlierVerdict: an earlier start of the same run ended for good.
        RankLost: a rank did not start, or the store of the run does not answer.
    """
    if launch.has_agent_store and sys.platform == "linux":
        # The launcher may be killed, and nothing else would end its ranks.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    def connect() -> TCPStore:
        return TCPStore(
            launch.address,
            launch.port,
            None,
            is_master=launch.rank == 0 and not launch.has_agent_store,
            timeout=datetime.timedelta(seconds=START_S),
            wait_for_workers=False,
        )

    try:
        # In a thread, because torch waits outside of Python, where no signal ends it.
        store = PrefixStore(f"autobatch/{launch.run_id}", in_thread(connect).result(START_S))
        number = meet(store, launch.rank, launch.world)
        earlier_out = Path(store.get(OUT).decode()) if store.check([OUT]) else launch.earlier_out
        earlier = None if earlier_out is None else read_verdict(earlier_out)
        if earlier is not None and earlier.code in FINAL_CODES:
            raise EarlierVerdict(earlier)
        return LaunchedGroup(launch, store, number, earlier_out)
    except TimeoutError as error:
        raise RankLost(
            f"nobody answers at {launch.address}:{launch.port}, where the ranks meet, for {START_S:g} s: "
            "check MASTER_ADDR, MASTER_PORT, the firewall, and that rank 0 runs"
        ) from error
    except RankLost:
        raise
    except RuntimeError as error:
        raise rank_lost("join the other ranks", error) from error


def meet(store: Store, rank: int, world: int, seconds: float = START_S) -> int:
    """Wait until all ranks have called this, and return the number of the start.

    Each torchrun counts the restarts of its own host, and a rank of an earlier start may still write. So rank
    0 opens a start, and announces it with the tokens of the ranks that have come to it.

    Raises:
        RankLost: some rank did not; it is named.
    """
    own, deadline = uuid4().hex, time.monotonic() + seconds
    number = store.add("starts", int(rank == 0))
    while True:
        keys = [f"start/{number}/token/{other}" for other in range(world)]
        if number:
            store.set(keys[rank], own)
            if rank == 0 and store.check(keys):
                store.set(f"start/{number}", " ".join(token.decode() for token in store.multi_get(keys)))
            if store.check([f"start/{number}"]) and own in store.get(f"start/{number}").decode():
                return number
        if time.monotonic() > deadline:
            missing = [other for other, key in enumerate(keys) if not (number and store.check([key]))]
            raise RankLost(
                f"WORLD_SIZE is {world}, and {ranks_in_words(missing)} did not start within {seconds:g} s: "
                "start all ranks, and look at their own logs"
            )
        time.sleep(PAUSE_S / 5)
        number = number if rank == 0 else store.add("starts", 0)


def check_gpus(places: Sequence[tuple[str, str | None]]) -> None:
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


def read_verdict(out: Path) -> Verdict | None:
    """Return the verdict in the folder of a run; None if there is none."""
    try:
        return msgspec.json.decode((out / VERDICT).read_bytes(), type=Verdict)
    except (OSError, *UNREADABLE):
        return None


def in_thread(act: Callable[[], T]) -> Future[T]:
    """Begin to call a function in a thread, which lasts if it never returns; signals end a wait for it."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(act())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer
