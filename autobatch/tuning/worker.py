"""Which process runs a trial, told so that another can see whether it still lives."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
START_TICKS = 19
"""Place of the time of start among the fields after the name in ``/proc/PID/stat`` (proc_pid_stat(5))."""


class Worker(NamedTuple):
    """A process; figures that the system does not tell are ``None``."""

    host: str
    boot: str | None
    """Changes when the machine starts anew."""
    namespace: str | None
    """Of process ids: containers on one machine count on their own."""
    pid: int
    started: str | None
    """When the process started: ids are used again."""


def this_worker() -> Worker:
    """This process."""
    boot = namespace = None
    with suppress(OSError):
        boot = BOOT_ID.read_text().strip()
    with suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink())
    pid = os.getpid()
    return Worker(socket.gethostname(), boot, namespace, pid, _started(pid))


def is_gone(worker: Worker, here: Worker) -> bool:
    """Whether a process is known to have ended; on other machines nothing is known.

    Args:
        worker: the process.
        here: this one.
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
    return worker.started != _started(worker.pid)


def _started(pid: int) -> str | None:
    with suppress(OSError, IndexError):
        # The name may hold anything, parentheses and blanks included.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[START_TICKS]
    return None
