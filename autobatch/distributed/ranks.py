"""The ranks of a run, as everything above sees them: one process, or a group of processes.

One process pays nothing: `Alone` answers without a message, and nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from autobatch.core.errors import InputError
from autobatch.distributed.launch import read_launch, write_error_file

if TYPE_CHECKING:
    from autobatch.distributed.group import Group

T = TypeVar("T")


class Ranks(Protocol):
    """The processes that train a batch together, seen from one of them."""

    @property
    def rank(self) -> int:
        """Place of this process, from 0. Rank 0 alone prints, and writes the files of the run."""

    @property
    def world(self) -> int:
        """Number of ranks."""

    @property
    def host(self) -> str:
        """Name of the host."""

    @property
    def restart(self) -> int:
        """Times that the launcher has started the ranks again."""

    @property
    def earlier_out(self) -> Path | None:
        """Folder of the run at an earlier start; None if there was none."""

    def device(self, spec: str) -> str:
        """Return the device that this rank opens for the one that was asked for.

        Raises:
            InputError: several ranks would share a GPU.
        """

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every rank, in order of the ranks; all of them call it.

        Args:
            value: anything that JSON can hold.

        Raises:
            RankLost: another rank ended.
        """

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """Return the bytes of every rank, in order of the ranks; all of them call it."""

    def broadcast_bytes(self, content: bytes) -> bytes:
        """Return the bytes of rank 0 on every rank; all of them call it, the others with anything."""

    def once(self, act: Callable[[], T]) -> T:
        """Run a function on rank 0 alone, and return its answer on every rank; all of them call it.

        No rank continues before the function has ended. Its answer must be what JSON can hold.

        Raises:
            CheckpointError: the function raised it on rank 0.
            DoesNotFitError: memory ran out on rank 0, which raises its own error.
            RankLost: another rank ended.
        """

    def agree(self, flag: bool) -> bool:
        """Return whether any rank gave True; all of them call it."""

    def limit_wait(self, seconds: float) -> None:
        """Set the longest wait for a rank in a step; after it the run ends, and names the rank."""

    def enter(self, out: Path) -> None:
        """Set the folder of the run, for `fail`."""

    def fail(self, line: str, code: int) -> int | None:
        """Tell all ranks, and the launcher, that the run ends with this line and exit code.

        Returns:
            The exit code of the rank that failed first, which has told why; None if it is this one.
        """


class Alone:
    """The only process of a run."""

    rank = 0
    world = 1
    host = ""
    restart = 0
    earlier_out = None

    def device(self, spec: str) -> str:
        """See `Ranks.device`."""
        return spec

    def gather(self, value: Any) -> list[Any]:
        """See `Ranks.gather`."""
        return [value]

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """See `Ranks.gather_bytes`."""
        return [content]

    def broadcast_bytes(self, content: bytes) -> bytes:
        """See `Ranks.broadcast_bytes`."""
        return content

    def once(self, act: Callable[[], T]) -> T:
        """See `Ranks.once`."""
        return act()

    def agree(self, flag: bool) -> bool:
        """See `Ranks.agree`."""
        return flag

    def limit_wait(self, seconds: float) -> None:
        """Do nothing."""

    def enter(self, out: Path) -> None:
        """Do nothing."""

    def fail(self, line: str, code: int) -> None:
        """Return None."""

    def close(self) -> None:
        """Do nothing."""


def refuse_ranks(environ: Mapping[str, str], command: str) -> None:
    """Refuse a command that runs in one process only.

    Raises:
        InputError: several ranks run it.
    """
    launch = read_launch(environ)
    if launch is not None:
        raise InputError(
            f"autobatch {command} runs in one process, and WORLD_SIZE is {launch.world}: start it without "
            "torchrun"
        )


def fail_before_meeting(environ: Mapping[str, str], line: str, *, is_common: bool) -> bool:
    """Tell the launcher of a failure before the ranks have met.

    Args:
        environ: describes the launch.
        line: the cause.
        is_common: whether all ranks fail alike.

    Returns:
        True if this rank is to tell the user, as rank 0 does if all of them fail alike.
    """
    try:
        launch = read_launch(environ)
    except InputError:
        return True
    if launch is None:
        return True
    write_error_file(launch.error_file, line)
    return launch.rank == 0 or not is_common


def open_ranks(environ: Mapping[str, str]) -> Alone | Group:
    """Join the ranks that the launcher started; `Alone` if this process trains alone.

    Raises:
        InputError: the environment describes no launch.
        EarlierVerdict: an earlier start of the same run ended for good.
    """
    launch = read_launch(environ)
    if launch is None:
        return Alone()
    # Only here: torch.distributed is not needed by one process.
    from autobatch.distributed.group import Group

    return Group(launch)
