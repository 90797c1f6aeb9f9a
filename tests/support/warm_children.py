"""Child processes that are forked from a server with torch, which takes a child two seconds to import.

The server starts with the first child and ends with this process.
"""

from __future__ import annotations

import multiprocessing
from types import SimpleNamespace

import pytest


def fork_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `autobatch.rehearsal.process` fork from the server; children have the environment of its start."""
    from autobatch.rehearsal import process

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"{__name__}_preload"])
    monkeypatch.setattr(process, "multiprocessing", SimpleNamespace(get_context=lambda _: context))
