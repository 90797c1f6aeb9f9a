"""Record the last screen of a command in a terminal as an SVG.

    python -m benchmarks.recording docs/img/fit.svg

This is the picture of the README. A test records again and compares what was printed.
"""

from __future__ import annotations

import fcntl
import html
import io
import os
import pty
import re
import shlex
import struct
import sys
import tempfile
import termios
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


def screen_of(command: str, folder: str, columns: int) -> Text:
    """Run a command in a terminal, in a folder, and return the last screen."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.environ.update(TERM="xterm-256color", COLUMNS=str(columns), LINES=str(ROWS), AUTOBATCH_HOME=folder)
        os.execv(sys.executable, [sys.executable, "-m", *shlex.split(command)])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    screen = pyte.Screen(columns, ROWS)
    stream = pyte.ByteStream(screen)
    while text := _read(terminal):
        stream.feed(FAINT.sub(b"\x1b[90", text))
    os.close(terminal)
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise SystemExit("\n".join(screen.display) + f"\nexit code {code}")
    shown = Text()
    for number in range(ROWS):
        cells = [screen.buffer[number][column] for column in range(columns)]
        for (color, bold), group in groupby(cells, lambda cell: (cell.fg, cell.bold)):
            style = STYLES.get(color, color if color.isalpha() else f"#{color}")
            shown.append("".join(cell.data for cell in group), f"{'bold ' * bold}{style}".strip())
        shown.append("\n")
    shown.rstrip()
    return shown


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # how Linux says that the other side has closed
        return b""


def picture(command: str, folder: str, columns: int) -> str:
    """Draw the last screen of a command that runs in a folder as an SVG."""
    screen = screen_of(command, folder, columns)
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True)
    console.print(screen)
    drawn = console.export_svg(title=command, unique_id="screen")
    # Without its fonts, which a page would load from elsewhere.
    return re.sub(r"@font-face {.*?}\s*", "", drawn, flags=re.DOTALL)


def lines_of(drawn: str) -> list[str]:
    """Return the words of a picture, in order."""
    return [html.unescape(text).replace("\xa0", " ") for text in re.findall(r">([^<>]+)</text>", drawn)]


if __name__ == "__main__":
    file = arguments(__doc__, file=Path).file
    with tempfile.TemporaryDirectory() as folder:
        file.write_text(picture(COMMAND, folder, COLUMNS), encoding="utf-8")
