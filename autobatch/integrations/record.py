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
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from autobatch.core.errors import InputError
from autobatch.core.signals import handle_signals

RECORDER = Path(__file__).parent / "recorder"
"""Folder of the module that Python runs at the start of each process of the program; see there."""
LOOK_SECONDS = 0.2
"""Time between two looks for what the program has written."""


def recorded(
    folder: str,
    *,
    steps: int | None,
    seconds: int | None = None,
    ends: bool = False,
    stacks: bool = False,
    fraction: float | None = None,
) -> dict[str, str]:
    """Return the environment of a program that is recorded; see `autobatch.integrations.recorder`."""
    wanted = {"folder": folder, "steps": steps, "seconds": seconds, "ends": ends, "stacks": stacks}
    content = json.dumps({**wanted, "at_oom": True, "fraction": fraction})
    paths = filter(None, [str(RECORDER), os.environ.get("PYTHONPATH")])
    variables = {"AUTOBATCH_RECORDER": content, "PYTHONPATH": os.pathsep.join(paths)}
    return {**os.environ, **variables}


def record(
    command: Sequence[str],
    out: Path,
    *,
    steps: int | None,
    seconds: int | None,
    wrote: Callable[[Path], None],
) -> int:
    """Run a command, write the memory of each of its processes that uses a GPU, and return its exit code.

    Args:
        command: the words of the command.
        out: file for the first process; further ones have the number of their rank in the name.
        steps: steps of an optimizer after which the file is written; None for the end of the program.
        seconds: time after which it is written; None for the end of the program.
        wrote: called with each file.

    Raises:
        InputError: the command cannot be started, or the folder of the file cannot be written.
    """
    written: list[Path] = []

    def collect(folder: str) -> None:
        for facts in sorted(Path(folder).glob("*.json")):
            _, rank, process = facts.stem.split("-")
            names = [out] if rank == "0" else []
            names += [out.with_stem(f"{out.stem}-rank{rank}"), out.with_stem(f"{out.stem}-{process}")]
            path = next(name for name in names if name not in written)
            facts.with_suffix(".pickle").replace(path)
            facts.unlink()
            written.append(path)
            wrote(path)

    try:
        # Beside the file, so that it can be moved there whole.
        with tempfile.TemporaryDirectory(prefix=".autobatch-", dir=out.absolute().parent) as folder:
            environ = recorded(folder, steps=steps, seconds=seconds, stacks=True)
            process = subprocess.Popen(command, env=environ)
            # Ctrl-C of a terminal reaches the program without us.
            own = [signal.SIGTERM] if sys.stdin.isatty() else [signal.SIGTERM, signal.SIGINT]
            with (
                handle_signals([signal.SIGINT], lambda *_: None),
                handle_signals(own, lambda number, _: process.send_signal(number)),
            ):
                while process.returncode is None:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(timeout=LOOK_SECONDS)
                    collect(folder)
    except OSError as error:
        what = shlex.join(command) if error.filename == command[0] else out
        raise InputError(f"{what}: {error.strerror or error}") from error
    code = process.returncode
    return code if code >= 0 else 128 - code
