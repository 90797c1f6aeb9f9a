"""Signals that ask a run to stop: recorded at once, obeyed after the micro-batch."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))
PR_SET_PDEATHSIG = 1
"""prctl(2): set the signal that this process gets when its parent ends."""
STDERR = 2
STOPS = "stopping and saving a checkpoint; press Ctrl-C again to end at once"
"""Line after the first Ctrl-C; its first half after another signal."""
POLL_S = 0.05
"""Interval at which a thread looks for signals."""
NATIVE_S = 2.0
"""Time within which Python must have handled a second signal. Native code may hold it up for minutes."""
ECHO_SECONDS = {signal.SIGINT: 0.25}
"""Time within which the same signal counts as the same request; a terminal signals the whole process group,
and the parent process may forward the signal as well."""
OTHER_ECHO_SECONDS = 5.0
"""The same for other signals. SLURM signals all processes of a job, and busy launchers forward it late; who
is in haste presses Ctrl-C twice."""


def is_again(first: int, number: int, seconds: float) -> bool:
    """Return whether a signal, so long after the first one, is another request."""
    return number != first or seconds > ECHO_SECONDS.get(signal.Signals(number), OTHER_ECHO_SECONDS)


def counts_as(number: int | None) -> int:
    """Return the signal for the exit code: SIGINT for Ctrl-C, SIGTERM for every other."""
    return signal.SIGINT if number == signal.SIGINT else signal.SIGTERM


class Arrivals:
    """The stop signals that came, as any thread can read them, whatever the main thread does.

    Python runs a handler in the main thread between two of its instructions, and once for all signals that
    came meanwhile. But the interpreter sends the number of each to a socket at once. If another library
    listens there, or outside the main thread, only what a handler adds is known.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._found: list[tuple[int, float]] = []
        """Signal of each, and the time at which it was read."""
        self._sockets: tuple[socket.socket, ...] = ()
        if threading.current_thread() is not threading.main_thread():
            return
        self._sockets = socket.socketpair()
        for one in self._sockets:
            one.setblocking(False)
        before = signal.set_wakeup_fd(self._sockets[1].fileno(), warn_on_full_buffer=False)
        if before != -1:
            self.close()
            signal.set_wakeup_fd(before)

    def read(self) -> list[tuple[int, float]]:
        """Return what has come so far."""
        with suppress(OSError):  # there is no more, or it is closed
            while self._sockets:
                number = self._sockets[0].recv(1)[0]
                if number in STOPPING:
                    self._found.append((number, self._clock()))
        return self._found

    def add(self, number: int) -> None:
        """Add a signal whose handler runs, unless it is read from the socket."""
        if not self._sockets:
            self._found.append((number, self._clock()))

    def are_again(self, *only: int) -> bool:
        """Return whether another request came after the first one; by these signals only, if any."""
        found = [one for one in self.read() if not only or one[0] in only]
        return any(is_again(found[0][0], number, then - found[0][1]) for number, then in found)

    def close(self) -> None:
        """Stop listening."""
        if self._sockets:
            signal.set_wakeup_fd(-1)
        for one in self._sockets:
            one.close()
        self._sockets = ()


class StopRequest:
    """Request of a signal that the run stop."""

    def __init__(self) -> None:
        self.signal_number: int | None = None
        """None if no signal came."""

    @property
    def is_asked(self) -> bool:
        """True if this process was asked to stop."""
        return self.signal_number is not None


class SharedRequest(StopRequest):
    """Request that several processes obey at once: it has a signal as soon as all of them know of it.

    Args:
        own: the request to this process.
    """

    def __init__(self, own: StopRequest) -> None:
        super().__init__()
        self.own = own

    @property
    def is_asked(self) -> bool:
        """True if this process was asked to stop, whether or not the others know of it."""
        return self.own.is_asked or super().is_asked

    def agree(self, signal_numbers: Iterable[int]) -> None:
        """Adopt the first signal of any process; 0 means none."""
        if self.signal_number is None:
            self.signal_number = next((one for one in signal_numbers if one), None)


@contextmanager
def stop_on_signals(arrivals: Arrivals | None = None, *, tells: bool = True) -> Iterator[StopRequest]:
    """Record the first stop signal within the block; handle a second one as outside of the block, at once.

    A thread tells the user of the first one. It ends the process if native code holds up the second one,
    but not in an interactive session, which would lose its variables. Nothing is caught outside the main
    thread, where Python allows no handlers.

    Args:
        arrivals: those that another thread watches already, and ends the process for; None if none does.
        tells: whether to write a line to standard error after the first signal.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, _: FrameType | None) -> None:
        came.add(number)
        request.signal_number = request.signal_number or number
        if came.are_again():
            signal.signal(number, before[number])
            signal.raise_signal(number)

    def watch() -> None:
        is_told = not tells
        while not left.wait(POLL_S):
            found = came.read()
            if found and not is_told:
                is_told = True
                _write_line(STOPS if found[0][0] == signal.SIGINT else STOPS.partition(";")[0])
            if came.are_again():
                if arrivals is None and not left.wait(NATIVE_S) and not hasattr(sys, "ps1"):
                    _write_line("ended within a step; complete checkpoints are intact")
                    os._exit(128 + counts_as(found[-1][0]))
                return

    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in STOPPING}
    came, left = arrivals or Arrivals(), threading.Event()
    watching = threading.Thread(target=watch, name="stop signals", daemon=True)
    try:
        with handle_signals(STOPPING, note):
            watching.start()
            yield request
    finally:
        left.set()
        if arrivals is None:
            came.close()


def _write_line(text: str) -> None:
    """Write a line to standard error from any thread, over the line of progress of a terminal."""
    with suppress(OSError):
        begin = "\r\x1b[K" if os.isatty(STDERR) else ""
        os.write(STDERR, f"{begin}autobatch: {text}\n".encode())


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
def hold_back_signals(numbers: Iterable[int], *, with_tracker: bool = True) -> Iterator[None]:
    """Hold back signals within the block. A process that starts there gets none.

    Args:
        numbers: the signals.
        with_tracker: start Python's resource tracker first. It unblocks signals when it starts, which it does
            with the first process that is not forked.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    if with_tracker:
        # Only here: the import takes 10 ms.
        from multiprocessing import resource_tracker

        resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
