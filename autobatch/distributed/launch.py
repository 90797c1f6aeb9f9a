"""The launch of ranks: what a process does that a launcher has started, and ``autobatch fit --ranks N``.

With ``--ranks N`` this process starts all ranks of one machine, as torchrun does. But torchrun turns every
exit code into 1 and restarts after any failure. Here the exit code is that of the first rank that failed, and
ranks start again only after exit code 77, in smaller micro-batches.

Nothing here imports torch before it is needed, because importing it takes seconds.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from autobatch.core.errors import InputError, RestartSmallerError
from autobatch.device.host import usable_cores
from autobatch.distributed.ranks import EARLIER_OUT, Ranks, read_launch

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

RESTARTS = 3
"""Times that ranks start again in smaller micro-batches."""
ADDRESS = "127.0.0.1"
POLL_S = 0.1
KILLED = 1
"""Exit code if a signal ended a rank, whatever the other ranks have made of it."""
TERMINATED = (143, -signal.SIGTERM)
"""Exit codes of ranks that were ended because another one had failed."""
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
"""Signals that the ranks get too."""


def open_ranks(environ: Mapping[str, str], limit_s: float = 1800.0) -> Ranks:
    """Join the ranks that the launcher started.

    Args:
        environ: describes the launch.
        limit_s: longest wait for another rank in seconds.

    Raises:
        InputError: the environment describes no launch.
        RankLost: the other ranks did not start.
    """
    launch = read_launch(environ)
    if launch is None:
        return Ranks()
    from autobatch.distributed.group import LaunchedGroup

    return LaunchedGroup(launch, limit_s)


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


def torchrun_of(environ: Mapping[str, str]) -> str:
    """Return the call of torchrun that starts these ranks; N stands for the number of a host of several."""
    hosts, per_host = environ.get("GROUP_WORLD_SIZE", "1"), environ.get("LOCAL_WORLD_SIZE")
    words = ["torchrun"]
    if hosts != "1":
        place = ("--master-addr", environ["MASTER_ADDR"], "--master-port", environ["MASTER_PORT"])
        words += ["--nnodes", hosts, "--node-rank", "N", *place]
    return shlex.join([*words, "--nproc-per-node", per_host or environ["WORLD_SIZE"]])


class RanksEnded(NamedTuple):
    """The end of all ranks."""

    code: int
    """Exit code of the first rank that failed; 0 if none did."""
    line: str | None = None
    """The cause, if no rank can have printed it."""
    out: str | None = None
    """Folder of the run; None if it is not known."""


def start_ranks(words: Sequence[str], count: int) -> RanksEnded:
    """Run a command in this many ranks on this machine, and wait for their end.

    The process must end soon afterwards: its environment and its handlers of signals have changed.

    Args:
        words: the words after ``autobatch``.
        count: number of ranks.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.ERROR)  # of torch, which says in many lines what the ranks say in one
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")
    for name, value in (
        ("OMP_NUM_THREADS", str(max(1, usable_cores() // count))),
        ("GLOO_SOCKET_IFNAME", loopback),
        # Below it, torch prints a stack of C++ for each message to a store that has gone.
        ("TORCH_CPP_LOG_LEVEL", "ERROR"),
    ):
        os.environ.setdefault(name, value)
    # With -P, no file of the working directory takes the name of a module, unless autobatch runs from there.
    is_here = Path(__file__).parents[2] == Path.cwd()
    arguments = [*([] if is_here else ["-P"]), "-m", "autobatch", *words]
    ended = RanksEnded(0)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as logs:
        for restart in range(RESTARTS + 1):
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=count,
                run_id=f"ranks-{restart}",
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                local_addr=ADDRESS,
                max_restarts=0,
                monitor_interval=POLL_S,
                logs_specs=DefaultLogsSpecs(log_dir=logs),
                signals_to_handle=SIGNALS,
            )
            try:
                elastic_launch(config, sys.executable)(*arguments)
                return RanksEnded(0)
            except ChildFailedError as error:
                ended = end_of(error.failures)
            except SignalException as error:
                return RanksEnded(128 + error.sigval)
            if ended.code != RestartSmallerError.exit_code:
                break
            if ended.out is not None:
                os.environ[EARLIER_OUT] = ended.out
    return ended


def end_of(failures: Mapping[int, ProcessFailure]) -> RanksEnded:
    """Return the end of one start: that of the first rank to fail, and was not ended for another one."""

    def order(rank: int) -> tuple[bool, int]:
        return failures[rank].exitcode in TERMINATED, failures[rank].timestamp

    rank = min(failures, key=order)
    failure = failures[rank]
    out = failure.error_file_data.get("out") if isinstance(failure.error_file_data, dict) else None
    if failure.exitcode >= 0:
        return RanksEnded(failure.exitcode, out=out)
    if failure.exitcode == -signal.SIGTERM:
        return RanksEnded(143)
    name = signal.Signals(-failure.exitcode).name
    cause = ": the system may be out of memory" if name == "SIGKILL" else ""
    advice = "--resume continues from the newest checkpoint, if there is one"
    return RanksEnded(KILLED, f"rank {rank} was ended by {name}{cause}; {advice}")
