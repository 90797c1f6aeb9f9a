"""The other ranks, watched by two threads of this one: they fail, they stop, or they get no further.

A rank that waits in a collective neither handles a signal nor learns that another one has failed. So ranks
publish in the store of the launcher what the others must know:

    verdict/START          the first failure of this start of the ranks, with its exit code and cause
    start/…/signs/RANK     the sign of life of a rank, a few times a second: what its main thread does, and
                           how far it has got

One thread talks with the store, which may be on a host that no longer answers. The other one judges what was
heard, and ends the process whatever the main thread waits for: after a verdict, with its exit code; after a
signal that led to no progress; and with a verdict of its own if for longer than the limit

- the store or a rank was silent: a process is stopped, a host or the network is gone;
- this rank waited for one that got no further: its main thread hangs;
- this rank waited, and no rank got further: their messages do not arrive.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
from torch.distributed import Store  # type: ignore[attr-defined]

from autobatch.core.errors import AutobatchError
from autobatch.core.files import write_atomic
from autobatch.core.records import Record
from autobatch.core.signals import Arrivals
from autobatch.distributed.ranks import VERDICT, Launch, write_error_file

POLL_S = 0.25
"""Seconds from one sign of life to the next."""
GRACE_S = 1.0
"""Seconds from the loss of the store to the end of a rank that has not ended well by then."""
PUBLISH_S = 5.0
"""Seconds in which the store must take a verdict; without an answer, this rank counts as the first."""
STOP_S = 20.0
"""Seconds from a signal until a rank that got no further leaves: torchrun kills it after 30."""
OUT = "out"
"""Key of the store that has the folder of the run."""
FINAL_CODES = (2, 3)
"""Exit codes that a restart cannot change."""
_OF_COLLECTIVES = re.compile(r"gloo|NCCL|Connection (closed|reset) by peer")
"""The texts of failed collectives."""
_PLACE_OF_SOURCE = re.compile(r"^\[[^\]]*\] ?")
"""The file of torch at the front of them."""


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


def publish_verdict(store: Store, launch: Launch, out: Path | None, line: str, code: int) -> int | None:
    """Publish that this rank has failed: the first verdict of a start counts.

    Args:
        store: the store of the run.
        launch: the place of this rank.
        out: folder of the run; None if it is not known yet.
        line: the cause.
        code: exit code.

    Returns:
        The exit code of the rank that failed first; None if it is this one.
    """
    write_error_file(launch.error_file, line)
    own = Verdict(
        run_id=launch.run_id, restart=launch.restart, rank=launch.rank, host=launch.host, code=code, line=line
    )
    if out is not None and not (out / VERDICT).exists():
        own.write(out)  # first, because the store may not answer
    first = own
    with suppress(RuntimeError):  # the store is gone
        found = store.compare_set(_key(launch.restart), "", msgspec.json.encode(own).decode())
        first = msgspec.json.decode(found, type=Verdict)
        if out is not None:
            first.write(out)
    return None if first == own else first.code


def read_verdict(store: Store, restart: int) -> Verdict | None:
    """Return the first verdict of a start of the run; None if no rank has failed."""
    key = _key(restart)
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


def rank_lost(act: str, error: Exception) -> RankLost:
    """Return the error of a collective in the user's words."""
    text = (str(error).splitlines() or [""])[0].partition(" This is typically")[0]
    text = _PLACE_OF_SOURCE.sub("", text).rstrip(".")
    return RankLost(
        f"a rank ended or cannot be reached, so this one could not {act} ({text}): its own log or "
        "the launcher's summary has the cause"
    )


def is_of_collective(error: Exception) -> bool:
    """Check whether an error came from a collective."""
    return isinstance(error, RuntimeError) and _OF_COLLECTIVES.search(str(error)) is not None


def _key(restart: int) -> str:
    return f"verdict/{restart}"


class Sign(NamedTuple):
    """The sign of life of a rank."""

    beat: int = 0
    """Grows with every sign."""
    progress: int = 0
    """Grows whenever the main thread gets further."""
    begun: int = 0
    """Times that the rank has begun to wait for the others: the same for all ranks in the same wait."""
    is_waiting: bool = False
    doing: str = "starting"
    """The work of the main thread, for example ``validating``."""


class Heard(NamedTuple):
    """The newest sign of a rank, with times of the clock of this one in seconds."""

    sign: Sign
    beat_at: float
    """Time of the newest sign."""
    progress_at: float
    """Time of the newest progress."""


