"""What fitted on this machine: remembered by everything that changes the answer.

One JSON file a key under ``fits`` of the data directory. A file that cannot be used is ignored with a logged
reason and left where it is: a newer autobatch may have written it.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from autobatch.core.records import LimitedBy, UpperBoundBy
from autobatch.device.profiles import save_or_explain

SCHEMA = 1


KeyValue = str | int | None


Positive = Annotated[int, msgspec.Meta(gt=0)]


DIGEST = re.compile("[0-9a-f]{16}")
"""What stands in a key for something too long to keep."""


_LOG = logging.getLogger(__name__)


class CachedLimit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The largest micro-batch of a workload on a device, as it was found."""

    schema: int = SCHEMA
    key: dict[str, KeyValue]
    """Everything that changes the answer, by name; ``workload`` names the workload itself."""
    micro_batch: Positive
    limited_by: LimitedBy
    upper_bound_by: UpperBoundBy
    cap: Positive | None = None
    """The cap of the search in samples, where there was one."""
    date: str
    """ISO date, or date and time, of the day it was found."""
    traced_bytes: Positive | None = None
    """Peak reserved at ``micro_batch`` as a trace alone predicts it, on a card that runs have measured."""
    measured_bytes: Positive | None = None
    """Peak reserved at ``micro_batch`` as it was."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One field of the key that is not what it was."""

    field: str
    old: KeyValue
    new: KeyValue

    def __str__(self) -> str:
        """Such as ``torch 2.12.0 → 2.13.0``; a digest says only that something changed."""
        if DIGEST.fullmatch(str(self.old)) and DIGEST.fullmatch(str(self.new)):
            return f"{self.field} changed"
        old, new = ("none" if value is None else value for value in (self.old, self.new))
        return f"{self.field} {old} → {new}"


class StaleEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A fit of the same workload, found under other circumstances."""

    fit: CachedLimit
    changed: tuple[Change, ...]

    def __str__(self) -> str:
        """Such as ``saved fit of 2026-11-20 is stale: torch 2.12.0 → 2.13.0``."""
        return f"saved fit of {self.fit.date} is stale: {', '.join(map(str, self.changed))}"


def store(fit: CachedLimit, home: Path) -> Path:
    """Save a fit, whole or not at all, in the place of an earlier one of the same key; return its path.

    Raises:
        InputError: the directory cannot be written.
    """
    content = msgspec.json.format(msgspec.json.encode(fit, order="deterministic"))
    return save_or_explain(entry_path(fit.key, home), content + b"\n", what="fit")


def lookup(key: Mapping[str, KeyValue], home: Path) -> CachedLimit | StaleEntry | None:
    """Look up what fitted before.

    Args:
        key: everything that changes the answer, by name.
        home: the data directory.

    Returns:
        The fit of exactly this key; else the fit of the same ``workload`` that differs in the fewest fields
        (the newest of those), as :class:`StaleEntry`; else ``None``.
    """
    exact = _read(entry_path(key, home))
    if exact is not None and _known(exact.key) == _known(key):
        return exact
    if key.get("workload") is None:
        return None
    relatives = [
        StaleEntry(fit=fit, changed=_changes(fit.key, key))
        for fit in _read_all(home)
        if fit.key.get("workload") == key["workload"] and _known(fit.key) != _known(key)
    ]
    newest_first = sorted(relatives, key=lambda stale: stale.fit.date, reverse=True)
    return min(newest_first, key=lambda stale: len(stale.changed), default=None)


def prediction_errors(home: Path, devices: Iterable[str]) -> list[float]:
    """How far traces were off on cards of these names: measured ÷ predicted − 1, for every fit that knows."""
    names = {name.casefold() for name in devices}
    return [
        fit.measured_bytes / fit.traced_bytes - 1
        for fit in _read_all(home)
        if str(fit.key.get("device")).casefold() in names and fit.traced_bytes and fit.measured_bytes
    ]


def entry_path(key: Mapping[str, KeyValue], home: Path) -> Path:
    """Where the fit of a key is kept."""
    canonical = msgspec.json.encode(_known(key), order="deterministic")
    return home / "fits" / f"{hashlib.sha256(canonical).hexdigest()}.json"


def _known(key: Mapping[str, KeyValue]) -> dict[str, KeyValue]:
    """A field that is not known is as good as absent."""
    return {field: value for field, value in key.items() if value is not None}


def _changes(old: Mapping[str, KeyValue], new: Mapping[str, KeyValue]) -> tuple[Change, ...]:
    return tuple(
        Change(field=field, old=old.get(field), new=new.get(field))
        for field in sorted(old.keys() | new.keys())
        if old.get(field) != new.get(field)
    )


def _read_all(home: Path) -> Iterator[CachedLimit]:
    try:
        files = sorted((home / "fits").glob("*.json"))
    except OSError as error:
        _LOG.warning("saved fits under %s are ignored: %s", home, error)
        return
    for file in files:
        fit = _read(file)
        if fit is not None:
            yield fit


def _read(file: Path) -> CachedLimit | None:
    """Read one file; one that is absent is nothing, one that cannot be used is nothing with a reason."""
    try:
        found = msgspec.json.decode(file.read_bytes())
        schema = found.get("schema") if isinstance(found, dict) else None
        if isinstance(schema, int) and schema > SCHEMA:
            _LOG.warning("saved fit %s is ignored: schema %d, this autobatch reads %d", file, schema, SCHEMA)
            return None
        return msgspec.convert(found, CachedLimit)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        _LOG.warning("saved fit %s is ignored: %s", file, error)
        return None
