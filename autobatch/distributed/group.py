"""The ranks of a run as a process group of torch.distributed.

The default group is gloo on the host. It carries votes and JSON, so that no message waits for a GPU, and the
tensors of ranks that train on the CPU. GPUs get a group of NCCL besides, from `Group.tensor_group`.
"""

from __future__ import annotations

import datetime
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from autobatch.core.errors import CheckpointError, DoesNotFitError, InputError
from autobatch.device.oom import is_oom
from autobatch.device.select import device_of_rank, gpu_uuid
from autobatch.distributed.arrivals import Arrivals
from autobatch.distributed.assembly import ASSEMBLY_S, connect_in_time, wait_for_ranks, wait_for_store
from autobatch.distributed.bell import OUT, Bell, Verdict, check_earlier_starts, write_verdict
from autobatch.distributed.bell import Store as BellStore
from autobatch.distributed.deadline import STOP_S, SignalDeadline
from autobatch.distributed.launch import Launch, check_gpus, write_error_file
from autobatch.distributed.messages import SIDE_TIMEOUT, Messages, as_rank_lost

RECONNECT_S = 0.5
"""Longest try to reach the store again: meanwhile the interpreter's lock is held, and all threads wait."""

T = TypeVar("T")


class Group(Messages):
    """The ranks that a launcher started; see `autobatch.distributed.ranks.Ranks`.

    Args:
        launch: the place of this process.

    Raises:
        EarlierVerdict: an earlier start of the same run ended for good.
        RankLost: the ranks cannot meet.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._out: Path | None = None
        self._arrivals = Arrivals(launch.rank, launch.world, launch.restart)
        self._deadline = SignalDeadline()
        with as_rank_lost("meet the other ranks"):
            hosts_store = launch.rank == 0 and not launch.has_agent_store
            store = self._prefixed(self._connect(is_master=True) if hosts_store else self._reach())
            check_earlier_starts(store, launch.restart)
            self._store = store
            self._bell = Bell(store, launch.restart)
            self._bell.watch(
                self._prefixed(self._connect()),
                lambda: self._prefixed(self._connect(RECONNECT_S)),
                self._leave,
                self._look,
            )
            self._owns_group = not dist.is_initialized()
            self._opening = self._count_openings(launch)
            start = f"start/{launch.restart}/{self._opening}"
            wait_for_ranks(store, f"{start}/there", launch.rank, launch.world)
            if self._owns_group:
                dist.init_process_group(
                    "gloo",
                    store=PrefixStore(start, store),
                    rank=launch.rank,
                    world_size=launch.world,
                    timeout=SIDE_TIMEOUT,
                )
            side = None if self._owns_group else dist.new_group(backend="gloo", timeout=SIDE_TIMEOUT)
        super().__init__(launch.rank, launch.world, side)

    @property
    def restart(self) -> int:
        """See `Ranks.restart`."""
        return self._launch.restart

    @property
    def host(self) -> str:
        """Name of the host of this rank."""
        return self._launch.host

    @property
    def earlier_out(self) -> Path | None:
        """See `Ranks.earlier_out`."""
        return Path(self._store.get(OUT).decode()) if self._store.check([OUT]) else None

    def device(self, spec: str) -> str:
        """See `Ranks.device`."""
        launch = self._launch
        gpus = torch.cuda.device_count()
        found = device_of_rank(spec, local_rank=launch.local_rank, local_world=launch.local_world, gpus=gpus)
        check_gpus([(host, gpu) for host, gpu in self.gather([launch.host, gpu_uuid(found)])])
        return found

    def once(self, act: Callable[[], T]) -> T:
        """See `Ranks.once`."""
        told: list[Any] = [None, None, None]
        if self.rank == 0:
            try:
                told[0] = act()
            except Exception as error:
                if not (isinstance(error, CheckpointError) or is_oom(error)):
                    raise  # the bell ends the others
                told[1:] = "oom" if is_oom(error) else "checkpoint", str(error)
                self.gather(told)
                raise
        answer, kind, reason = self.gather(told)[0]
        if kind is not None:
            raise (DoesNotFitError if kind == "oom" else CheckpointError)(reason)
        return told[0] if self.rank == 0 else answer  # type: ignore[no-any-return]

    def limit_wait(self, seconds: float) -> None:
        """See `Ranks.limit_wait`."""
        self._arrivals.limit_s = seconds

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Wait for the other ranks within the block, once a step; a rank that never comes is named."""
        self._arrivals.arrive()
        try:
            yield
            self.answered += 1
        finally:
            self._arrivals.leave()

    def enter(self, out: Path) -> None:
        """See `Ranks.enter`."""
        self._out = out
        if self.rank == 0:
            self._store.set(OUT, str(out.absolute()))

    def fail(self, line: str, code: int) -> int | None:
        """See `Ranks.fail`."""
        launch = self._launch
        write_error_file(launch.error_file, line)
        verdict = Verdict(
            run_id=launch.run_id,
            restart=launch.restart,
            rank=launch.rank,
            host=launch.host,
            code=code,
            line=line,
        )
        try:
            first = self._bell.ring(verdict)
        except RuntimeError:  # the store is gone, with the rank that kept it
            first = verdict
        if first != verdict:
            return first.code
        if self._out is not None:
            write_verdict(self._out, verdict)
        return None

    def close(self) -> None:
        """Leave the ranks after all of them have ended well."""
        self.agree(False)
        self._bell.close()
        self._deadline.close()
        if self._owns_group:
            dist.destroy_process_group()

    def _count_openings(self, launch: Launch) -> int:
        """Count how often this rank has joined: a process may train several times, with keys of their own."""
        return self._store.add(f"opened/{launch.restart}/{launch.rank}", 1)

    def _reach(self) -> TCPStore:
        """Connect for the first time to a store that another process keeps."""
        launch = self._launch
        wait_for_store(launch.address, launch.port)
        return connect_in_time(self._connect, launch.address, launch.port)

    def _connect(self, seconds: float = ASSEMBLY_S, *, is_master: bool = False) -> TCPStore:
        launch = self._launch
        timeout = datetime.timedelta(seconds=seconds)
        try:
            return TCPStore(
                launch.address, launch.port, None, is_master, timeout=timeout, wait_for_workers=False
            )
        except RuntimeError as error:
            if is_master and "EADDRINUSE" in str(error):
                raise InputError(
                    f"MASTER_PORT is {launch.port}, which another process of {launch.host} uses: give another"
                ) from error
            raise

    def _prefixed(self, store: Store) -> Store:
        return PrefixStore(f"autobatch/{self._launch.run_id}", store)

    def _look(self, store: BellStore) -> None:
        """Tell the other ranks where this one is, and end all of them if one never comes."""
        line, code = self._arrivals.look(store), 1
        asked = self._deadline.passed(self.answered)
        if asked is not None:
            code = 130 if asked == signal.SIGINT else 143
            line = (
                f"stopped by {signal.Signals(asked).name} without a checkpoint of this step, because no step "
                f"ended within {STOP_S:g} s; earlier checkpoints are intact"
            )
        if line is not None:
            self.fail(line, code)
            os._exit(code)

    def _leave(self, verdict: Verdict | None) -> NoReturn:
        """End the process at once, from the thread of the bell, whatever the main thread waits for."""
        os._exit(1 if verdict is None else verdict.code)