class Activity:
    """The work of the main thread of a rank. All ranks begin their waits for each other in the same order."""

    def __init__(self) -> None:
        self.limit_s = float("inf")
        """Longest wait without a sign of life."""
        self.begun = 0
        self.ended = 0
        self.progress = 0
        self.doing = Sign().doing
        self.waits_for = ""
        """Purpose of the newest wait, in the words that follow "could not"."""
        self.since: float | None = None
        """Time at which the present wait began; None outside of one."""

    def sign(self, doing: str) -> None:
        """Show that the main thread gets further."""
        self.doing = doing
        self.progress += 1

    @contextmanager
    def waiting(self, act: str) -> Iterator[None]:
        """Wait for the other ranks within the block.

        Args:
            act: the purpose, in the words that follow "could not".

        Raises:
            RankLost: a collective failed within the block.
        """
        self.waits_for = act
        self.begun += 1
        self.progress += 1
        self.since = time.monotonic()
        try:
            yield
            self.ended += 1
        except RuntimeError as error:
            if not is_of_collective(error):
                raise
            raise rank_lost(act, error) from error
        finally:
            self.since = None
            self.progress += 1

    def as_sign(self, beat: int) -> Sign:
        """Return the sign of life that the other ranks get; the main thread may go on meanwhile."""
        is_waiting = self.since is not None
        doing = f"waiting to {self.waits_for}" if is_waiting else self.doing
        return Sign(beat, self.progress, self.begun, is_waiting, doing)


class Watch:
    """The threads that watch the other ranks, until this one closes them or fails.

    Args:
        launch: the place of this rank.
        store: the store of the run.
        activity: of this rank.
        keys: keys of the store for the signs of all ranks, which exist.
    """

    def __init__(self, launch: Launch, store: Store, activity: Activity, keys: Sequence[str]) -> None:
        self._launch = launch
        self._store = store
        self._activity = activity
        self._keys = list(keys)
        self._verdict: Verdict | None = None
        self._heard = [Heard(Sign(), time.monotonic(), time.monotonic())] * launch.world
        self._is_store_gone = False
        self._out: Path | None = None
        self._closed = threading.Event()
        self.signals = SignalDeadline()
        """The signals to this process."""
        # A client of its own: one client serves one call at a time, and the main thread may be within a call.
        self._listening = store.clone()  # type: ignore[attr-defined]
        for name, run in (("signs of ranks", self._exchange), ("watch", self._judge)):
            threading.Thread(target=run, name=name, daemon=True).start()

    def enter(self, out: Path) -> None:
        """Set the folder of the run, where a verdict is written; a later start finds it in the store."""
        self._out = out
        if self._launch.rank == 0:
            self._store.set(OUT, str(out.absolute()))

    def fail(self, line: str, code: int) -> int | None:
        """Publish that this rank has failed; see `autobatch.distributed.ranks.Ranks.fail`."""
        # The threads must not end this process while it reports its own failure.
        self._closed.set()
        return self._publish(line, code)

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self.signals.arrivals.close()

    def _exchange(self) -> None:
        """Publish the sign of this rank and read those of all, until the store is gone."""
        store, beat = self._listening, 0
        with suppress(RuntimeError):  # the store is gone with the process that kept it
            while not self._closed.wait(POLL_S):
                beat += 1
                own = self._activity.as_sign(beat)
                store.set(self._keys[self._launch.rank], msgspec.json.encode(own).decode())
                self._verdict = read_verdict(store, self._launch.restart)
                signs = [_decode(one) for one in store.multi_get(self._keys)]
                now = time.monotonic()
                self._heard = [_heard(*one, now) for one in zip(self._heard, signs, strict=True)]
        self._is_store_gone = True

    def _judge(self) -> None:
        looked_at = time.monotonic()
        while not self._closed.wait(POLL_S):
            now, limit_s = time.monotonic(), self._activity.limit_s
            if now - looked_at > limit_s / 2:
                # This process was stopped itself, and has heard nothing meanwhile.
                self._heard = [Heard(one.sign, now, now) for one in self._heard]
            looked_at = now
            if self._is_store_gone:
                if not self._closed.wait(GRACE_S):
                    line = f"the store of the run at {self._launch.address}:{self._launch.port} is gone"
                    self._end(f"{line}: the launcher that kept it, or its host, has ended", 1)
                return
            number = self.signals.expired(self._activity.ended)
            if self._verdict is not None and not self._closed.is_set():
                os._exit(self._verdict.code)
            if number is not None:
                line = (
                    f"stopped by {signal.Signals(number).name} without a checkpoint of this step, because no "
                    f"step ended within {STOP_S:g} s; earlier checkpoints are intact"
                )
                self._end(line, 130 if number == signal.SIGINT else 143)
            # A launcher may send other signals to ranks that obey already.
            if self.signals.arrivals.are_again(signal.SIGINT):
                self._end("stopped at once by a second SIGINT; complete checkpoints are intact", 130)
            fault = self._fault(self._heard, now)
            if fault is not None:
                self._end(fault, 1)

    def _fault(self, heard: Sequence[Heard], now: float) -> str | None:
        """Return in words which rank is silent or gets no further; None if all is well."""
        limit_s, since, begun = self._activity.limit_s, self._activity.since, self._activity.begun
        own, limit = self._launch.rank, f"more than the --collective-timeout of {self._activity.limit_s:g} s"
        if now - heard[own].beat_at > limit_s:
            return (
                f"the store of the run at {self._launch.address}:{self._launch.port} has not answered for "
                f"{limit}: the host of rank 0, or the network to it, is gone"
            )
        others = [rank for rank in range(len(heard)) if rank != own]
        silent = [rank for rank in others if now - heard[rank].beat_at > limit_s]
        if silent:
            return (
                f"{ranks_in_words(silent)} showed no sign of life for {limit}, last seen "
                f"{_doing(heard, silent)}: the process is stopped, or its host or the network is gone"
            )
        if since is None or now - since <= limit_s:
            return None
        still = [rank for rank in others if now - heard[rank].progress_at > limit_s]
        late = [rank for rank in others if heard[rank].sign.begun < begun]
        busy = [rank for rank in late if not heard[rank].sign.is_waiting] or late
        hanging = [rank for rank in busy if rank in still]
        if hanging:
            let = "lets" if len(hanging) == 1 else "let"
            return (
                f"{ranks_in_words(hanging)} {let} the other ranks wait for {limit}, while "
                f"{_doing(heard, hanging)}: it hangs or is stopped, or that takes so long. Look at its "
                "process, or raise --collective-timeout"
            )
        if late or still != others:
            return None
        return (
            f"no rank got further for {limit}, while they were {_doing(heard, [own, *others])}: check the "
            "network between the hosts, or raise --collective-timeout"
        )

    def _end(self, line: str, code: int) -> None:
        """End this process with a verdict, and print it unless another rank has failed before."""
        first = self._publish(line, code)
        if first is None:
            sys.stderr.write(f"autobatch: {line}\n")
        os._exit(code if first is None else first)

    def _publish(self, line: str, code: int) -> int | None:
        """Publish a verdict in a thread, because the store may not answer; see `publish_verdict`."""
        codes: list[int | None] = []

        def publish() -> None:
            codes.append(publish_verdict(self._listening, self._launch, self._out, line, code))

        thread = threading.Thread(target=publish, daemon=True)
        thread.start()
        thread.join(PUBLISH_S)
        return codes[0] if codes else None


