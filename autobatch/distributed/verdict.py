"""The end of a run over ranks: its first failure, which all ranks, the launcher and later starts learn of."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import msgspec
from torch.distributed import Store  # type: ignore[attr-defined]

from autobatch.core.errors import AutobatchError
from autobatch.core.files import write_atomic
from autobatch.core.records import Record
from autobatch.distributed.ranks import VERDICT, Launch, write_error_file

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
