"""The ranks of a run as a process group of torch.distributed: their meeting, their messages and their end.

The group is one of gloo on the host. It carries votes and messages, so that none waits for a GPU, and the
tensors of ranks that train on the CPU. GPUs get a group of NCCL besides, from `Group.tensor_group`.

A collective fails on every rank if one has ended, hangs or is cut off. Then each rank that a launcher started
answers a roll call in the store of the launcher, and the first to report names those that did not.

    out                      the folder of the run, until it has ended well
    N/joins/RANK             M, the times that this rank has joined after N restarts: a script may call twice
    N/M/lost/RANK            exists once a collective has failed on this rank
    N/M/verdict              the first failure of a rank, with its exit code and cause
"""

from __future__ import annotations

import atexit
import ctypes
import datetime
import json
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group, which its defaults would keep connected
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, TCPStore  # type: ignore[attr-defined]

from autobatch.core.errors import AutobatchError
from autobatch.core.files import write_atomic
from autobatch.core.signals import PR_SET_PDEATHSIG
from autobatch.device.oom import first_line, is_oom
from autobatch.distributed.ranks import EARLIER_OUT, VERDICT, Launch, Ranks
from autobatch.workload.nested import map_tensors

ROLL_CALL_S, PAUSE_S = 4.0, 0.1
"""Seconds in which a rank answers after a collective has failed, and between two looks at the answers."""
OF_RANK_0_S = 86_400.0
"""Longest work of rank 0 alone: a save, a compilation, a trial."""
SIGNS = 4
"""Signs of life that rank 0 gives within the limit of a wait, while it works alone."""
SMALL_BYTES = 4096
"""Room of a small value; the sums of a batch fit in."""
OUT = "out"
_OF_COLLECTIVES = re.compile(r"gloo|NCCL|Connection (closed|reset) by peer|Operation timed out")
"""The texts of failed collectives."""
SHARED_GPU = "Duplicate GPU detected"
"""NCCL's text for ranks that have one GPU together, of which none is lost."""

T = TypeVar("T")


class RankLost(AutobatchError, RuntimeError):  # noqa: N818 - named like ProcessLookupError
    """A collective failed, because another rank ended, hangs or cannot be reached.

    Args:
        act: the purpose, in the words that follow "could not".
        who: the ranks that do not answer, in words.
    """

    def __init__(self, act: str, who: str = "a rank") -> None:
        super().__init__(
            f"{who} ended, hangs or cannot be reached, so this one could not {act}: its own log or the "
            "launcher's summary has the cause"
        )


