"""The ranks of a run as a process group of torch.distributed.

The group is one of gloo on the host. It carries votes and messages, so that none waits for a GPU, and the
tensors of ranks that train on the CPU. GPUs get a group of NCCL besides, from `Group.tensor_group`.
"""

from __future__ import annotations

import atexit
import datetime
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from autobatch.core.errors import AutobatchError, CheckpointError, DoesNotFitError
from autobatch.device.oom import is_oom
from autobatch.distributed.ranks import Ranks

BEAT_S = 1.0
"""Longest pause between two signs of life of rank 0."""
_OF_COLLECTIVES = re.compile(r"gloo|NCCL|Connection (closed|reset) by peer")
"""The texts of failed collectives."""
_PLACE_OF_SOURCE = re.compile(r"^\[[^\]]*\] ?")
"""The file of torch at the front of them."""

T = TypeVar("T")


class RankLost(AutobatchError, RuntimeError):  # noqa: N818 - named like ProcessLookupError
    """A collective failed, because another rank ended, hangs or cannot be reached."""


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
        self._messages = messages
        self._tensors: ProcessGroup | None = None
        self._limit = datetime.timedelta(minutes=30)  # that of torch
        """Longest wait in a collective."""

    @contextmanager
    def waiting(self, act: str) -> Iterator[None]:
        """Wait for the other ranks within the block.

        Args:
            act: the purpose, in the words that follow "could not".

        Raises:
            RankLost: a collective failed within the block; names the ranks that do not answer.
        """
        failure = None
        try:
            yield
        except RuntimeError as error:
            if not is_of_collective(error):
                raise
            failure = error
        if failure is not None:
            raise self.lost(act, failure) from failure

    def lost(self, act: str, error: Exception) -> RankLost:
        """Return the error of a collective in the user's words."""
        return rank_lost(act, error)

    def gather(self, value: T) -> list[T]:
        """See `Ranks.gather`."""
        of_ranks: list[Any] = [None] * self.world
        with self.waiting("exchange messages"):
            dist.all_gather_object(of_ranks, value, group=self._messages)
        return of_ranks

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
        """See `Ranks.once`. Rank 0 shows that it lives meanwhile, so that its work has no limit."""
        answer: Any = None
        error: Exception | None = None
        if self.rank == 0:
            with self._beating():
                try:
                    answer = act()
                except Exception as caught:
                    if not (isinstance(caught, CheckpointError) or is_oom(caught)):
                        raise  # its verdict ends the others
                    error = caught
        while not self._tell_over(self.rank == 0):
            pass
        kind = CheckpointError if isinstance(error, CheckpointError) else DoesNotFitError
        answer, of_rank_0 = self.broadcast((answer, error and kind(str(error))))
        if error or of_rank_0:
            raise error or of_rank_0  # type: ignore[misc]
        return answer  # type: ignore[no-any-return]

    @contextmanager
    def _beating(self) -> Iterator[None]:
        """Show the other ranks within the block that this process works, from a thread."""
        is_over = threading.Event()

        def beat() -> None:
            while not is_over.wait(min(BEAT_S, self._limit.total_seconds() / 4)):
                self._tell_over(False)

        beating = in_thread(beat)
        try:
            yield
        finally:
            is_over.set()
            wait([beating])
        beating.result()

    def _tell_over(self, is_over: bool) -> bool:
        """Return on every rank whether the work of rank 0 is over, as that tells."""
        flag = torch.tensor([int(is_over)], device="cpu")
        with self.waiting("wait for rank 0"):
            dist.broadcast(flag, 0, group=self._messages)
        return bool(flag)

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

    def start_sum(self, tensor: torch.Tensor) -> Callable[[], object]:
        """Begin to sum a tensor over the ranks in place; return a function that waits for the sum.

        Both are called within `waiting`.
        """
        group = self.tensor_group(tensor.device)
        return dist.all_reduce(tensor, group=group, async_op=True).wait  # type: ignore[no-any-return]


def join_loop() -> Group:
    """Join the processes of a training loop that a launcher has started.

    A default process group that exists is used. If there is none, it is made from the environment, and left
    when the interpreter ends.
    """
    try:
        if not dist.is_initialized():
            # The threads of a group that outlives the interpreter abort the process now and then.
            atexit.register(_leave)
            dist.init_process_group("gloo")
            messages = None
        else:
            # A loop may join for every epoch, and each group takes threads and sockets.
            messages = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
    except RuntimeError as error:
        raise rank_lost("join the other ranks", error) from error
    return Group(dist.get_rank(), dist.get_world_size(), messages)


def join_existing(world: int) -> Group | None:
    """Join the processes of a default group of this size; None if there is none."""
    if not dist.is_initialized() or dist.get_world_size() != world:
        return None
    return join_loop()


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


def rank_lost(act: str, error: Exception, who: str = "a rank") -> RankLost:
    """Return the error of a collective in the user's words.

    Args:
        act: the purpose, in the words that follow "could not".
        error: of torch.
        who: the ranks that are missing.
    """
    text = (str(error).splitlines() or [""])[0].partition(" This is typically")[0]
    text = _PLACE_OF_SOURCE.sub("", text).rstrip(".")
    return RankLost(
        f"{who} ended, hangs or cannot be reached, so this one could not {act} ({text}): its own log or the "
        "launcher's summary has the cause"
    )


def is_of_collective(error: Exception) -> bool:
    """Check whether an error came from a collective."""
    return isinstance(error, RuntimeError) and _OF_COLLECTIVES.search(str(error)) is not None


def _leave() -> None:
    if dist.is_initialized():  # a user may have left before
        dist.destroy_process_group()
