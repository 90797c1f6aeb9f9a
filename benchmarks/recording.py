"""Record a command in a terminal as an SVG that plays, and without animation shows the last screen.

    python -m benchmarks.recording docs/img/fit.svg

This is the picture of the README. A test records again and compares what was printed.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import struct
import sys
import tempfile
import termios
import time
from itertools import groupby
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

import pyte

from benchmarks.report import arguments

COMMAND = "autobatch fit --target-batch 1024"
COLUMNS, ROWS = 80, 60
CHARACTER, LINE, MARGIN, TOP = 8.4, 20, 20, 44
"""Pixels: the width of a character, the height of a line, and the space beside and above the text."""
HOLD_S = 8.0
"""Seconds for which the last screen stays before the recording plays again."""
FAINT = re.compile(rb"\x1b\[2(?=[;m])")
COLORS = {
    "default": "#e6edf3",
    "brightblack": "#9da7b3",
    "cyan": "#56d4dd",
    "green": "#7ee787",
    "brown": "#e3b341",  # as pyte calls yellow
}
SHORTEST_S = 0.03
"""Seconds; what is shown for less is the middle of a change."""
Run = tuple[int, str, str, bool]
"""Text of one style: its column, the text, its color and whether it is bold."""
STYLE = """\
text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace }
text { white-space: pre }
.passing { visibility: hidden }"""


class Row(NamedTuple):
    """A row of the screen while it stays the same."""

    number: int
    runs: tuple[Run, ...]
    start_s: float
    end_s: float | None
    """None if it stays until the end."""


def play(command: str, folder: str, columns: int) -> list[tuple[float, bytes]]:
    """Run a command in a terminal, in a folder. Return what it prints, and when in seconds."""
    printed = []
    began = time.monotonic()
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.environ.update(TERM="xterm-256color", COLUMNS=str(columns), LINES=str(ROWS), AUTOBATCH_HOME=folder)
        os.execv(sys.executable, [sys.executable, "-m", *shlex.split(command)])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    while text := _read(terminal):
        printed.append((time.monotonic() - began, text))
    os.close(terminal)
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise SystemExit(b"".join(text for _, text in printed).decode() + f"\nexit code {code}")
    return printed


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # how Linux says that the other side has closed
        return b""


def rows_of(printed: list[tuple[float, bytes]], columns: int) -> list[Row]:
    """Return every row that the screen showed, in the order of its beginning."""
    screen = pyte.Screen(columns, ROWS)
    stream = pyte.ByteStream(screen)
    shown: dict[int, tuple[float, tuple[Run, ...]]] = {}
    rows = []
    for seconds, text in printed:
        stream.feed(FAINT.sub(b"\x1b[90", text))
        for number in range(ROWS):
            start_s, before = shown.get(number, (0.0, ()))
            if (now := _runs(screen.buffer[number], columns)) != before:
                if before and seconds - start_s > SHORTEST_S:
                    rows.append(Row(number, before, start_s, seconds))
                shown[number] = (seconds, now)
    rows += [Row(number, runs, start_s, None) for number, (start_s, runs) in shown.items() if runs]
    return sorted(rows, key=lambda row: (row.start_s, row.number))


def _runs(cells: dict[int, pyte.screens.Char], columns: int) -> tuple[Run, ...]:
    runs, column = [], 0
    for (color, bold), group in groupby(
        (cells[at] for at in range(columns)), lambda cell: (cell.fg, cell.bold)
    ):
        text = "".join(cell.data for cell in group)
        if text.strip():
            runs.append((column + len(text) - len(text.lstrip()), text.strip(), color, bold))
        column += len(text)
    return tuple(runs)


def picture(command: str, rows: list[Row], columns: int) -> str:
    """Draw the rows as an SVG in which each appears and disappears when it did on the screen."""
    total_s = max(row.end_s or row.start_s for row in rows) + HOLD_S
    frames, groups = [], []
    for number, row in enumerate(rows):
        start = 100 * row.start_s / total_s
        end = "" if row.end_s is None else f", {100 * row.end_s / total_s:.2f}%"
        when = f"0%{end} {{ visibility: hidden }} {start:.2f}% {{ visibility: visible }}"
        frames.append(f"@keyframes r{number} {{ {when} }}")
        kind = "stays" if row.end_s is None else "passing"
        text = _texts(row.number + 1, row.runs)
        groups.append(f'<g class="{kind}" style="animation-name: r{number}">{text}</g>')
    playing = f"g {{ animation: {total_s:.2f}s step-end infinite }} " + " ".join(frames)
    width = round(columns * CHARACTER + 2 * MARGIN)
    height = TOP + (max(row.number for row in rows) + 2) * LINE + MARGIN
    dots = "".join(
        f'<circle cx="{MARGIN + 4 + 20 * at}" cy="20" r="6" fill="{color}"/>'
        for at, color in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            f"<title>{escape(command)}, in a terminal</title>",
            f"<style>{STYLE}\n@media (prefers-reduced-motion: no-preference) {{ {playing} }}</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#10161d"/>{dots}',
            _texts(0, ((0, "$", "green", True), (2, command, "default", True))),
            *groups,
            "</svg>\n",
        ]
    )


def _texts(number: int, runs: tuple[Run, ...]) -> str:
    return "".join(
        f'<text x="{MARGIN + column * CHARACTER:.1f}" y="{TOP + (number + 0.7) * LINE:g}" '
        f'textLength="{len(text) * CHARACTER:.1f}" fill="{COLORS.get(color, "#" + color)}" '
        f'font-weight="{700 if bold else 400}">{escape(text)}</text>'
        for column, text, color, bold in runs
    )


def last_screen(drawn: str) -> list[str]:
    """Return the lines of the last screen of a recording, without the command."""
    rows = re.findall(r'<g class="stays".*?>(.*)</g>', drawn)
    return [" ".join(re.findall(r">([^<]*)</text>", row)) for row in rows]


if __name__ == "__main__":
    file = arguments(__doc__, file=Path).file
    with tempfile.TemporaryDirectory() as folder:
        rows = rows_of(play(COMMAND, folder, COLUMNS), COLUMNS)
    file.write_text(picture(COMMAND, rows, COLUMNS), encoding="utf-8")
