"""The command ``record``, whose words after ``--`` are another program's."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from autobatch.cli.output import write_line
from autobatch.core.errors import InputError
from autobatch.core.text import quoted

RECORD_HELP = """\
usage: autobatch record --out FILE [--steps N] [--seconds S] -- COMMAND

Run a command as it is, and write the memory of its GPU, as torch records it, with
the lines that took it. Two sizes tell what would fit: autobatch estimate --snapshot N=FILE

  --out FILE     The snapshot; other ranks write beside it. (required)
  --steps N      Write it after N steps of an optimizer.
  --seconds S    Write it after this time.

Without them it is written when the command ends, also by Ctrl-C, and in any case
when memory runs out. The command goes on then. It keeps its terminal and exit code.

  autobatch record --out b8.pickle --steps 3 -- python train.py --batch_size=8"""
LONGEST = 10**9
"""Most steps or seconds of a recording; a timer takes no more."""


def run_record(arguments: list[str]) -> int:
    """Run ``autobatch record --out FILE … -- COMMAND``: become the command, which records.

    Raises:
        InputError: a word is wrong, or the command cannot be started.
    """
    at = arguments.index("--") if "--" in arguments else len(arguments)
    own, command = arguments[:at], arguments[at + 1 :]
    if not {"-h", "--help", "--help-all"}.isdisjoint(own):
        return write_line(RECORD_HELP)
    from autobatch.integrations.record import recorded

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for option in ("--out", "--steps", "--seconds"):
        parser.add_argument(option)
    try:
        given, unknown = parser.parse_known_args(own)
    except argparse.ArgumentError as error:
        raise InputError(f"{error.argument_name} has no value; see autobatch record --help") from None
    if unknown:
        raise InputError(
            f"record does not take {quoted(unknown[0])}: the command stands after --, as in autobatch record "
            "--out b8.pickle -- python train.py"
        )
    if not given.out or not command:
        lacking = "a command after --" if given.out else "--out FILE"
        raise InputError(f"record needs {lacking}: autobatch record --out b8.pickle -- python train.py")
    named = {"steps": given.steps, "seconds": given.seconds}
    limits = {name: whole_number(f"--{name}", text) for name, text in named.items() if text is not None}
    out = Path(given.out).absolute()
    if not out.parent.is_dir():
        raise InputError(f"{out} cannot be written: there is no folder {out.parent}")
    sys.stderr.write("autobatch: a process that uses a GPU says here when it has written its memory\n")
    return become(command, recorded(out=str(out), since=time.time(), **limits))


def become(words: list[str], environ: Mapping[str, str] = os.environ) -> NoReturn:
    """Replace this process by a command.

    Raises:
        InputError: it cannot be started.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(words[0], words, environ)
    except OSError as error:
        raise InputError(f"{words[0]} cannot be started: {error.strerror or error}") from error


def whole_number(option: str, text: str) -> int:
    """Return the whole number of an option.

    Raises:
        InputError: it is no whole number of 1 or more.
    """
    if not (text.isascii() and text.isdecimal() and 0 < int(text) <= LONGEST):
        raise InputError(f"{option} must be a whole number of 1 or more, found {quoted(text)}")
    return int(text)
