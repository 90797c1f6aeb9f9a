"""The demo in a terminal, as a user sees it: at every moment the screen says what happens."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import termios
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.commandline import command, environment

pyte = pytest.importorskip("pyte", reason="a terminal in memory is not installed")
pty = pytest.importorskip("pty", reason="there are no pseudo-terminals on this system")

ACTS = (
    "importing torch",
    "opening the workload",
    "running ",
    "checking that the loss can be split",
    "measuring the default",
    "trial 2 of 3",
    "trial 3 of 3",
    "training",
    "validating",
    "writing the report",
)
"""Acts of the demo that take more than a moment, in their order."""
BAR = "━╸╺"


def last_lines(folder: Path) -> list[str]:
    """Run the demo in a terminal, and return the last line of the screen after each output."""
    columns, rows = 80, 24
    words = command("fit", "--target-batch", 1024, "--steps", 6, "--trials", 3, "--out", folder / "run")
    environ = environment(folder, TERM="xterm-256color")
    del environ["COLUMNS"]  # rich takes it for the width
    pid, descriptor = pty.fork()
    if pid == 0:  # pragma: no cover - the child
        os.chdir(folder)
        os.execvpe(words[0], words, environ)
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    screen = pyte.Screen(columns, rows)
    stream = pyte.ByteStream(screen)
    lines: list[str] = []
    # The end of the other side is an error here.
    with suppress(OSError):
        while content := os.read(descriptor, 1 << 16):
            # A busy machine reads several states of the live line at once, each of which begins at the left.
            for part in re.split(rb"(?<=.)(?=\r\x1b)", content, flags=re.DOTALL):
                stream.feed(part)
                shown = [line.rstrip() for line in screen.display]
                lines.append(next((line for line in reversed(shown) if line), ""))
    _, status = os.waitpid(pid, 0)
    os.close(descriptor)
    assert os.waitstatus_to_exitcode(status) == 0, screen.display
    return lines


@pytest.mark.program
def test_the_screen_names_each_act_in_order_from_the_first_output_to_the_result(tmp_path: Path) -> None:
    """No wall time: a live line stands at the end of the screen whenever something is written."""
    lines = last_lines(tmp_path)
    live = [number for number, line in enumerate(lines) if line[:1] in BAR and line]
    # A chunk of output may end between what was printed and the line that is drawn again below it.
    assert len(live) > 0.8 * (live[-1] - live[0])
    told = iter(lines)
    for act in ACTS:
        assert any(act in line for line in told), f"{act} was not told, or out of order"
