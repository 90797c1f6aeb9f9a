"""Hooks of the documentation site: help texts of the commands, and links that leave the site."""

from __future__ import annotations

import contextlib
import io
import os
import re
from typing import Any

HELP = re.compile(r"<!-- help: (\w*) -->")
OUTSIDE = re.compile(
    r"\[([^\]]+)\]\((?:\.\./)+(?:examples|benchmarks|README|CONTRIBUTING|CHANGELOG|tests)[^)]*\)"
)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the help of a command in place of ``<!-- help: fit -->``, and unlink files of the repository."""
    return HELP.sub(lambda found: f"```text\n{help_of(found[1])}```", OUTSIDE.sub(r"\1", markdown))


def help_of(command: str) -> str:
    """Return the help of a command with all its options; of autobatch itself for an empty name."""
    from autobatch.cli.main import run

    os.environ["COLUMNS"] = "88"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run([command, "--help-all"] if command else ["--help"])
    return printed.getvalue()
