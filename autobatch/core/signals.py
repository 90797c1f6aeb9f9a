"""Signals that ask a run to stop: recorded at once, obeyed at the end of the step."""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))
PR_SET_PDEATHSIG = 1
"""prctl(2): set the signal that this process gets when its parent ends."""
SO_TIMESTAMP = 29
"""Option of socket(7) on Linux, without a name in `socket`: each message comes with its time."""
ECHO_SECONDS = {signal.SIGINT: 0.25}
"""Time within which the same signal counts as the same request; a terminal signals the whole process group,
and the parent process may forward the signal as well."""
OTHER_ECHO_SECONDS = 5.0
"""The same for other signals. SLURM signals all processes of a job, and busy launchers forward it late; who
is in haste presses Ctrl-C twice."""


def is_again(first: int, number: int, seconds: float) -> bool:
    """Return whether a signal, so long after the first one, is another request."""
    return number != first or seconds > ECHO_SECONDS.get(signal.Signals(number), OTHER_ECHO_SECONDS)


class Arrivals:
    """The stop signals that came, with their times, whatever the main thread does.

    Python runs a handler in the main thread between two of its instructions, and once for all signals that
    came meanwhile. But the interpreter sends the number of each to a socket at once, and the kernel notes the
    time. Nothing is known outside the main thread, if another library listens, or without such sockets.
    """

    def __init__(self) -> None:
        self.found: list[tuple[int, float]] = []
        """Signal and time of each, in seconds of the kernel's clock."""
        self._sockets: tuple[socket.socket, ...] = ()
        is_possible = sys.platform == "linux" and threading.current_thread() is threading.main_thread()
        if not is_possible:
            return
        reader, writer = self._sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        reader.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMP, 1)
        for one in self._sockets:
            one.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        if before != -1:
            self.close()
            signal.set_wakeup_fd(before)

    def read(self) -> list[tuple[int, float]]:
        """Return what has come so far; any thread may call it."""
        with suppress(OSError):  # there is no more, or it is closed
            while self._sockets:
                content, times, _, _ = self._sockets[0].recvmsg(1, 64)
                seconds, microseconds = struct.unpack("@ll", times[0][2])
                if content[0] in STOPPING:
                    self.found.append((content[0], seconds + microseconds / 1e6))
        return self.found

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
        self.since = 0.0
        """Time of the signal, in seconds of the clock."""

    @property
    def is_asked(self) -> bool:
        """True if this process was asked to stop."""
        return self.signal_number is not None

    @property
    def counts_as(self) -> int:
        """Signal for the exit code: SIGINT for Ctrl-C, SIGTERM for every other."""
        return signal.SIGINT if self.signal_number == signal.SIGINT else signal.SIGTERM


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
def stop_on_signals(
    clock: Callable[[], float] = time.monotonic, arrivals: Arrivals | None = None
) -> Iterator[StopRequest]:
    """Record the first stop signal within the block; handle a second one as outside of the block, at once.

    Both may come while native code runs, and then Python tells of them once. Nothing is caught outside the
    main thread, where Python allows no handlers.

    Args:
        clock: returns seconds.
        arrivals: those that this process listens to already; None if it does not.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, _: FrameType | None) -> None:
        if request.signal_number is None:
            request.signal_number, request.since = number, clock()
            ends = came.are_again()
        else:
            ends = is_again(request.signal_number, number, clock() - request.since) or came.are_again()
        if ends:
            signal.signal(number, before[number])
            signal.raise_signal(number)

    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in STOPPING}
    came = arrivals or Arrivals()
    try:
        with handle_signals(STOPPING, note):
            yield request
    finally:
        if arrivals is None:
            came.close()


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
