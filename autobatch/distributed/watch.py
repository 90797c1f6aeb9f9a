"""The other ranks, watched by a thread of this one: they fail, they are late, or their store is gone.

A rank that waits in a collective neither handles a signal nor learns that another one has failed; torchrun
ends it 30 seconds later. So ranks publish in the store of the launcher what the others must know:

    verdict/START        the first failure of this start of the ranks, with its exit code and cause
    waits/START/RANK     the number of times that a rank has begun to wait for the others

A thread of each rank reads them, and ends the process whatever the main thread waits for: after a verdict,
with its exit code; after a wait beyond its limit, with a verdict that names the ranks that have begun fewer
waits; and after a signal that led to no progress. The first verdict counts.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from torch.distributed import Store  # type: ignore[attr-defined]

from autobatch.core.errors import AutobatchError
from autobatch.core.files import write_atomic
from autobatch.core.records import Record
from autobatch.core.signals import STOPPING
from autobatch.distributed.ranks import VERDICT, Launch, write_error_file

POLL_S = 0.25
"""Seconds between two looks at the store."""
GRACE_S = 1.0
"""Seconds from the loss of the store to the end of a rank that has not ended well by then."""
STOP_S = 20.0
"""Seconds from a signal until a rank that got no further leaves: torchrun kills it after 30."""
OUT = "out"
"""Key of the store that has the folder of the run."""
FINAL_CODES = (2, 3)
"""Exit codes that a restart cannot change."""
_OF_COLLECTIVES = re.compile(r"gloo|NCCL|Connection (closed|reset) by peer")
"""The texts of failed collectives."""


class RankLost(AutobatchError, RuntimeError):  # noqa: N818 - named like ProcessLookupError
    """A collective failed, because another rank ended or cannot be reached."""


class EarlierVerdict(AutobatchError):  # noqa: N818 - an event, not a fault
    """An earlier start of the run ended in a way that a restart cannot change."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.line)
        self.exit_code = verdict.code


class Verdict(Record, frozen=True, kw_only=True):
    """The end of a run over ranks and its cause; ``verdict.json`` in its folder."""

    run_id: str
    restart: int
    rank: int
    host: str
    code: int
    """Exit code, which torchrun replaces by 1."""
    line: str

    def write(self, out: Path) -> None:
        """Write the verdict into the folder of the run; a full disk must not hide the cause."""
        with suppress(OSError):
            write_atomic(out / VERDICT, msgspec.json.format(msgspec.json.encode(self)))


def read_verdict(store: Store, restart: int) -> Verdict | None:
    """Return the first verdict of a start of the run; None if no rank has failed."""
    key = _verdict_key(restart)
    return msgspec.json.decode(store.get(key), type=Verdict) if store.check([key]) else None


def check_earlier_starts(store: Store, restart: int) -> None:
    """Check that no earlier start of the run ended in a way that a restart cannot change.

    Raises:
        EarlierVerdict: one did.
    """
    for earlier in range(restart):
        verdict = read_verdict(store, earlier)
        if verdict is not None and verdict.code in FINAL_CODES:
            raise EarlierVerdict(verdict)


class Waits:
    """The waits of a rank for the others, which all ranks begin in the same order."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended = 0
        self.act = ""
        """The purpose of the newest wait, in the words that follow "could not"."""
        self.limit_s = float("inf")
        """Longest wait in a step."""
        self.limited_since: float | None = None
        """Time at which a wait with that limit began; None outside of one."""

    @contextmanager
    def waiting(self, act: str, *, is_step: bool = False) -> Iterator[None]:
        """Wait for the other ranks within the block.

        Args:
            act: the purpose, in the words that follow "could not".
            is_step: whether the wait of a step limits this one. Other waits may take long: a rank may probe.

        Raises:
            RankLost: a collective failed within the block.
        """
        self.begun += 1
        self.act = act
        self.limited_since = time.monotonic() if is_step else None
        try:
            yield
            self.ended += 1
        except RuntimeError as error:
            if not is_of_collective(error):
                raise
            raise rank_lost(act, error) from error
        finally:
            self.limited_since = None


def rank_lost(act: str, error: Exception) -> RankLost:
    """Return the error of a collective in the user's words."""
    text = (str(error).splitlines() or [""])[0]
    return RankLost(
        f"a rank ended or cannot be reached, so this one could not {act} ({text}): its own log or "
        "the launcher's summary has the cause"
    )


def is_of_collective(error: Exception) -> bool:
    """Check whether an error came from a collective."""
    return isinstance(error, RuntimeError) and _OF_COLLECTIVES.search(str(error)) is not None


