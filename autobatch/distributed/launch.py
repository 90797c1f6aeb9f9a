"""Rules of a launch: the place of this process among the ranks, and checks that they were started alike.

Nothing here imports torch, because a run in one process reads this too.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from autobatch.core.errors import InputError

VERDICT = "verdict.json"
"""File in the folder of a run over ranks that keeps the exit code of the newest attempt, if it failed."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Place of this process among the ranks of a run."""

    rank: int
    world: int
    """Ranks of the run."""
    local_rank: int
    """Place among the ranks of this host."""
    local_world: int
    """Ranks on this host."""
    address: str
    port: int
    """Port of ``address`` at which the store of the run listens."""
    has_agent_store: bool
    """True if torchrun keeps the store, which then outlives every rank."""
    run_id: str
    restart: int
    """Times that torchrun has started the ranks again."""
    host: str
    error_file: Path | None
    """File from which torchrun prints the cause of a failure; None without torchrun."""


def read_launch(environ: Mapping[str, str]) -> Launch | None:
    """Read the launch from the environment; None if this process trains alone.

    Raises:
        InputError: a variable is missing or is no number.
    """
    world = _number(environ, "WORLD_SIZE", 1)
    if world == 1:
        return None
    if world == 0:
        raise InputError("WORLD_SIZE is 0: a run has at least one rank")
    rank = _number(environ, "RANK")
    if not 0 <= rank < world:
        raise InputError(f"RANK is {rank} and WORLD_SIZE is {world}: a rank is between 0 and {world - 1}")
    if "MASTER_ADDR" not in environ:
        raise InputError(
            f"WORLD_SIZE is {world}, but MASTER_ADDR is not set, so the ranks cannot meet: start them with "
            f"torchrun --nproc-per-node {world} -m autobatch …"
        )
    local_world = max(1, _number(environ, "LOCAL_WORLD_SIZE", 1))
    port = _number(environ, "MASTER_PORT", 29500)
    if not 0 < port < 2**16:
        raise InputError(f"MASTER_PORT must be between 1 and {2**16 - 1}, found {port}")
    error_file = environ.get("TORCHELASTIC_ERROR_FILE")
    return Launch(
        rank=rank,
        world=world,
        local_rank=_number(environ, "LOCAL_RANK", rank % local_world),
        local_world=local_world,
        address=environ["MASTER_ADDR"],
        port=port,
        has_agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        run_id=environ.get("TORCHELASTIC_RUN_ID", "none"),
        restart=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        host=socket.gethostname(),
        error_file=Path(error_file) if error_file else None,
    )


def check_gpus(places: list[tuple[str, str | None]]) -> None:
    """Check that no two ranks share a GPU.

    Args:
        places: host and GPU of each rank, the GPU by an identifier; None if the rank has none.

    Raises:
        InputError: two do.
    """
    first: dict[tuple[str, str | None], int] = {}
    for rank, (host, gpu) in enumerate(places):
        other = first.setdefault((host, gpu), rank)
        if gpu is not None and other != rank:
            raise InputError(
                f"ranks {other} and {rank} share one GPU of {host}: start one rank per GPU, with "
                "--nproc-per-node at most the number of GPUs"
            )


def check_equal(what: list[Mapping[str, object]]) -> None:
    """Check that all ranks were started alike.

    Args:
        what: for each rank, what must be equal, by its name for the user.

    Raises:
        InputError: a rank differs; names the rank, the field and both values.
    """
    for rank, found in enumerate(what):
        for name, expected in what[0].items():
            if found.get(name) != expected:
                raise InputError(
                    f"the ranks differ in {name}: rank {rank} has {found.get(name)}, and rank 0 has "
                    f"{expected}. Start all of them alike"
                )


def write_error_file(path: Path | None, line: str) -> None:
    """Write the line that torchrun prints as the cause of a failure; nothing without torchrun."""
    if path is None:
        return
    content = json.dumps({"message": line, "timestamp": str(int(time.time()))})
    try:
        path.write_text(content, encoding="utf-8")
    except OSError:
        # torchrun fails on a part of a file, which a full disk leaves.
        with suppress(OSError):
            path.unlink()


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        found = f"found {text!r}" if text else "it is not set"
        raise InputError(f"{name} must be a number of at least 0, {found}: start the ranks with torchrun")
    return int(text)
