"""The traced step of a saved limit, kept beside it.

A trace takes seconds, and a later probe of the same workload needs the same one. It is used only if the run
that confirms the limit allocated exactly what it says, so that changed code is traced again.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from autobatch.core.errors import InputError
from autobatch.core.files import UNREADABLE, write_atomic
from autobatch.core.version import __version__
from autobatch.device.allocator.trace import Trace
from autobatch.footprint.predict import Footprint

SUFFIX = ".trace"


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    """A trace with the version that wrote it; another version may trace other events."""

    autobatch: str
    step: Footprint


def keep_trace(step: Footprint, limit: Path) -> None:
    """Keep the trace of a limit, if its folder is writable."""
    with suppress(OSError, InputError):
        write_atomic(limit.with_suffix(SUFFIX), msgspec.msgpack.encode(_Kept(__version__, step)))


def find_trace(limit: Path, micro_batch: int, ran: Trace | None) -> Footprint | None:
    """Return the kept trace of a limit.

    Args:
        limit: the file of the limit.
        micro_batch: samples of a run.
        ran: the events of that run; None if they were not recorded.

    Returns:
        None if there is none, or if its events differ from those that ran.
    """
    if ran is None:
        return None
    try:
        kept = msgspec.msgpack.decode(limit.with_suffix(SUFFIX).read_bytes(), type=_Kept)
    except (OSError, *UNREADABLE):
        return None
    is_same = kept.autobatch == __version__ and kept.step.program.agrees_with(micro_batch, ran)
    return kept.step if is_same else None
