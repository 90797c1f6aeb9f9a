"""The start of all ranks of one machine by this process: ``autobatch fit --ranks N``.

torchrun does the same, but turns every exit code into 1 and restarts after any failure. Here the exit code is
that of the first rank that failed, and ranks start again only after exit code 77, in smaller micro-batches.

A rank that a signal ends cannot tell why: the other ranks lose it, and get SIGTERM. So this process decides
then. The exit code is 1, and the line and ``verdict.json`` name the rank and the signal.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.multiprocessing import (
    LogsDest,
    LogsSpecs,
    PContext,
    RunProcsResult,
    SignalException,
    start_processes,
)

from autobatch.core.errors import RestartSmallerError
from autobatch.core.signals import handle_signals
from autobatch.device.host import usable_cores
from autobatch.distributed.bell import OUT, Verdict, read_verdict, write_verdict

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
"""Seconds from a signal until ranks that have not ended are killed."""
_NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")
PASSED_ON = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
"""Signals that the ranks get too."""


class RanksEnded(NamedTuple):
    """The end of all ranks."""

    code: int
    """Exit code of the first rank that failed; 0 if none did."""
    line: str | None = None
    """The cause, if no rank has told it."""


class _Request:
    """Signals that ask to stop: raised while this process waits for ranks, and noted at any other time.

    torch raises them while it starts processes as well, which then nobody knows and nobody ends.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        """None if no signal came."""
        self.raises = False

    def __call__(self, number: int, _: FrameType | None) -> None:
        asked = signal.Signals(number)
        self.first = self.first or asked
        if self.raises:
            raise SignalException(asked.name, asked)

    def raise_all(self) -> None:
        """Raise every signal from now on, and one that came before."""
        self.raises = True
        if self.first is not None:
            raise SignalException(self.first.name, self.first)


class _NoFiles(LogsSpecs):
    """The output of ranks in no file, so that a launcher that is killed leaves no folder behind."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the terminal for the output, and a file that nobody writes for errors."""
        terminal = dict.fromkeys(envs, "")
        return LogsDest(terminal, terminal, error_files=dict.fromkeys(envs, os.devnull))

    @property
    def root_log_dir(self) -> str:
        """No folder."""
        return os.devnull


def start_ranks(words: Sequence[str], count: int, environ: Mapping[str, str]) -> RanksEnded:
    """Run a command in this many ranks on this machine, and wait for their end.

    Signals that ask to stop are passed on to all ranks.

    Args:
        words: the words after ``autobatch``.
        count: number of ranks.
        environ: the environment of this process, which the ranks inherit.
    """
    # Its warnings name process numbers. The ranks tell the user what happened.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""  # torch installs no handlers of its own
    store = open_store()
    threads = max(1, usable_cores() // count)
    common = {
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS", str(threads)),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": RUN_ID,
    }
    request = _Request()
    with handle_signals(PASSED_ON, request):
        for restart in range(RESTARTS + 1):
            found = _run(words, count, {**common, "TORCHELASTIC_RESTART_COUNT": str(restart)}, request)
            ended = _end_of(found, restart, PrefixStore(f"autobatch/{RUN_ID}", store))
            if request.first is not None and ended.code in (KILLED, RestartSmallerError.exit_code):
                ended = RanksEnded(128 + request.first)
            if ended.code != RestartSmallerError.exit_code:
                break
    return ended


def open_store() -> TCPStore:
    """Open a store for ranks on this machine; it answers no other machine.

    A store that torch opens listens on all addresses, and asks the name server for the name of every client,
    which may take 5 seconds each. The file of hosts has the name of 127.0.0.1.
    """
    listener = socket.create_server((ADDRESS, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        ADDRESS, port, None, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _run(
    words: Sequence[str], count: int, common: Mapping[str, str], request: _Request
) -> RunProcsResult | None:
    """Start the ranks once, and wait until all of them have ended; return None if a signal has ended them."""
    context = start_processes(
        "autobatch",
        sys.executable,
        dict.fromkeys(range(count), ("-m", "autobatch", *words)),
        {rank: {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)},
        _NoFiles(),
    )
    try:
        request.raise_all()
        return context.wait(period=POLL_S)
    except SignalException as asked:
        _pass_on(context, asked.sigval)
        return None
    finally:
        request.raises = False


def _pass_on(context: PContext, number: signal.Signals) -> None:
    """Pass a signal, and every further one, on to all ranks until they have ended."""
    while True:
        try:
            context.close(number, timeout=SHUTDOWN_S)
        except SignalException as again:
            number = again.sigval
        else:
            return


def _end_of(found: RunProcsResult | None, restart: int, store: PrefixStore) -> RanksEnded:
    """Return the end of one start: as a rank has told it, unless a signal ended a rank."""
    if found is not None and not found.is_failed():
        return RanksEnded(0)
    verdict = read_verdict(store, restart)
    if found is None:
        return RanksEnded(KILLED if verdict is None else verdict.code)
    killed = _killed(found)
    if killed is None or (verdict is not None and verdict.code not in AFTER_A_KILL):
        codes = [one.exitcode for one in found.failures.values()]
        return RanksEnded(max(1, *codes) if verdict is None else verdict.code)
    rank, name = killed
    cause = ": the system may be out of memory" if name == "SIGKILL" else ""
    line = f"rank {rank} was ended by {name}{cause}; --resume continues from the newest checkpoint"
    if store.check([OUT]):
        told = Verdict(
            run_id=RUN_ID, restart=restart, rank=rank, host=socket.gethostname(), code=KILLED, line=line
        )
        write_verdict(Path(store.get(OUT).decode()), told)
    return RanksEnded(KILLED, line)


def _killed(found: RunProcsResult) -> tuple[int, str] | None:
    """Return the rank that a signal ended, and the name of the signal; None if no rank ended so.

    After the first failure, the others get SIGTERM, and SIGKILL if they do not end.
    """
    first_s = min(one.timestamp for one in found.failures.values())
    for rank, one in sorted(found.failures.items()):
        is_own = one.exitcode < 0 and one.exitcode != -signal.SIGTERM
        if is_own and one.timestamp - first_s < SHUTDOWN_S / 2:
            return rank, signal.Signals(-one.exitcode).name
    return None
