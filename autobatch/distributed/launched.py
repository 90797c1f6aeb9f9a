"""The ranks that a launcher started: their meeting, and their end.

A collective has a limit, the ``--collective-timeout``: it fails on every rank if one has ended, hangs or is
cut off. Then each rank answers a roll call in the store of the launcher, and the first to report names those
that did not.

    starts                   number of starts so far
    start/N                  the tokens of the ranks that have met in the N-th start
    start/N/token/RANK       written by a rank that wants to take part in it
    start/N/lost/RANK        exists once a collective has failed on this rank
    start/N/verdict          the first failure of a rank, with its exit code and cause
    out                      the folder of the run, until it has ended well
"""

from __future__ import annotations

import ctypes
import datetime
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
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
from autobatch.distributed.group import Group, RankLost, in_thread, rank_lost
from autobatch.distributed.ranks import VERDICT, Launch, ranks_in_words, write_error_file

START_S = 300.0
"""Seconds in which all ranks must have started, as they import torch at different times."""
ROLL_CALL_S = 4.0
"""Seconds in which a rank answers after a collective has failed."""
STORE_S = 1.5
"""Seconds in which the store answers; one that is cut off never does."""
PAUSE_S = 0.1
FINAL_CODES = (2, 3)
"""Exit codes that a restart cannot change."""
OUT = "out"


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
    """

    def __init__(self, launch: Launch, store: Store, number: int) -> None:
        super().__init__(launch.rank, launch.world, None)
        self.host = launch.host
        self.earlier_out = Path(store.get(OUT).decode()) if store.check([OUT]) else launch.earlier_out
        self._limit = datetime.timedelta(seconds=START_S)
        self._launch = launch
        self._number = number
        self._run = store
        self._store = PrefixStore(f"start/{number}", store)
        self._out: Path | None = None
        self._is_owner = not dist.is_initialized()
        with self.waiting("join the other ranks"):
            if self._is_owner:
                dist.init_process_group(
                    "gloo", store=self._store, rank=launch.rank, world_size=launch.world, timeout=self._limit
                )
            else:
                self._messages = dist.new_group(backend="gloo", timeout=self._limit)

    def device(self, spec: str) -> str:
        """See `Ranks.device`."""
        device = device_of_rank(
            spec,
            local_rank=self._launch.local_rank,
            local_world=self._launch.local_world,
            gpus=torch.cuda.device_count(),
        )
        check_gpus(self.gather((self.host, gpu_uuid(device))))
        return device

    def limit_wait(self, seconds: float) -> None:
        """See `Ranks.limit_wait`."""
        self.agree(False)  # they come here as they have imported torch
        self._limit = datetime.timedelta(seconds=seconds)
        with self.waiting("join the other ranks"):
            self._messages = dist.new_group(backend="gloo", timeout=self._limit)

    def lost(self, act: str, error: Exception) -> RankLost:
        """See `Group.lost`. The connections are closed first, so that every rank notices at once."""
        traceback.clear_frames(error.__traceback__)  # they would keep the connections open
        self._disconnect()
        who = f"the store of the run at {self._launch.address}:{self._launch.port}"
        with suppress(TimeoutError, RuntimeError):  # it is gone
            missing = in_thread(self._call_roll).result(ROLL_CALL_S + STORE_S)
            who = ranks_in_words(missing) if missing else "the network failed, or a rank"
        return rank_lost(act, error, who)

    def _call_roll(self) -> list[int]:
        """Return the ranks that have not noticed that a collective has failed, as this one has."""
        self._store.set(f"lost/{self.rank}", "")
        deadline = time.monotonic() + ROLL_CALL_S
        while True:
            missing = [rank for rank in range(self.world) if not self._store.check([f"lost/{rank}"])]
            if not missing or self._store.check(["verdict"]) or time.monotonic() > deadline:
                return missing
            time.sleep(PAUSE_S)

    def _disconnect(self) -> None:
        messages, self._messages = None if self._is_owner else self._messages, None
        if dist.is_initialized():
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
        own = Verdict(
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

        first, path = own, None if self._out is None else self._out / VERDICT
        try:
            first = in_thread(publish).result(STORE_S)
        except (TimeoutError, RuntimeError):  # the store is gone
            with suppress(OSError, *UNREADABLE):
                first = own if path is None else msgspec.json.decode(path.read_bytes(), type=Verdict)
        if first != own:
            return first.code
        if path is not None:
            with suppress(OSError):  # a full disk must not hide the cause
                write_atomic(path, msgspec.json.format(msgspec.json.encode(own)))
        return None

    def close(self) -> None:
        """See `Ranks.close`."""
        self.agree(False)
        if self.rank == 0:
            self._run.delete_key(OUT)
        self._disconnect()


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
        before = f"start/{number - 1}/verdict"
        if store.check([OUT, before]):
            verdict = msgspec.json.decode(store.get(before), type=Verdict)
            if verdict.code in FINAL_CODES:
                raise EarlierVerdict(verdict)
        return LaunchedGroup(launch, store, number)
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
    0 opens a start. All ranks write a token of their own into the newest one, and rank 0 closes it with the
    tokens that are there: a rank that does not find its own waits for the next start.

    Raises:
        RankLost: some rank did not; it is named.
    """
    own, deadline = uuid4().hex, time.monotonic() + seconds
    number = store.add("starts", int(rank == 0))
    while True:
        start, missing = f"start/{number}", list(range(world))
        if number:
            store.set(f"{start}/token/{rank}", own)
            missing = [other for other in missing if not store.check([f"{start}/token/{other}"])]
            if rank == 0 and not missing:
                tokens = store.multi_get([f"{start}/token/{other}" for other in range(world)])
                store.set(start, " ".join(token.decode() for token in tokens))
            if store.check([start]) and own in store.get(start).decode():
                return number
        if time.monotonic() > deadline:
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