class SignalDeadline:
    """The first signal that asked this process to stop, as a thread sees it, and the time to obey it.

    Python runs a handler in the main thread, and not while that waits in a collective.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[int, float, int] | None = None
        """Signal, time and progress."""
        self.arrivals = Arrivals()

    def expired(self, progress: int) -> int | None:
        """Return the signal that came `STOP_S` ago and led to no progress; None if there is none.

        Args:
            progress: a number that grows with every wait that has ended.
        """
        if self._first is None:
            found = self.arrivals.read()
            self._first = (found[0][0], self._clock(), progress) if found else None
        if self._first is None:
            return None
        number, since, then = self._first
        return number if progress == then and self._clock() - since > STOP_S else None


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ``rank 1`` or ``ranks 1, 2``."""
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def _decode(content: bytes) -> Sign:
    """Return a sign; a rank that has only just joined has written nothing yet."""
    return msgspec.json.decode(content, type=Sign) if content else Sign()


def _heard(before: Heard, sign: Sign, now: float) -> Heard:
    return Heard(
        sign,
        before.beat_at if sign.beat == before.sign.beat else now,
        before.progress_at if sign.progress == before.sign.progress else now,
    )


def _doing(heard: Sequence[Heard], ranks: Sequence[int]) -> str:
    """Return what ranks do: ``saving a checkpoint``, or with each of them named if they do several things."""
    acts = [heard[rank].sign.doing for rank in ranks]
    if len(set(acts)) == 1:
        return acts[0]
    return ", ".join(f"{act} (rank {rank})" for rank, act in zip(ranks, acts, strict=True))
