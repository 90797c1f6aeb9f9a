"""Limits that were found on this machine, by everything that changes them, with their traced steps.

One JSON file per key, under ``profiles/<device>/limits`` of the data directory, beside the saved hardware
profile of that device. A file that cannot be used is ignored with a logged reason and left alone: a newer
autobatch may have written it.

A trace takes seconds, and a later probe of the same workload needs the same one. It is used only if the run
that confirms the limit allocated exactly what it says, so that changed code is traced again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from autobatch.core.errors import InputError
from autobatch.core.files import UNREADABLE, read_json, write_atomic
from autobatch.core.records import LimitedBy, UpperBoundBy
from autobatch.core.text import printable
from autobatch.core.version import __version__
from autobatch.device.allocator.trace import Trace
from autobatch.device.profiles import profile_folder, save_or_explain
from autobatch.footprint.fit import Footprint
from autobatch.setup.setup import KeyValue

SCHEMA = 3
SUFFIX = ".trace"
"""Ending of the file with the trace of a limit."""
Positive = Annotated[int, msgspec.Meta(gt=0, le=2**63 - 1)]
ASKED_FOR = {
    "budget_bytes", "device", "device_kind", "total_bytes", "precision", "gradient_dtype", "max_grad_norm",
    "ema", "whole_batch", "keeps_batches", "parallel",
}  # fmt: skip
"""Fields of the key that options change: an answer to another question is not stale."""
CLOSE_BUDGETS = 0.05
"""Share within which two budgets that follow free memory count as the same."""

_LOG = logging.getLogger(__name__)


class CachedLimit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The largest micro-batch of a workload on a device, as it was found."""

    schema: int = SCHEMA
    key: dict[str, KeyValue]
    """Everything that changes the answer, by name; ``workload`` names the workload."""
    micro_batch: Positive
    limited_by: LimitedBy
    upper_bound_by: UpperBoundBy
    multiple: Positive = 1
    """Micro-batches are multiples of it."""
    cap: Positive | None = None
    """Cap of the search in samples; None if there was none."""
    date: str
    """ISO date on which it was found."""


class StaleLimit(NamedTuple):
    """A saved limit of the same workload under another key."""

    limit: CachedLimit
    changed: list[str]
    """Names of the fields that differ."""
    has_close_budget: bool
    """True if only the budget differs, by at most `CLOSE_BUDGETS`."""

    @property
    def is_other_question(self) -> bool:
        """True if options alone explain every change."""
        return set(self.changed) <= ASKED_FOR

    def __str__(self) -> str:
        """Return for example ``the limit saved on 2026-11-20 is stale: model, torch changed``."""
        return f"the limit saved on {self.limit.date} is stale: {', '.join(self.changed)} changed"


def store(limit: CachedLimit, home: Path) -> Path:
    """Save a limit atomically in place of an earlier one of the same key, and return its path.

    Raises:
        InputError: the directory is not writable.
    """
    content = msgspec.json.format(msgspec.json.encode(limit, order="deterministic"))
    return save_or_explain(entry_path(limit.key, home), content + b"\n")


def lookup(key: Mapping[str, KeyValue], home: Path) -> CachedLimit | StaleLimit | None:
    """Look up the limit of a key.

    Args:
        key: everything that changes the answer, by name.
        home: the data directory.

    Returns:
        The limit of exactly this key; else the limit of the same ``workload`` that differs in the fewest
        fields (the newest of those) as a `StaleLimit`; else None.
    """
    exact = _read(entry_path(key, home))
    if exact is not None and _known(exact.key) == _known(key):
        return exact
    if key.get("workload") is None:
        return None
    relatives = [
        _compared(limit, key)
        for limit in _read_all(home)
        if limit.key.get("workload") == key["workload"] and _known(limit.key) != _known(key)
    ]
    newest_first = sorted(relatives, key=lambda stale: stale.limit.date, reverse=True)
    return min(newest_first, key=lambda stale: len(stale.changed), default=None)


def entry_path(key: Mapping[str, KeyValue], home: Path) -> Path:
    """Return the file of a key's limit."""
    canonical = msgspec.json.encode(_known(key), order="deterministic")
    folder = profile_folder(str(key.get("device")), user_dir=home)
    return folder / "limits" / f"{hashlib.sha256(canonical).hexdigest()}.json"


def _known(key: Mapping[str, KeyValue]) -> dict[str, KeyValue]:
    """Leave out the fields that are unknown: they count as absent."""
    return {field: value for field, value in key.items() if value is not None}


def _compared(limit: CachedLimit, key: Mapping[str, KeyValue]) -> StaleLimit:
    changed = sorted(name for name in limit.key.keys() | key.keys() if limit.key.get(name) != key.get(name))
    old, new = limit.key.get("budget_bytes"), key.get("budget_bytes")
    is_close = isinstance(old, int) and isinstance(new, int) and abs(new - old) <= CLOSE_BUDGETS * new
    return StaleLimit(limit, changed, is_close and changed == ["budget_bytes"])


def _read_all(home: Path) -> Iterator[CachedLimit]:
    folder = home / "profiles"
    try:
        files = sorted(folder.glob("*/limits/*.json"))
    except OSError as error:
        _LOG.warning("%s", printable(f"the saved limits under {folder} are ignored: {error}"))
        return
    for file in files:
        limit = _read(file)
        if limit is not None:
            yield limit


def _read(file: Path) -> CachedLimit | None:
    """Read one file. Return None if it is absent, or cannot be used, which is logged with the reason."""
    if not file.is_file():
        return None
    try:
        limit = msgspec.convert(read_json(file), CachedLimit)
    except (InputError, *UNREADABLE) as error:
        _LOG.warning("%s", printable(f"the saved limit {file} is ignored: {error}"))
        return None
    if limit.schema == SCHEMA:
        return limit
    _LOG.warning(
        "the saved limit %s is ignored: schema %s, this autobatch reads %s", file, limit.schema, SCHEMA
    )
    return None


class _SavedTrace(msgspec.Struct, frozen=True, array_like=True):
    """A trace with the version that wrote it; another version may trace other events."""

    autobatch: str
    step: Footprint


def save_trace(step: Footprint | None, limit: Path) -> None:
    """Save the trace of a limit beside its file, if there is a trace and the folder is writable."""
    if step is None:
        return
    with suppress(OSError, InputError):
        write_atomic(limit.with_suffix(SUFFIX), msgspec.msgpack.encode(_SavedTrace(__version__, step)))


def find_trace(limit: Path, micro_batch: int, ran: Trace | None) -> Footprint | None:
    """Return the saved trace of a limit.

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
        saved = msgspec.msgpack.decode(limit.with_suffix(SUFFIX).read_bytes(), type=_SavedTrace)
    except (OSError, *UNREADABLE):
        return None
    agrees = saved.autobatch == __version__ and saved.step.program.agrees_with(micro_batch, ran)
    return saved.step if agrees else None
