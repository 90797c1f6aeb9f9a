"""What every test needs: a home of its own, and one thread for torch, whose pools fight for the cores."""

from __future__ import annotations

import gc
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
from hypothesis import settings

from tests.support.leftovers import no_leftovers
from tests.support.rank_server import RankServer, rank_server
from tests.support.warm_children import fork_children

# An example may take longer on a busy machine.
settings.register_profile("without-clock", deadline=None)
settings.load_profile("without-clock")


GROUPS = {"server": "ranks", "warm_children": "children"}
"""Fixtures that start a server of processes, which takes seconds: all tests with one run in one worker."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let each server start in one worker only."""
    for item in items:
        for fixture in GROUPS.keys() & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group(GROUPS[fixture]))


@pytest.fixture(scope="session", autouse=True)
def nothing_stays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let the last test fail if the tests of this process leave a file or a process behind."""
    tmp_path_factory.getbasetemp()  # pytest's own folder, which stays for some runs, is elsewhere
    with no_leftovers():
        yield


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep what a test learns out of the user's data and config directories, and theirs out of the test.

    The folder is made by the first who writes to it: most tests do not.
    """
    own = tmp_path_factory.getbasetemp() / "homes" / uuid.uuid4().hex
    for name in [name for name in os.environ if name.startswith("AUTOBATCH_")]:
        monkeypatch.delenv(name)
    home = own / "home"
    monkeypatch.setenv("AUTOBATCH_HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(own / "config"))
    return home


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Torch is not imported for this: tests of the command line check that it is not."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def quick_collection() -> None:
    """Attempts collect garbage when they end: look only through what the test itself makes."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace in this process: a copy of it takes longer than a trace of a small model.

    A file that tests the copies defines a fixture of this name that does nothing.
    """
    apart = sys.modules.get("autobatch.footprint.tracing.apart")
    if apart is not None:
        monkeypatch.setattr(apart, "can_run_apart", lambda: False)


@pytest.fixture
def real_copies(copies: None) -> None:
    """Skip a test that needs a copy of this process where none answers (engine.cpp, bad autograd fork)."""
    from autobatch.footprint.tracing.apart import run_apart

    if run_apart(os.getpid) == os.getpid():
        pytest.skip("a CUDA build of torch refuses autograd in a copy once it ran here")


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write only the titles of pictures, because drawing takes most of the time of a short run."""
    from matplotlib.figure import Figure

    def save(_: Figure, file: TextIO, **__: object) -> None:
        file.write('<svg viewBox="0 0 1 1"></svg>')

    monkeypatch.setattr(Figure, "savefig", save)


@pytest.fixture
def warm_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start children in a tenth of a second. Some of tests/setup/test_child.py start them as a run does."""
    fork_children(monkeypatch)


@pytest.fixture(scope="session", name="server")
def opened_server() -> Iterator[RankServer]:
    """Start one warm server of ranks for all tests of this process, if any of them asks for it."""
    with rank_server() as server:
        yield server