class Watch:
    """The thread that watches the other ranks, until this one closes it or fails.

    Args:
        launch: the place of this rank.
        store: the store of the run.
        waits: of this rank.
    """

    def __init__(self, launch: Launch, store: Store, waits: Waits) -> None:
        self._launch = launch
        self._store = store
        self._waits = waits
        self._published = 0
        self._out: Path | None = None
        self._closed = threading.Event()
        self._signals = SignalDeadline()
        # A client of its own: one client serves one call at a time.
        threading.Thread(target=self._run, args=(store.clone(),), name="watch", daemon=True).start()  # type: ignore[attr-defined]

    def enter(self, out: Path) -> None:
        """Set the folder of the run, where a verdict is written; a later start finds it in the store."""
        self._out = out
        if self._launch.rank == 0:
            self._store.set(OUT, str(out.absolute()))

    def fail(self, line: str, code: int) -> int | None:
        """Publish that this rank has failed; see `autobatch.distributed.ranks.Ranks.fail`."""
        # The thread must not end this process while it reports its own failure.
        self._closed.set()
        return self._fail(self._store, line, code)

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._signals.close()

    def _run(self, store: Store) -> None:
        while not self._closed.wait(POLL_S):
            try:
                verdict = read_verdict(store, self._launch.restart)
                late = self._publish_and_find_late(store)
            except RuntimeError:  # the store is gone with the process that kept it
                if not self._closed.wait(GRACE_S):
                    os._exit(1)
                return
            number = self._signals.expired(self._waits.ended)
            if self._closed.is_set():
                return
            if verdict is not None:
                os._exit(verdict.code)
            if late is not None:
                self._end(store, late, 1)
            if number is not None:
                line = (
                    f"stopped by {signal.Signals(number).name} without a checkpoint of this step, because no "
                    f"step ended within {STOP_S:g} s; earlier checkpoints are intact"
                )
                self._end(store, line, 130 if number == signal.SIGINT else 143)

    def _publish_and_find_late(self, store: Store) -> str | None:
        """Publish the waits of this rank; return in words which ranks are late, None if it need not be known.

        The main thread may begin and end waits meanwhile.
        """
        begun, since, limit_s = self._waits.begun, self._waits.limited_since, self._waits.limit_s
        keys = [f"waits/{self._launch.restart}/{rank}" for rank in range(self._launch.world)]
        if begun != self._published:
            store.set(keys[self._launch.rank], str(begun))
            self._published = begun
        if since is None or time.monotonic() - since <= limit_s:
            return None
        of_ranks = [int(store.get(key)) if store.check([key]) else 0 for key in keys]
        late = [rank for rank, other in enumerate(of_ranks) if other < begun]
        if not late:
            return None
        let = "lets" if len(late) == 1 else "let"
        return (
            f"{ranks_in_words(late)} {let} the other ranks wait for more than the "
            f"--collective-timeout of {limit_s:g} s: it hangs, or its step takes that long. Look at its "
            "process, or raise --collective-timeout"
        )

    def _end(self, store: Store, line: str, code: int) -> None:
        """End this process with a verdict, and print it unless another rank has failed before."""
        if self._fail(store, line, code) is None:
            sys.stderr.write(f"autobatch: {line}\n")
        os._exit(code)

    def _fail(self, store: Store, line: str, code: int) -> int | None:
        launch = self._launch
        write_error_file(launch.error_file, line)
        own = Verdict(
            run_id=launch.run_id,
            restart=launch.restart,
            rank=launch.rank,
            host=launch.host,
            code=code,
            line=line,
        )
        first = own
        with suppress(RuntimeError):  # the store is gone
            found = store.compare_set(_verdict_key(launch.restart), "", msgspec.json.encode(own).decode())
            first = msgspec.json.decode(found, type=Verdict)
        if first != own:
            return first.code
        if self._out is not None:
            own.write(self._out)
        return None


class SignalDeadline:
    """The first signal that asked this process to stop, as a thread sees it, and the time to obey it.

    Python runs a handler in the main thread, and not while that waits in a collective. But the interpreter
    writes the number of each signal to a pipe at once.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pipe: tuple[int, int] | None = None
        self._first: tuple[int, float, int] | None = None
        """Signal, time and progress."""
        self._lock = threading.Lock()
        if threading.current_thread() is not threading.main_thread():
            return
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._pipe = (reader, writer)
        if before != -1:  # another library listens
            self.close()
            signal.set_wakeup_fd(before)

    def expired(self, progress: int) -> int | None:
        """Return the signal that came `STOP_S` ago and led to no progress; None if there is none.

        Args:
            progress: a number that grows with every wait that has ended.
        """
        with self._lock:
            if self._first is None and self._pipe is not None:
                numbers = b""
                with suppress(BlockingIOError):
                    numbers = os.read(self._pipe[0], 64)
                asked = next((number for number in numbers if number in STOPPING), None)
                self._first = None if asked is None else (asked, self._clock(), progress)
        if self._first is None:
            return None
        number, since, then = self._first
        return number if progress == then and self._clock() - since > STOP_S else None

    def close(self) -> None:
        """Stop listening."""
        with self._lock:
            if self._pipe is not None:
                signal.set_wakeup_fd(-1)
                for end in self._pipe:
                    os.close(end)
                self._pipe = None


def ranks_in_words(ranks: list[int]) -> str:
    """Return ``rank 1`` or ``ranks 1, 2``."""
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def _verdict_key(restart: int) -> str:
    return f"verdict/{restart}"
