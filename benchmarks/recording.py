"""Record the last screen of a command in a terminal as an SVG.

    python -m benchmarks.recording docs/img/fit.svg

This is the picture of the README.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import shlex
import struct
import sys
import tempfile
import termios
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pyte
from rich.console import Console
from rich.text import Text

from benchmarks.report import arguments

COMMAND = "autobatch fit --target-batch 1024"
COLUMNS, ROWS = 80, 60
FAINT = re.compile(rb"\x1b\[2(?=[;m])")
STYLES = {"default": "", "brightblack": "bright_black", "brown": "yellow"}
"""Colours that pyte calls otherwise than rich."""


def screens(command: str, folder: str, columns: int, rows: int = ROWS) -> Iterator[pyte.Screen]:
    """Run a command in a terminal, in a folder, and yield the screen after each output."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.environ.update(TERM="xterm-256color", COLUMNS=str(columns), LINES=str(rows), AUTOBATCH_HOME=folder)
        os.execv(sys.executable, [sys.executable, "-m", *shlex.split(command)])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    screen = pyte.Screen(columns, rows)
    stream = pyte.ByteStream(screen)
    while output := _read(terminal):
        # A busy machine reads several states of a live line at once, each of which begins at the left.
        for state in re.split(rb"(?<=.)(?=\r\x1b)", FAINT.sub(b"\x1b[90", output), flags=re.DOTALL):
            stream.feed(state)
            yield screen
    os.close(terminal)
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise SystemExit("\n".join(screen.display) + f"\nexit code {code}")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # how Linux says that the other side has closed
        return b""


def picture(command: str, folder: str, columns: int) -> str:
    """Draw the last screen of a command that runs in a folder as an SVG."""
    *_, screen = screens(command, folder, columns)
    shown = Text()
    for number in range(ROWS):
        cells = [screen.buffer[number][column] for column in range(columns)]
        for (color, bold), group in groupby(cells, lambda cell: (cell.fg, cell.bold)):
            style = STYLES.get(color, color if color.isalpha() else f"#{color}")
            shown.append("".join(cell.data for cell in group), f"{'bold ' * bold}{style}".strip())
        shown.append("\n")
    shown.rstrip()
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True)
    console.print(shown)
    drawn = console.export_svg(title=command, unique_id="screen")
    # Without its fonts, which a page would load from elsewhere.
    return re.sub(r"@font-face {.*?}\s*", "", drawn, flags=re.DOTALL)


if __name__ == "__main__":
    file = arguments(__doc__, file=Path).file
    with tempfile.TemporaryDirectory() as folder:
        file.write_text(picture(COMMAND, folder, COLUMNS), encoding="utf-8")
