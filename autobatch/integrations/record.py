"""Recordings of the GPU memory of a program, as it is: ``autobatch record --out FILE -- COMMAND``.

The recorder comes in by the environment (`autobatch.integrations.recorder`), also into processes that the
program starts. The program keeps its terminal, its signals and its exit code.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autobatch.core.errors import InputError
from autobatch.core.signals import handle_signals

RECORDER = Path(__file__).parent / "recorder"
"""Folder of the module that Python runs at the start of each process of the program; see there."""


def recorded(folder: str, **wanted: Any) -> dict[str, str]:
    """Return the environment of a program that is recorded; see `autobatch.integrations.recorder`.

    Args:
        folder: gets the facts of each process, as JSON.
        wanted: the other values of the recorder.
    """
    paths = filter(None, [str(RECORDER), os.environ.get("PYTHONPATH")])
    content = json.dumps({"folder": folder, **wanted})
    return {**os.environ, "AUTOBATCH_RECORDER": content, "PYTHONPATH": os.pathsep.join(paths)}


def record(command: Sequence[str], out: Path, *, steps: int | None, seconds: int | None) -> tuple[int, bool]:
    """Run a command; each of its processes that uses a GPU writes its memory, and says so.

    Args:
        command: the words of the command.
        out: file for the first process; further ones have the number of their rank in the name.
        steps: steps of an optimizer after which the file is written; None for the end of the program.
        seconds: time after which it is written; None for the end of the program.

    Returns:
        The exit code of the command, and whether a file was written.

    Raises:
        InputError: the command cannot be started, or the folder of the file does not exist.
    """
    if not out.absolute().parent.is_dir():
        raise InputError(f"{out} cannot be written: there is no folder {out.absolute().parent}")
    with tempfile.TemporaryDirectory(prefix="autobatch-") as folder:
        environ = recorded(folder, out=str(out.absolute()), steps=steps, seconds=seconds, stacks=True)
        try:
            process = subprocess.Popen(command, env=environ)
        except OSError as error:
            raise InputError(f"{shlex.join(command)}: {error.strerror or error}") from error
        # Ctrl-C of a terminal reaches the program without us.
        own = [signal.SIGTERM] if sys.stdin.isatty() else [signal.SIGTERM, signal.SIGINT]
        with (
            handle_signals([signal.SIGINT], lambda *_: None),
            handle_signals(own, lambda number, _: process.send_signal(number)),
        ):
            code = process.wait()
        is_written = any(Path(folder).glob("*.json"))
    return (code if code >= 0 else 128 - code), is_written
