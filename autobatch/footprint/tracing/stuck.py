"""Detection of a process that waits for ever for a lock, as a copy does for one that another thread held."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

STUCK_SECONDS = 10.0
"""Time without any work after which a process whose threads all wait for a lock counts as stuck."""


class StuckWatch:
    """Observations of a process over time.

    A process is stuck if all of its threads wait for a lock, and none of them has computed for a while.
    Whoever reads a file or a network, sleeps, or waits for another process, does not wait for a lock.

    Args:
        process: its number.
        now: the time, in seconds.
        proc: the file system that describes processes, on Linux.
    """

    def __init__(self, process: int, now: float, *, proc: Path = Path("/proc")) -> None:
        self._tasks = proc / str(process) / "task"
        self._since = now
        self._worked: int | None = None
        """Ticks of computation at the last look."""

    def is_stuck(self, now: float) -> bool:
        """Look at the process, and return whether it has been stuck long enough.

        Args:
            now: the time, in seconds.

        Returns:
            False if the system does not tell what a thread waits for.
        """
        worked = self._worked_if_locked()
        if worked is None or worked != self._worked:
            self._since, self._worked = now, worked
        return now - self._since >= STUCK_SECONDS

    def _worked_if_locked(self) -> int | None:
        """Return the ticks that all threads have computed; None unless all of them wait for a lock."""
        ticks = 0
        with suppress(OSError, ValueError, IndexError):
            for task in self._tasks.iterdir():
                # For example futex_wait_queue: the name of the kernel's function, proc_pid_wchan(5).
                if not (task / "wchan").read_text().startswith("futex"):
                    return None
                # After the name, which may have spaces, come fields 3 and on; 14 and 15 are ticks,
                # proc_pid_stat(5).
                fields = (task / "stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
            return ticks
        return None
