"""The traced step of a saved limit, kept beside it.

A trace takes seconds, and a later probe of the same workload needs the same one. It is used only if the run
that confirms the limit allocated exactly what it says, so that changed code is traced again. If a step is too
long to be traced, that is kept, and holds while its runs allocate in the same order.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from autobatch.core.errors import InputError
from autobatch.core.files import UNREADABLE, write_atomic
from autobatch.core.version import __version__
from autobatch.device.allocator.trace import FREE, Trace
from autobatch.footprint.predict import Footprint

SUFFIX = ".trace"


class Untraced(NamedTuple):
    """A step that is too long to be traced."""

    reason: str
    order: str
    """`order_of` a run of it, by which it is recognised."""


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    """A trace with the version that wrote it; another version may trace other events."""

    autobatch: str
    step: Footprint | Untraced


def order_of(ran: Trace) -> str:
    """Return a digest of the order in which a run takes and frees blocks, which most sizes have alike."""
    order = [~block if size == FREE else block for block, size in ran.canonical().events]
    return hashlib.sha256(msgspec.msgpack.encode(order)).hexdigest()[:16]


def keep_trace(step: Footprint | Untraced, limit: Path) -> None:
    """Keep the trace of a limit, or the reason why there is none, if its folder is writable."""
    with suppress(OSError, InputError):
        write_atomic(limit.with_suffix(SUFFIX), msgspec.msgpack.encode(_Kept(__version__, step)))


def find_trace(limit: Path, micro_batch: int, ran: Trace | None) -> Footprint | str | None:
    """Return the kept trace of a limit, or the reason if it would take too long.

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
    if kept.autobatch != __version__:
        return None
    if isinstance(kept.step, Untraced):
        return kept.step.reason if kept.step.order == order_of(ran) else None
    return kept.step if kept.step.program.agrees_with(micro_batch, ran) else None
