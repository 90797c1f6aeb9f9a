"""Messages among the processes of a gloo group: votes, JSON and bytes, and the sum of a tensor."""

from __future__ import annotations

import atexit
import datetime
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from autobatch.core.errors import AutobatchError

SIDE_TIMEOUT = datetime.timedelta(days=1)
"""Longest wait for a message: a rank may probe or validate for long."""


_OF_COLLECTIVES = re.compile(r"gloo|NCCL|Connection (closed|reset) by peer")
"""The texts of failed collectives."""


class RankLost(AutobatchError, RuntimeError):  # noqa: N818 - named like ProcessLookupError
    """A collective failed, because another rank ended or cannot be reached."""


class Messages:
    """Messages of one rank to all others; all of them make the same calls in the same order.

    Args:
        rank: this rank.
        world: number of ranks.
        side: the gloo group; None for the default group, which is gloo's then.
    """

    answered = 0
    """Messages that all ranks have answered, and steps that they have summed."""

    def __init__(self, rank: int, world: int, side: dist.ProcessGroup | None) -> None:
        self.rank = rank
        self.world = world
        self._side = side
        self._tensor_group: dist.ProcessGroup | None = None

    def gather(self, value: Any) -> list[Any]:
        """See `autobatch.distributed.ranks.Ranks.gather`."""
        return [msgspec.json.decode(one) for one in self.gather_bytes(msgspec.json.encode(value))]

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """Return the bytes of every rank, in order of the ranks."""
        with as_rank_lost("exchange messages"):
            sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.world)]
            dist.all_gather(sizes, torch.tensor([len(content)], device="cpu"), group=self._side)
            longest = max(int(size) for size in sizes)
            padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
            padded[: len(content)] = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)[
                : len(content)
            ]
            found = [torch.zeros_like(padded) for _ in range(self.world)]
            dist.all_gather(found, padded, group=self._side)
        self.answered += 1
        return [one[: int(size)].numpy().tobytes() for one, size in zip(found, sizes, strict=True)]

    def broadcast_bytes(self, content: bytes) -> bytes:
        """See `autobatch.distributed.ranks.Ranks.broadcast_bytes`."""
        with as_rank_lost("receive the data of rank 0"):
            size = torch.tensor([len(content)], device="cpu")
            dist.broadcast(size, 0, group=self._side)
            if not int(size):
                return b""
            sent = torch.frombuffer(bytearray(content), dtype=torch.uint8) if self.rank == 0 else None
            found = torch.empty(int(size), dtype=torch.uint8, device="cpu") if sent is None else sent
            dist.broadcast(found, 0, group=self._side)
        return content if self.rank == 0 else found.numpy().tobytes()

    def agree(self, flag: bool) -> bool:
        """See `autobatch.distributed.ranks.Ranks.agree`."""
        return self.vote(flag)()

    def vote(self, flag: bool) -> Callable[[], bool]:
        """Send a flag to all ranks; return a function that waits for theirs, and tells if any is true."""
        vote = torch.tensor([int(flag)], device="cpu")
        with as_rank_lost("vote"):
            work = dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self._side, async_op=True)

        def answer() -> bool:
            with as_rank_lost("vote"):
                work.wait()
            self.answered += 1
            return bool(vote)

        return answer

    def tensor_group(self, device: torch.device) -> dist.ProcessGroup | None:
        """Return the process group that reduces tensors of a device; None for the default, which is gloo's.

        The first reduction is made here, so that its memory counts as taken.
        """
        if device.type != "cuda":
            return self._side
        if self._tensor_group is None:
            torch.cuda.set_device(device)
            with as_rank_lost("connect the GPUs"):
                self._tensor_group = dist.new_group(backend="nccl")
                dist.all_reduce(torch.zeros(1, device=device), group=self._tensor_group)
        return self._tensor_group

    def start_sum(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Begin to sum a tensor over the ranks in place; return a function that waits for the sum."""
        group = self.tensor_group(tensor.device)
        with as_rank_lost("sum the gradients"):
            work = dist.all_reduce(tensor, group=group, async_op=True)

        def wait() -> None:
            with as_rank_lost("sum the gradients"):
                work.wait()

        return wait

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Wait for the other ranks within the block, once a step."""
        yield


def join_loop() -> Messages:
    """Return the messages among the processes of a training loop that a launcher has started.

    A default process group that exists is used. If there is none, it is made from the environment, and left
    when the interpreter ends.
    """
    with as_rank_lost("meet the other ranks"):
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=SIDE_TIMEOUT)
            # The threads of a group that outlives the interpreter abort the process now and then.
            atexit.register(_leave)
        is_gloo = dist.get_backend() == "gloo"
        side = None if is_gloo else dist.new_group(backend="gloo", timeout=SIDE_TIMEOUT)
    return Messages(dist.get_rank(), dist.get_world_size(), side)


def _leave() -> None:
    if dist.is_initialized():  # a user may have left before
        dist.destroy_process_group()


def join_existing(world: int) -> Messages | None:
    """Return the messages among the processes of a default group of this size; None if there is none."""
    if not dist.is_initialized() or dist.get_world_size() != world:
        return None
    return join_loop()


@contextmanager
def as_rank_lost(act: str) -> Iterator[None]:
    """Turn a failure of torch.distributed within the block into a `RankLost`."""
    try:
        yield
    except AutobatchError:
        raise
    except RuntimeError as error:
        raise _lost(act, error) from error


def lost_rank(error: Exception) -> RankLost | None:
    """Return the error of a collective within the user's code as a `RankLost`; None for any other error."""
    is_lost = isinstance(error, RuntimeError) and _OF_COLLECTIVES.search(str(error))
    return _lost("train the batch", error) if is_lost else None


def _lost(act: str, error: Exception) -> RankLost:
    text = (str(error).splitlines() or [""])[0]
    return RankLost(
        f"a rank ended or cannot be reached, so this one could not {act} ({text}): its own log or "
        "the launcher's summary has the cause"
    )
