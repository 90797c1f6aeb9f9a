"""The ranks of a run, as everything above sees them, and the place that a launcher gives to each.

`Ranks` is a group of one process, which needs no messages. `autobatch.distributed.group.Group` is a group of
any number of processes.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from autobatch.core.errors import InputError
from autobatch.core.files import write_atomic

VERDICT = "verdict.json"
"""File in the folder of a run over ranks that keeps the exit code of the newest attempt, if it failed."""
EARLIER_OUT = "AUTOBATCH_EARLIER_OUT"
"""Variable with the folder of a run that ``--ranks N`` starts again."""

T = TypeVar("T")


class Ranks:
    """The processes that train a batch together, seen from one of them; here, this process alone.

    All ranks make the same calls in the same order. A call that waits for the others raises `RankLost` if one
    of them has ended.
    """

    rank = 0
    """Place of this process, from 0. Rank 0 alone prints, and writes the files of the run."""
    world = 1
    """Number of ranks."""
    host = ""
    """Name of the host of this rank."""
    earlier_out: Path | None = None
    """Folder of the run that the launcher has started again; None for a first start."""

    def device(self, spec: str) -> str:
        """Return the device that this rank opens for the one that was asked for.

        Raises:
            InputError: several ranks would share a GPU.
        """
        return spec

    def gather(self, value: T) -> list[T]:
        """Return the value of every rank, in order of the ranks."""
        return [value]

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0 on every rank; the others call it with anything."""
        return value

    def agree(self, flag: bool) -> bool:
        """Return whether any rank gave True."""
        return flag

    def once(self, act: Callable[[], T]) -> T:
        """Run a function on rank 0 alone, for any time, and return its answer on every rank.

        Raises:
            CheckpointError: the function raised it on rank 0.
            DoesNotFitError: memory ran out on rank 0, which raises its own error.
        """
        return act()

    def check_equal(self, values: Mapping[str, object]) -> None:
        """Check that all ranks have the same values, which are named for the user.

        Raises:
            InputError: a rank differs; names the rank, the value and both of its forms.
        """
        first, *others = self.gather(dict(values))
        for rank, of_rank in enumerate(others, start=1):
            for name, expected in first.items():
                if of_rank.get(name) != expected:
                    raise InputError(
                        f"the ranks differ in {name}: rank {rank} has {of_rank.get(name)}, and rank 0 has "
                        f"{expected}. Start all of them alike"
                    )

    def limit_wait(self, seconds: float) -> None:
        """Set the longest wait for another rank. After it the run ends, and names the missing ranks."""

    def enter(self, out: Path) -> None:
        """Set the folder of the run, for `fail`."""

    def fail(self, line: str, code: int) -> int | None:
        """Tell all ranks, and the launcher, that the run ends with this line and exit code.

        Returns:
            The exit code of the rank that failed first, which has printed the cause; None if it is this one.
        """
        return None

    def close(self) -> None:
        """Leave the ranks after all of them have ended well."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Place of this process among the ranks of a run."""

    rank: int
    world: int
    """Ranks of the run."""
    local_rank: int = 0
    """Place among the ranks of this host."""
    local_world: int = 1
    """Ranks on this host."""
    address: str
    port: int
    """Port of ``address`` at which the store of the run listens."""
    has_agent_store: bool = False
    """True if the launcher keeps the store, which then outlives every rank."""
    run_id: str = "none"
    host: str = ""
    error_file: Path | None = None
    """File from which the launcher reads the cause of a failure; None without one."""
    earlier_out: Path | None = None
    """Folder of the run that ``--ranks N`` starts again."""


def read_launch(environ: Mapping[str, str]) -> Launch | None:
    """Read the launch from the environment; None if this process trains alone.

    Raises:
        InputError: a variable is missing or invalid.
    """
    world = launched_world(environ)
    if world == 1:
        return None
    rank = _number(environ, "RANK")
    if rank >= world:
        raise InputError(f"RANK is {rank} and WORLD_SIZE is {world}: a rank is between 0 and {world - 1}")
    if "MASTER_ADDR" not in environ:
        raise InputError(
            f"WORLD_SIZE is {world}, but MASTER_ADDR is not set, so the ranks cannot meet: start them with "
            f"torchrun --nproc-per-node {world} -m autobatch …"
        )
    local_world = _number(environ, "LOCAL_WORLD_SIZE", 1, least=1)
    error_file = environ.get("TORCHELASTIC_ERROR_FILE")
    return Launch(
        rank=rank,
        world=world,
        local_rank=_number(environ, "LOCAL_RANK", rank % local_world),
        local_world=local_world,
        address=environ["MASTER_ADDR"],
        port=_number(environ, "MASTER_PORT", 29500, least=1, most=2**16 - 1),
        has_agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        run_id=environ.get("TORCHELASTIC_RUN_ID", "none"),
        host=socket.gethostname(),
        error_file=Path(error_file) if error_file else None,
        earlier_out=Path(environ[EARLIER_OUT]) if environ.get(EARLIER_OUT) else None,
    )


def launched_world(environ: Mapping[str, str]) -> int:
    """Return the number of processes that a launcher has started, 1 without one.

    Raises:
        InputError: WORLD_SIZE is no whole number over 0.
    """
    return _number(environ, "WORLD_SIZE", 1, least=1)


def write_error_file(path: Path | None, line: str, out: Path | None = None) -> None:
    """Write the cause of a failure, and the folder of the run, for the launcher; nothing without one.

    It is written whole, because a launcher may read it as soon as any rank has ended, and fails on a part.
    """
    if path is None:
        return
    content = {"message": line, "timestamp": str(int(time.time())), "out": out and str(out.absolute())}
    with suppress(OSError):  # a full disk must not hide the failure
        write_atomic(path, json.dumps(content).encode())


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ``rank 1`` or ``ranks 1, 2``."""
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def _number(
    environ: Mapping[str, str], name: str, default: int | None = None, *, least: int = 0, most: int = 2**31
) -> int:
    text = environ.get(name, "" if default is None else str(default))
    if not text.isdecimal() or not least <= int(text) <= most:
        limits = f"of at least {least}" if most == 2**31 else f"from {least} to {most}"
        what = f"found {text!r}" if text else "it is not set"
        raise InputError(f"{name} must be a number {limits}, {what}: start the ranks with torchrun")
    return int(text)
