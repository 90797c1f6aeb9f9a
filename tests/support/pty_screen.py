"""A command in a pseudo-terminal, and the screen as a user sees it after each of its outputs."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pyte


class Walk(NamedTuple):
    """What a user saw."""

    code: int
    live: list[str]
    """The last line of the screen after each output."""
    text: str
    """All lines that stayed, and the last screen."""
    longest: int
    """Columns of the longest line that was written."""


def walk(
    command: Sequence[str],
    *,
    cwd: Path,
    environ: Mapping[str, str],
    columns: int = 80,
    rows: int = 24,
    timeout_s: float = 300,
) -> Walk:
    """Run a command in a terminal of this size, and watch its screen."""
    pid, descriptor = pty.fork()
    if pid == 0:  # pragma: no cover - the child
        os.chdir(cwd)
        os.execvpe(command[0], list(command), dict(environ))
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    screen = pyte.HistoryScreen(columns, rows, history=10_000)
    stream = pyte.ByteStream(screen)
    live: list[str] = []
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not select.select([descriptor], [], [], 1.0)[0]:
            continue
        try:
            content = os.read(descriptor, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not content:
            break
        stream.feed(content)
        shown = [line.rstrip() for line in screen.display]
        live.append(next((line for line in reversed(shown) if line), ""))
    else:
        os.kill(pid, 9)
    _, status = os.waitpid(pid, 0)
    os.close(descriptor)
    kept = ["".join(line[column].data for column in range(columns)).rstrip() for line in screen.history.top]
    lines = [*kept, *(line.rstrip() for line in screen.display)]
    return Walk(os.waitstatus_to_exitcode(status), live, "\n".join(lines).rstrip(), max(map(len, lines)))
