"""Ranks for tests: processes forked from one warm server, which meet at a store that outlives them.

Importing torch takes seconds, and a fork of a process that has imported it takes none.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
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
    """Starts ranks, and keeps their store as torchrun's agent does."""

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world: int = 2,
        of_rank: Mapping[int, Mapping[str, str]] | None = None,
        seconds: float = SECONDS,
    ) -> list[Ended]:
        """Run a function of a module in every rank, and return how each of them ended."""
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = {
            **os.environ,
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "test",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        context, ranks = warm_context(), []
        task = pickle.dumps((function, args))  # multiprocessing would share the memory of tensors
        for rank in range(world):
            own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), **(of_rank or {}).get(rank, {})}
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_be_rank, args=(theirs, task, own, seconds))
            process.start()
            theirs.close()
            ranks.append((process, ours))
        end, ended = time.monotonic() + seconds, []
        for process, ours in ranks:
            wait([ours, process.sentinel], max(0.0, end - time.monotonic()))
            said = (None, "")
            with ours, contextlib.suppress(EOFError):  # it has ended without a word
                said = pickle.loads(ours.recv_bytes()) if ours.poll() else said
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
            process.join()
            ended.append(Ended(process.exitcode, *said))
        return ended

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


def _be_rank(pipe: Connection, task: bytes, environ: dict[str, str], seconds: float) -> NoReturn:
    import torch

    code = 1
    try:
        os.setsid()
        faulthandler.dump_traceback_later(seconds - 10)  # names the place of a hang
        os.environ.update(environ)
        # A fork makes its pool of threads anew on first use, and two threads at once would race for it.
        torch.set_num_threads(1)
        try:
            function, args = pickle.loads(task)
            said, code = pickle.dumps((function(*args), "")), 0
        except BaseException:
            said = pickle.dumps((None, traceback.format_exc()))
        pipe.send_bytes(said)
    finally:
        os._exit(code)
