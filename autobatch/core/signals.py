"""Signals that ask a run to stop: recorded at once, obeyed after the micro-batch."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the import takes 10 ms
    from multiprocessing.process import BaseProcess

ENDING: tuple[int, ...] = (signal.SIGTERM, signal.SIGUSR1)
"""Signals of a scheduler and, unless nohup ignores it, of a terminal that was closed."""
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
    ENDING += (signal.SIGHUP,)
STOPPING = (signal.SIGINT, *ENDING)
PR_SET_PDEATHSIG = 1
"""prctl(2): set the signal that this process gets when its parent ends."""
STOPS = "stopping and saving a checkpoint; press Ctrl-C again to end at once"
"""Line after the first Ctrl-C; its first half after another signal."""
POLL_S = 0.05
"""Interval at which a thread looks for signals."""
NATIVE_S = 2.0
"""Time within which Python must have handled a second signal. Native code may hold it up for minutes."""
CTRL_C_ECHO_S = 0.25
"""Time within which a second SIGINT is the same request: a terminal signals the whole process group, and the
parent process may forward the signal as well."""
OTHER_ECHO_S = 5.0
"""The same for other signals. SLURM signals all processes of a job, and busy launchers forward it late; who
is in haste presses Ctrl-C twice."""


def counts_as(number: int | None) -> int:
    """Return the signal for the exit code: SIGINT for Ctrl-C, SIGTERM for every other."""
    return signal.SIGINT if number == signal.SIGINT else signal.SIGTERM


@dataclass
class StopRequest:
    """Request of a signal that the run stop."""

    own: int | None = None
    """Signal to this process; None if none came."""
    signal_number: int | None = None
    """Signal to obey; of several processes, as soon as all of them know of it."""

    @property
    def is_asked(self) -> bool:
        """True if this process was asked to stop, whether or not the others know of it."""
        return self.own is not None or self.signal_number is not None

    def agree(self, signals: Iterable[int | None]) -> None:
        """Obey the first signal to any process."""
        if self.signal_number is None:
            self.signal_number = next((number for number in signals if number), None)


@contextmanager
def stop_on_signals(
    *, tells: bool = True, is_shared: bool = False, clock: Callable[[], float] = time.monotonic
) -> Iterator[StopRequest]:
    """Record the first stop signal within the block; handle a second one as outside of the block, at once.

    Python runs a handler in the main thread, between two of its instructions. But the interpreter writes the
    number of each signal to a socket at once, where a thread reads it. It tells the user of the first one. It
    ends the process if native code holds up the second one, but not in an interactive session, which would
    lose its variables. Nothing is caught outside the main thread, where Python allows no handlers.

    Args:
        tells: write a line to standard error after the first signal.
        is_shared: several processes obey at once, as soon as all of them know of it.
        clock: returns seconds.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    arrived: list[tuple[int, float]] = []
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    earlier = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    left = threading.Event()

    def is_asked_again() -> bool:
        with suppress(OSError):  # there is no more
            while number := reader.recv(1)[0]:
                if number in STOPPING:
                    arrived.append((number, clock()))
        echo_s = CTRL_C_ECHO_S if arrived and arrived[0][0] == signal.SIGINT else OTHER_ECHO_S
        return any(number != arrived[0][0] or then - arrived[0][1] > echo_s for number, then in arrived)

    def note(number: int, _: FrameType | None) -> None:
        request.own = request.own or number
        if not is_shared:
            request.signal_number = request.own
        if is_asked_again():
            signal.signal(number, before[number])
            signal.raise_signal(number)

    def watch() -> None:
        is_told = not tells
        while not left.wait(POLL_S):
            is_again = is_asked_again()
            if arrived and not is_told:
                is_told = True
                _write_line(STOPS if arrived[0][0] == signal.SIGINT else STOPS.partition(";")[0])
            if is_again and not left.wait(NATIVE_S) and not hasattr(sys, "ps1"):
                _write_line("ended within a step; complete checkpoints are intact")
                os._exit(128 + counts_as(arrived[-1][0]))

    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in STOPPING}
    watching = threading.Thread(target=watch, name="stop signals", daemon=True)
    watching.start()
    try:
        with handle_signals(STOPPING, note):
            yield request
    finally:
        left.set()
        watching.join()
        signal.set_wakeup_fd(earlier)
        reader.close()
        writer.close()


def _write_line(text: str) -> None:
    """Write a line to standard error from any thread, over the line of progress of a terminal."""
    with suppress(OSError):
        begin = "\r\x1b[K" if os.isatty(2) else ""
        os.write(2, f"{begin}autobatch: {text}\n".encode())


@contextmanager
def handle_signals(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Call a handler for each of these signals within the block, which is in the main thread."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            # None: not installed from Python, so it cannot be restored.
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)


@contextmanager
def hold_back_signals(numbers: Iterable[int], *, with_tracker: bool) -> Iterator[None]:
    """Hold back signals within the block. A process that starts there gets none.

    ``with_tracker`` starts Python's resource tracker first. It unblocks signals when it starts, which it does
    with the first process that is not forked.
    """
    if with_tracker:
        # Only here: the import takes 10 ms.
        from multiprocessing import resource_tracker

        resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_quietly(process: BaseProcess, *, is_copy: bool) -> None:
    """Start a process, which gets no Ctrl-C before it ignores it; a copy is forked."""
    with hold_back_signals({signal.SIGINT}, with_tracker=not is_copy), warnings.catch_warnings():
        # Python warns of threads, such as those of the terminal, which a copy does not have.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()


def end_with_parent() -> None:
    """Let the kernel end this process, which `multiprocessing` has started, with its parent; on Linux only.

    The kernel takes the thread that started this process for its parent.
    """
    if sys.platform != "linux":
        return
    # Only here: the imports take 10 ms.
    import ctypes
    import multiprocessing

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        # The parent ended before this call, so the kernel would never report it.
        os._exit(1)
