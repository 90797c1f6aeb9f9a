"""The demo in a terminal, as a user sees it: at every moment the screen says what happens."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import termios
from contextlib import suppress
from typing import NamedTuple

import pytest

from tests.support.commandline import command, environment

pyte = pytest.importorskip("pyte", reason="a terminal in memory is not installed")
pty = pytest.importorskip("pty", reason="there are no pseudo-terminals on this system")

pytestmark = pytest.mark.program

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


class Walk(NamedTuple):
    """What a user saw."""

    code: int
    live: list[str]
    """The last line of the screen after each output."""
    text: str
    """All lines that stayed, and the last screen."""


@pytest.fixture(scope="module", name="seen")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """Run the demo in a terminal, and watch its screen."""
    folder, columns, rows = tmp_path_factory.mktemp("demo"), 80, 24
    words = command("fit", "--target-batch", 1024, "--steps", 6, "--trials", 3, "--out", folder / "run")
    environ = environment(folder, TERM="xterm-256color")
    del environ["COLUMNS"]  # rich takes it for the width
    pid, descriptor = pty.fork()
    if pid == 0:  # pragma: no cover - the child
        os.chdir(folder)
        os.execvpe(words[0], words, environ)
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    screen = pyte.HistoryScreen(columns, rows, history=10_000)
    stream = pyte.ByteStream(screen)
    live: list[str] = []
    # The end of the other side is an error here.
    with suppress(OSError):
        while content := os.read(descriptor, 1 << 16):
            # A busy machine reads several states of the live line at once, each of which begins at the left.
            for part in re.split(rb"(?<=.)(?=\r\x1b)", content, flags=re.DOTALL):
                stream.feed(part)
                shown = [line.rstrip() for line in screen.display]
                live.append(next((line for line in reversed(shown) if line), ""))
    _, status = os.waitpid(pid, 0)
    os.close(descriptor)
    kept = ["".join(line[column].data for column in range(columns)).rstrip() for line in screen.history.top]
    text = "\n".join([*kept, *(line.rstrip() for line in screen.display)]).rstrip()
    return Walk(os.waitstatus_to_exitcode(status), live, text)


def test_the_screen_names_what_happens_from_the_first_output_to_the_result(seen: Walk) -> None:
    """No wall time: a live line stands at the end of the screen whenever something is written."""
    assert seen.code == 0, seen.text
    last = max(number for number, line in enumerate(seen.live) if line[:1] in BAR and line)
    first = next(number for number, line in enumerate(seen.live) if line[:1] in BAR and line)
    without = [line for line in seen.live[first:last] if line[:1] not in BAR]
    # A chunk of output may end between what was printed and the line that is drawn again below it.
    assert len(without) < 0.2 * (last - first), without
    assert first <= 3


def test_every_phase_is_named_in_order(seen: Walk) -> None:
    told = iter(seen.live)
    for act in ACTS:
        assert any(act in line for line in told), f"{act} was not told, or out of order"


def test_the_bar_of_the_training_has_rate_and_loss(seen: Walk) -> None:
    assert any("/6" in line and "loss" in line and "/s" in line for line in seen.live)


def test_the_result_begins_with_four_lines_before_the_details(seen: Walk) -> None:
    labels = [line[:11].strip() for line in seen.text.splitlines()]
    at = labels.index("fits")
    assert [label for label in labels[at:] if label][:4] == ["fits", "plan", "reached", "saved in"]
    assert "held-out accuracy" in seen.text
