"""What every test needs: a home of its own, and one thread for torch, whose pools fight for the cores."""

from __future__ import annotations

import gc
import os
import random
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.leftovers import no_leftovers
from tests.support.rank_server import RankServer, warm_context

SEED = 271828
"""Of what a test draws with no seed of its own."""
WARM = {"server", "warm_children"}
"""Fixtures that fork from a process with torch, whose start takes seconds: one worker runs their tests."""


def pytest_configure(config: pytest.Config) -> None:
    """Draw the same examples in every run, however busy the machine is; another profile draws others.

    A process that only hands out tests to workers does without the import.
    """
    asked = config.getoption("--hypothesis-profile", None)
    if asked or hasattr(config, "workerinput") or not config.getoption("--numprocesses", None):
        from hypothesis import settings

        settings.register_profile("drawn", deadline=None)
        settings.register_profile("repeated", deadline=None, derandomize=True, database=None)
        settings.load_profile(asked or "repeated")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let each server start, and each import for fake tensors happen, in one worker only."""
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        groups = ["ranks"] if WARM & {*fixtures} else []
        if item.path.parent.name == "estimates":
            groups.append("fakes")
        if groups and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(groups[0]))


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
def same_draws_and_one_thread() -> None:
    """Let no test depend on the order of the tests.

    Nothing is imported for this: tests of the command line check that torch is not.
    """
    random.seed(SEED)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(SEED)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(SEED)
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for no disk, which keeps a test for longer than its work. Only the loss of power would show it."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(autouse=True)
def quick_collection() -> None:
    """Attempts collect garbage when they end: look only through what the test itself makes.

    A loader that an earlier test has dropped waits for each of its workers, for five seconds by default.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace in this process: a copy of it takes longer than a trace of a small model.

    A file that tests the copies defines a fixture of this name that does nothing.
    """
    copies = sys.modules.get("autobatch.estimates.copies")
    if copies is not None:
        monkeypatch.setattr(copies, "can_copy", lambda: False)


@pytest.fixture
def real_copies(copies: None) -> None:
    """Skip a test that needs a copy of this process where none answers (engine.cpp, bad autograd fork)."""
    from autobatch.estimates.copies import run_in_copies

    if run_in_copies([os.getpid]) == [os.getpid()]:
        pytest.skip("a CUDA build of torch refuses autograd in a copy once it ran here")


NO_PICTURE = '<svg role="img" aria-label="A chart" viewBox="0 0 1 1"></svg>'


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write only the titles of pictures, because drawing takes most of the time of a short run."""
    monkeypatch.setattr("autobatch.report.page.draw", lambda *_, **__: NO_PICTURE)


@pytest.fixture(autouse=True)
def quick_pages(request: pytest.FixtureRequest) -> None:
    """Draw pictures in tests/report only."""
    if request.path.parent.name != "report" and "torch" in sys.modules:
        request.getfixturevalue("no_pictures")


@pytest.fixture
def warm_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start children in a tenth of a second, except in some of tests/rehearsal/test_process.py.

    They are forked from a server with torch, and have the environment of its start.
    """
    from autobatch.rehearsal import process

    monkeypatch.setattr(process, "multiprocessing", SimpleNamespace(get_context=lambda _: warm_context()))


@pytest.fixture(scope="session")
def server() -> RankServer:
    """Run ranks, all tests of which share a worker and so a server."""
    return RankServer()