class Group(Ranks):
    """The processes of a group of torch.distributed.

    Args:
        messages: the gloo group; None for the default group, which is one of gloo then.
        limit: longest wait in a collective.
    """

    def __init__(self, messages: ProcessGroup | None, limit: datetime.timedelta) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._messages = messages
        self._tensors: ProcessGroup | None = None
        self._limit = limit

    @contextmanager
    def waiting(self, act: str) -> Iterator[None]:
        """See `Ranks.waiting`."""
        try:
            yield
        except RuntimeError as error:
            said = str(error)
            if is_oom(error) or SHARED_GPU in said or not _OF_COLLECTIVES.search(said):
                raise
            traceback.clear_frames(error.__traceback__)  # they would keep the connections open
            raise RankLost(act, self._missing()) from error

    def _missing(self) -> str:
        """Return in words which ranks do not answer after a collective has failed."""
        return "a rank"

    def gather(self, value: T) -> list[T]:
        """See `Ranks.gather`. Small values take one message, where `all_gather_object` takes two."""
        own, values = pickle.dumps(value), [value] * self.world
        sent = bytearray(own if len(own) <= SMALL_BYTES else b"").ljust(SMALL_BYTES, b"\0")
        of_ranks = [torch.empty(SMALL_BYTES, dtype=torch.uint8, device="cpu") for _ in values]
        with self.waiting("exchange messages"):
            dist.all_gather(of_ranks, torch.frombuffer(sent, dtype=torch.uint8), group=self._messages)
            messages = [tensor.numpy().tobytes() for tensor in of_ranks]
            if all(message[0] for message in messages):  # no pickle begins with a zero
                return [pickle.loads(message) for message in messages]
            dist.all_gather_object(values, value, group=self._messages)
        return values

    def broadcast(self, read: Callable[[], T]) -> T:
        """See `Ranks.broadcast`. A tensor is sent without the memory that it is a part of."""
        sent: list[Any] = [None]
        if self.rank == 0:
            sent[0] = map_tensors(read(), lambda tensor: tensor.detach().cpu().clone())
        with self.waiting("receive the data of rank 0"):
            dist.broadcast_object_list(sent, 0, group=self._messages)
        return sent[0]  # type: ignore[no-any-return]

    def once(self, act: Callable[[], T]) -> T:
        """See `Ranks.once`. The others wait for the next sign of life of rank 0, not for its work."""
        if self.rank:
            is_over = torch.zeros(1, device="cpu")
            with self.waiting("wait for the work of rank 0"):
                while not is_over:
                    dist.recv(is_over, 0, group=self._messages)
            return self.broadcast(lambda: None)  # type: ignore[return-value]
        ended, told = threading.Event(), list[dist.Work]()
        living = threading.Thread(target=self._give_signs, args=(ended, told), daemon=True)
        living.start()
        try:
            answer = act()  # if it raises, the verdict ends the others
        finally:
            ended.set()
            living.join()
        with self.waiting("tell the others that its work is over"):
            told += self._tell(is_over=True)
            try:
                while told:  # one that is forgotten before a late rank asks for it would be lost
                    told.pop().wait()
            finally:
                told.clear()  # they would keep failed connections open
        return self.broadcast(lambda: answer)

    def _give_signs(self, ended: threading.Event, told: list[dist.Work]) -> None:
        """Give the others signs of life until the work of rank 0 has ended, or takes too long."""
        pause, until = self._limit.total_seconds() / SIGNS, time.monotonic() + OF_RANK_0_S
        with suppress(RuntimeError):  # a rank was lost, which the end of the work finds
            while not ended.wait(pause) and time.monotonic() < until:
                told += self._tell(is_over=False)

    def _tell(self, *, is_over: bool) -> list[dist.Work]:
        """Begin to tell each other rank whether the work of rank 0 is over; one of them may hang."""
        sent = torch.full((1,), float(is_over), device="cpu")
        others = range(1, self.world)
        return [dist.isend(sent, rank, group=self._messages) for rank in others]  # type: ignore[misc]

    def tensor_group(self, device: torch.device) -> ProcessGroup | None:
        """Return the process group that sums tensors of a device; None for the default, which is gloo's.

        The first sum is made here, so that its memory counts as used.
        """
        if device.type != "cuda":
            return self._messages
        if self._tensors is None:
            torch.cuda.set_device(device)
            with self.waiting("connect the GPUs"):
                self._tensors = dist.new_group(backend="nccl", timeout=self._limit)
                dist.all_reduce(torch.zeros(1, device=device), group=self._tensors)
        return self._tensors

    def sum(self, tensors: Sequence[Tensor], act: str) -> None:
        """See `Ranks.sum`."""
        with self.waiting(act):
            self._sum(tensors)

    def _sum(self, tensors: Sequence[Tensor]) -> None:
        """Sum in a frame of its own: what it holds would keep failed connections open."""
        for work in [
            dist.all_reduce(tensor, group=self.tensor_group(tensor.device), async_op=True)
            for tensor in tensors
        ]:
            work.wait()

    def send(self, tensors: Iterable[Tensor]) -> None:
        """See `Ranks.send`."""
        tensors = [tensor.detach() for tensor in tensors]
        shapes = repr([(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors])
        elements = sum(tensor.numel() for tensor in tensors)
        # Sums and messages of unlike sizes would end the process without a word.
        self.check_equal(
            {
                "the shapes of the model": f"{len(tensors)} tensors of {elements:,} elements "
                f"(digest {zlib.crc32(shapes.encode()):08x})"
            }
        )
        with self.waiting("receive the tensors of rank 0"):
            for tensor in tensors:
                dist.broadcast(tensor, 0, group=self.tensor_group(tensor.device))


class LaunchedGroup(Group):
    """The ranks that a launcher started, with the store of their run.

    Args:
        launch: place of this rank.
        limit_s: longest wait for another rank in seconds.

    Raises:
        RankLost: the other ranks did not start.
    """

    def __init__(self, launch: Launch, limit_s: float) -> None:
        # The launcher keeps the store, which then outlives every rank.
        is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if is_kept and sys.platform == "linux":
            # The launcher may be killed, and nothing else would end its ranks.
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        limit = datetime.timedelta(seconds=limit_s)
        self._is_owner, messages = not dist.is_initialized(), None
        try:
            served = TCPStore(
                launch.address,
                launch.port,
                is_master=launch.rank == 0 and not is_kept,
                timeout=limit,
                wait_for_workers=False,
            )
            self._run = PrefixStore(f"autobatch/{launch.run_id}", served)
            number = self._run.add(f"{launch.restart}/joins/{launch.rank}", 1)
            self._start = PrefixStore(f"{launch.restart}/{number}", self._run)
            if self._is_owner:
                dist.init_process_group(
                    "gloo", store=self._start, rank=launch.rank, world_size=launch.world, timeout=limit
                )
            else:
                messages = dist.new_group(backend="gloo", timeout=limit)
        except RuntimeError as error:
            where = f"at {launch.address}:{launch.port}, where {launch.world} ranks meet"
            raise RankLost(f"join the others {where} ({first_line(error)})") from error
        super().__init__(messages, limit)
        earlier = self._run.get(OUT).decode() if self._run.check([OUT]) else os.environ.get(EARLIER_OUT)
        self.earlier_out = Path(earlier) if earlier else None
        self._launch, self._has_store = launch, True
        self.agree(False)  # no rank reads the folder after another one has begun

    def device(self, spec: str) -> str:
        """See `Ranks.device`."""
        gpus = torch.cuda.device_count()
        if spec == "cuda" or (spec == "auto" and gpus):
            # A scheduler may show each process its own GPU only.
            return f"cuda:{0 if gpus == 1 else self._launch.local_rank}"
        return spec

    def _missing(self) -> str:
        """See `Group._missing`. The connections are closed first, so that every rank notices at once."""
        self._disconnect()
        missing = self._ask(self._call_roll)
        if missing is None:  # the launcher of rank 0 keeps the store, and ends with any of its ranks
            return "rank 0, or another rank of its host,"
        named = f"rank{'' if len(missing) == 1 else 's'} {', '.join(map(str, missing))}"
        return named if missing else super()._missing()

    def _call_roll(self) -> list[int]:
        """Answer the roll call, and return the ranks that do not."""
        deadline = time.monotonic() + ROLL_CALL_S
        self._start.set(f"lost/{self.rank}", "")
        while True:
            missing = [rank for rank in range(self.world) if not self._start.check([f"lost/{rank}"])]
            if not missing or self._start.check(["verdict"]) or time.monotonic() > deadline:
                return missing
            time.sleep(PAUSE_S)

    def _ask(self, question: Callable[[], T]) -> T | None:
        """Ask the store a question; None if it has gone with its host, or cannot be reached."""
        answers = list[T]()

        def ask() -> None:
            with suppress(RuntimeError):
                answers.append(question())

        # In a thread, because a client waits without a limit for the answer of a host that is cut off.
        asking = threading.Thread(target=ask, daemon=True)
        if self._has_store:
            asking.start()
            asking.join(ROLL_CALL_S + 1)
        self._has_store = bool(answers)
        return answers[0] if answers else None

    def _disconnect(self) -> None:
        messages, self._messages = self._messages, None
        if self._is_owner or messages is not None:
            with suppress(RuntimeError, ValueError, AssertionError):  # left already
                dist.destroy_process_group(messages)

    def enter(self, out: Path, mark: Path) -> None:
        """See `Ranks.enter`."""
        super().enter(out, mark)
        if self.rank == 0:
            self._run.set(OUT, str(out.absolute()))

    def fail(self, line: str, code: int) -> int | None:
        """See `Ranks.fail`. The first failure in the store counts.

        If the store has gone, it is the first one that is in the folder, unless a later start has that.
        """
        super().fail(line, code)
        of_run = {"run_id": self._launch.run_id, "restart": self._launch.restart}
        # torchrun replaces the code by 1.
        of_rank = {"rank": self.rank, "host": self.host, "code": code, "line": line}
        own = json.dumps({**of_run, **of_rank}, indent=2)
        first = self._ask(lambda: self._start.compare_set("verdict", "", own))
        if first not in (None, own.encode()):
            return int(json.loads(first)["code"])
        if self.out is not None and self.mark is not None:
            verdict = self.out / VERDICT
            with suppress(OSError):  # a full disk must not hide the cause
                if first or (self.mark.exists() and not verdict.exists()):
                    write_atomic(verdict, own.encode())
        return None

    def close(self) -> None:
        """See `Ranks.close`."""
        self.agree(False)
        if self.rank == 0:
            self._run.delete_key(OUT)
        self._disconnect()


def join_loop() -> Group:
    """Join the processes of a training loop that a launcher has started.

    A default process group that exists is used. If there is none, it is made from the environment, and left
    when the interpreter ends.
    """
    limit, messages = datetime.timedelta(minutes=30), None  # the limit of torch
    if not dist.is_initialized():
        # The threads of a group that outlives the interpreter abort the process now and then.
        atexit.register(_leave)
        dist.init_process_group("gloo", timeout=limit)
    elif dist.get_backend() != "gloo":
        # A loop may join for every epoch, and each group takes threads and sockets.
        messages = dist.new_group(backend="gloo", timeout=limit)
    return Group(messages, limit)


def join_existing(world: int) -> Ranks:
    """Join the processes of a default group of this size; return this process alone if there is none."""
    is_there = world > 1 and dist.is_initialized() and dist.get_world_size() == world
    return join_loop() if is_there else Ranks()


def _leave() -> None:
    if dist.is_initialized():  # a user may have left before
        dist.destroy_process_group()
