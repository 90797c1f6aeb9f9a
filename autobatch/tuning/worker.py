"""Identity of the process that runs a trial, and the check that it has ended."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
START_TICKS = 19
"""Index of the start time among the fields after the name in ``/proc/PID/stat`` (proc_pid_stat(5))."""


class Worker(NamedTuple):
    """A process that runs trials; a field is None if the system does not report it."""

    host: str
    boot: str | None
    """Changes when the machine restarts."""
    namespace: str | None
    """Of process ids: each container counts its own."""
    pid: int
    started: str | None
    """Start time of the process, because process ids are reused."""


def this_worker() -> Worker:
    """Return the identity of this process."""
    boot = namespace = None
    with suppress(OSError):
        boot = BOOT_ID.read_text().strip()
    with suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink())
    pid = os.getpid()
    return Worker(socket.gethostname(), boot, namespace, pid, _start_time(pid))


def is_gone(worker: Worker, here: Worker) -> bool:
    """Return whether a process is known to have ended; nothing is known of other machines.

    Args:
        worker: the process in question.
        here: this process.
    """
    if worker.host != here.host:
        return False
    if worker.boot != here.boot:
        return True
    if worker.namespace != here.namespace:
        return False
    try:
        os.kill(worker.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return worker.started != _start_time(worker.pid)


def _start_time(pid: int) -> str | None:
    with suppress(OSError, IndexError):
        # The name may contain parentheses and blanks: split after its last parenthesis.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[START_TICKS]
    return None
