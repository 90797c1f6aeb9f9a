"""The launch of ranks: what a process does that a launcher has started, and ``autobatch fit --ranks N``.

With ``--ranks N`` this process starts all ranks of one machine. torchrun does the same, but turns every exit
code into 1 and restarts after any failure. Here the exit code is that of the first rank that failed, and
ranks start again only after exit code 77, in smaller micro-batches.

A rank that a signal ends cannot report the cause: the other ranks lose it, and get SIGTERM. So this process
decides then. The exit code is 1, and the line and ``verdict.json`` name the rank and the signal.

Nothing here imports torch before it is needed, because importing it takes seconds.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from autobatch.core.errors import InputError, RestartSmallerError
from autobatch.core.signals import handle_signals
from autobatch.device.host import usable_cores
from autobatch.distributed.ranks import Ranks, read_launch, write_error_file

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

RESTARTS = 3
"""Times that ranks start again in smaller micro-batches."""
RUN_ID = "ranks"
ADDRESS = "127.0.0.1"
POLL_S = 0.1
KILLED = 1
"""Exit code if a signal ended a rank, whatever the other ranks have made of it."""
AFTER_A_KILL = (1, 130, 143)
"""Exit codes of ranks that have lost another, or got the SIGTERM that follows."""
SHUTDOWN_S = 30
"""Seconds from a signal or a failure until ranks that have not ended are killed."""
_NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")
FORWARDED = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
"""Signals that the ranks get too."""


def open_ranks(environ: Mapping[str, str]) -> Ranks:
    """Join the ranks that the launcher started.

    Raises:
        InputError: the environment describes no launch.
        EarlierVerdict: an earlier start of the same run ended for good.
        RankLost: the other ranks did not start.
    """
    launch = read_launch(environ)
    if launch is None:
        return Ranks()
    from autobatch.distributed.group import join_launch

    return join_launch(launch)


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


def fail_before_joining(environ: Mapping[str, str], line: str, *, is_common: bool) -> bool:
    """Tell the launcher of a failure before this rank has joined the others.

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


class RanksEnded(NamedTuple):
    """The end of all ranks."""

    code: int
    """Exit code of the first rank that failed; 0 if none did."""
    line: str | None = None
    """The cause, if no rank has printed it."""


def start_ranks(words: Sequence[str], count: int) -> RanksEnded:
    """Run a command in this many ranks on this machine, and wait for their end.

    Args:
        words: the words after ``autobatch``.
        count: number of ranks.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    store = open_store()
    common = {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // count)),
        "GLOO_SOCKET_IFNAME": loopback(),
        # Below it, torch prints a stack of C++ for each message to a store that has gone.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **os.environ,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": RUN_ID,
    }
    # With -P, no file of the working directory takes the name of a module, unless autobatch runs from there.
    is_here = Path(__file__).parents[2] == Path.cwd()
    processes = _Processes([sys.executable, *([] if is_here else ["-P"]), "-m", "autobatch", *words])
    with handle_signals(FORWARDED, processes.forward):
        for restart in range(RESTARTS + 1):
            codes = processes.run(count, {**common, "TORCHELASTIC_RESTART_COUNT": str(restart)})
            ended = _end_of(codes, restart, PrefixStore(f"autobatch/{RUN_ID}", store))
            if processes.signal and ended.code in (KILLED, RestartSmallerError.exit_code):
                ended = RanksEnded(128 + processes.signal)
            if ended.code != RestartSmallerError.exit_code:
                break
    return ended


def loopback() -> str:
    """Return the name of the network interface that only this machine reaches."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")


def open_store() -> TCPStore:
    """Open a store for ranks on this machine; it answers no other machine.

    A store that torch opens listens on all addresses, and asks the name server for the name of every client,
    which may take 5 seconds each. The file of hosts has the name of 127.0.0.1.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = socket.create_server((ADDRESS, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        ADDRESS, port, None, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


class _Processes:
    """The processes of the ranks, which get every signal that this process gets.

    Args:
        command: runs one rank.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._running: list[subprocess.Popen[bytes]] = []
        self._kill_s = float("inf")
        """Time from which ranks that have not ended are killed."""
        self.signal = 0
        """The first signal; 0 if none came."""

    def forward(self, number: int, _: FrameType | None) -> None:
        """Send a signal to all ranks."""
        self.signal = self.signal or number
        self._stop(number)

    def run(self, count: int, environ: dict[str, str]) -> list[int]:
        """Start the ranks, wait until all have ended, and return their exit codes.

        The others get SIGTERM after the first one has failed. The code of a rank that a signal has ended is
        negative, unless it was killed here.
        """
        self._running, self._kill_s = [], float("inf")
        overdue: set[int] = set()
        try:
            for rank in range(count):
                own = {**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                self._running.append(subprocess.Popen(self._command, env=own))
                if self.signal:  # it came between two starts
                    self._stop(self.signal)
            while None in (codes := [one.poll() for one in self._running]):
                if any(codes) and self._kill_s == float("inf"):
                    self._stop(signal.SIGTERM)
                if time.monotonic() > self._kill_s:
                    overdue |= {rank for rank, code in enumerate(codes) if code is None}
                    self._kill()
                time.sleep(POLL_S)
        finally:
            self._kill()
        return [KILLED if rank in overdue else one.returncode for rank, one in enumerate(self._running)]

    def _stop(self, number: int) -> None:
        self._kill_s = time.monotonic() + SHUTDOWN_S
        for process in self._running:
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)  # one that was stopped obeys now

    def _kill(self) -> None:
        for process in self._running:
            process.kill()  # nothing happens if it has ended


def _end_of(codes: list[int], restart: int, store: Store) -> RanksEnded:
    """Return the end of one start: as a rank has reported it, unless a signal ended a rank."""
    from autobatch.distributed.watch import OUT, Verdict, read_verdict

    if not any(codes):
        return RanksEnded(0)
    verdict = read_verdict(store, restart)
    killed = [rank for rank, code in enumerate(codes) if code < 0 and code != -signal.SIGTERM]
    if not killed or (verdict is not None and verdict.code not in AFTER_A_KILL):
        return RanksEnded(max(KILLED, *codes) if verdict is None else verdict.code)
    name = signal.Signals(-codes[killed[0]]).name
    cause = ": the system may be out of memory" if name == "SIGKILL" else ""
    advice = "--resume continues from the newest checkpoint, if there is one"
    line = f"rank {killed[0]} was ended by {name}{cause}; {advice}"
    if store.check([OUT]):
        Verdict(
            run_id=RUN_ID, restart=restart, rank=killed[0], host=socket.gethostname(), code=KILLED, line=line
        ).write(Path(store.get(OUT).decode()))
    return RanksEnded(KILLED, line)
