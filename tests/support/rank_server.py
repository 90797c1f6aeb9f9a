"""Ranks for tests: processes forked from one warm server, which meet at a store that outlives them.

Importing torch takes seconds, and a fork of a process that has imported it takes none. The server keeps the
store, as torchrun's agent does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import io
import multiprocessing
import os
import pickle
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from pkgutil import walk_packages
from typing import Any, NamedTuple, NoReturn

SECONDS = 120.0
"""Wall limit of a case; all of its ranks are killed then."""


def warm_context() -> ForkServerContext:
    """Fork from a process that has torch and has never run backward, after which a fork cannot train."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.warm_children"])
    return context


class Ended(NamedTuple):
    """The end of one rank."""

    code: int
    """Exit code; negative for a signal, as in `subprocess`."""
    value: Any
    """What the function returned; None if it did not."""
    error: str
    """Traceback, or nothing."""


class RankServer:
    """A server of ranks, in a process of its own."""

    def __init__(self) -> None:
        context = warm_context()
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,))  # which may have children
        self._process.start()
        theirs.close()
        self._connection.recv()  # when it has imported everything

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world: int = 2,
        environ: Mapping[str, str] | None = None,
        of_rank: Mapping[int, Mapping[str, str]] | None = None,
        seconds: float = SECONDS,
    ) -> list[Ended]:
        """Run a function of a module in every rank, and return how each of them ended."""
        self._connection.send((function, args, world, dict(environ or {}), dict(of_rank or {}), seconds))
        if not self._connection.poll(seconds + 60):
            raise TimeoutError("the rank server does not answer")
        found = self._connection.recv()
        if isinstance(found, str):
            raise RuntimeError(found)
        return found

    def values(self, function: Callable[..., Any], *args: Any, **more: Any) -> list[Any]:
        """Run a function in every rank, and return their values.

        Raises:
            RuntimeError: a rank failed; no assertion, for which a test of a known fault would pass.
        """
        ended = self.run(function, *args, **more)
        if any(one.code for one in ended):
            errors = "\n".join(one.error for one in ended)
            raise RuntimeError(f"{[one.code for one in ended]}:\n{errors}")
        return [one.value for one in ended]

    def close(self) -> None:
        """End the server."""
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()

    def program(self, folder: Path, *words: object) -> str:
        """Run ``autobatch``, or a script of Python, as a command in a folder; return what it prints.

        Raises:
            RuntimeError: it failed.
        """
        environ = {"AUTOBATCH_HOME": str(folder / "home")}
        return str(self.values(_run_program, folder, *words, world=1, environ=environ, seconds=300)[0])


def _run_program(folder: Path, *words: object) -> str:
    launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in [one for one in os.environ if one in launched or one.startswith("TORCHELASTIC_")]:
        del os.environ[name]
    os.chdir(folder)
    sys.argv = [str(word) for word in words]
    program, code = sys.argv[0], None
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            if program == "autobatch":
                runpy.run_module(program, run_name="__main__")
            else:
                sys.path.insert(0, str(Path(program).parent))
                runpy.run_path(program, run_name="__main__")
        except SystemExit as end:
            code = end.code
        printed.seek(0)
        text = printed.read()
    if code:
        raise RuntimeError(f"exit code {code}: {text}")
    return text


@contextlib.contextmanager
def rank_server() -> Iterator[RankServer]:
    server = RankServer()
    try:
        yield server
    finally:
        server.close()


def _serve(connection: Connection) -> None:
    import torch.distributed.checkpoint  # noqa: F401

    # What a run imports when it first needs it.
    import autobatch.api
    import autobatch.distributed
    import autobatch.report.page

    for package in (autobatch.api, autobatch.distributed):
        for module in walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)

    # As in the tests of one process, nothing waits for a disk or draws a picture.
    os.fsync = lambda _: None
    autobatch.report.charts._svg = lambda *_: '<svg viewBox="0 0 1 1"></svg>'
    # A collection in a rank would write to every object of the imports, and so copy their memory.
    gc.collect()
    gc.freeze()
    connection.send("ready")
    with contextlib.suppress(EOFError):
        while (asked := connection.recv()) is not None:
            try:
                connection.send(_run_case(*asked))
            except Exception:
                connection.send(traceback.format_exc())


def _run_case(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    world: int,
    environ: Mapping[str, str],
    of_rank: Mapping[int, Mapping[str, str]],
    seconds: float,
) -> list[Ended]:
    from torch.distributed import TCPStore

    common = {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_RESTART_COUNT": "0",
        **environ,
    }
    with tempfile.TemporaryDirectory() as name:
        paths = [Path(name, str(rank)) for rank in range(world)]
        readable, writable = os.pipe()
        pids = {}
        for rank, path in enumerate(paths):
            own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), **of_rank.get(rank, {})}
            pid = os.fork()
            if not pid:
                _be_rank(function, args, own, path, readable, seconds)
            pids[pid] = rank
        # The store has a thread, which may hold a lock while a process forks: so it starts after them.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writable, f"{store.port:8}".encode() * world)
        os.close(readable)
        os.close(writable)
        codes = _wait(pids, seconds)
        said = [pickle.loads(path.read_bytes()) if path.exists() else (None, "") for path in paths]
        return [Ended(codes[rank], *said[rank]) for rank in range(world)]


def _be_rank(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    environ: dict[str, str],
    path: Path,
    port: int,
    seconds: float,
) -> NoReturn:
    import torch

    code = 1
    try:
        os.setsid()
        faulthandler.dump_traceback_later(seconds - 10)  # names the place of a hang
        os.environ.update(environ, MASTER_PORT=os.read(port, 8).decode().strip())
        # A fork makes its pool of threads anew on first use, and two threads at once would race for it.
        torch.set_num_threads(1)
        try:
            said, code = pickle.dumps((function(*args), "")), 0
        except BaseException:
            said = pickle.dumps((None, traceback.format_exc()))
        path.with_suffix(".part").write_bytes(said)
        path.with_suffix(".part").rename(path)
    finally:
        os._exit(code)


def _wait(pids: dict[int, int], seconds: float) -> dict[int, int]:
    """Return the exit code of each rank; all that are left after so many seconds are killed."""
    codes, end = dict[int, int](), time.monotonic() + seconds
    while len(codes) < len(pids):
        for pid, rank in pids.items():
            if rank not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                codes[rank] = os.waitstatus_to_exitcode(ended[1])
            elif rank not in codes and time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return codes
