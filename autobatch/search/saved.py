"""Limits that were found on this machine, by everything that changes them, with the programs of their steps.

One JSON file per key, under ``profiles/<device>/limits`` of the data directory. A file that cannot be used is
ignored with a logged reason and left alone: a newer autobatch may have written it.

A later probe runs the saved limit first. A run that agrees with the saved programs to the byte ends the
search; otherwise both are only a guess.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from autobatch.core.errors import InputError
from autobatch.core.files import UNREADABLE, read_json
from autobatch.core.progress import Progress
from autobatch.core.records import Probe
from autobatch.core.text import printable
from autobatch.core.version import __version__
from autobatch.device.profiles import save_or_explain
from autobatch.footprint.program import Program
from autobatch.rehearsal.setup import KeyValue

SCHEMA = 4
CLOSE_BUDGETS = 0.05
"""Share within which two budgets that follow free memory count as the same."""

_LOG = logging.getLogger(__name__)


class SavedLimit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The largest micro-batch of a workload on a device, as it was found."""

    schema: int = SCHEMA
    autobatch: str = __version__
    """The version that wrote it. Another one may record other events."""
    key: dict[str, KeyValue]
    """Everything that changes the answer, by name; ``workload`` names the workload."""
    micro_batch: Annotated[int, msgspec.Meta(gt=0, le=2**63 - 1)]
    date: str
    """ISO date on which it was found."""
    packed: bytes = b""
    """The programs of its steps; see `SavedLimit.programs`."""

    def programs(self) -> tuple[Program, ...]:
        """Return the programs; none if they are unreadable, or of another version."""
        try:
            packed = zlib.decompress(self.packed) if self.autobatch == __version__ else b""
            return msgspec.msgpack.decode(packed, type=tuple[Program, ...])
        except (zlib.error, *UNREADABLE):
            return ()


def recall(key: Mapping[str, KeyValue], home: Path, *, may_vary: bool = False) -> SavedLimit | None:
    """Return the saved limit of a key; None if there is none.

    Args:
        key: everything that changes the answer.
        home: data directory.
        may_vary: the budget follows free memory, so the limit of a close budget is taken, too.
    """
    file = path_of(key, home)
    limit = _read(file)
    if limit is not None and _known(limit.key) == _known(key):
        return limit
    others = map(_read, sorted(file.parent.glob("*.json")) if may_vary else ())
    near = (other for other in others if other is not None and _is_near(other.key, key))
    return max(near, key=lambda other: other.date, default=None)


def keep(
    probe: Probe,
    programs: tuple[Program, ...],
    key: Mapping[str, KeyValue],
    *,
    home: Path,
    progress: Progress,
) -> Path | None:
    """Save the answer of a search that ran to its end, with the programs of its steps, and return its file.

    It takes the place of an earlier limit of the same key.

    Returns:
        None, with a note if the directory is not writable. Without one, the search was stopped, or not the
        budget refused a size.
    """
    if probe.upper_bound_by is None or any(attempt.is_below_budget for attempt in probe.attempts):
        return None
    limit = SavedLimit(
        key=dict(key),
        micro_batch=probe.micro_batch,
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        packed=zlib.compress(msgspec.msgpack.encode(programs)) if programs else b"",
    )
    content = msgspec.json.format(msgspec.json.encode(limit, order="deterministic"))
    try:
        return save_or_explain(path_of(key, home), content + b"\n")
    except InputError as error:
        progress.note(f"the limit was not saved: {error}")
        return None


def path_of(key: Mapping[str, KeyValue], home: Path) -> Path:
    """Return the file of a key's limit."""
    canonical = msgspec.json.encode(_known(key), order="deterministic")
    device = re.sub(r"[^a-z0-9]+", "-", str(key.get("device")).casefold()).strip("-")
    folder = home / "profiles" / (device or "device") / "limits"
    return folder / f"{hashlib.sha256(canonical).hexdigest()}.json"


def _known(key: Mapping[str, KeyValue]) -> dict[str, KeyValue]:
    """Return a key without its unknown fields, which count as absent."""
    return {name: value for name, value in key.items() if value is not None}


def _is_near(saved: Mapping[str, KeyValue], key: Mapping[str, KeyValue]) -> bool:
    """Return whether two keys differ in their budgets only, by little."""
    old, new = saved.get("budget_bytes"), key.get("budget_bytes")
    is_close = isinstance(old, int) and isinstance(new, int) and abs(new - old) <= CLOSE_BUDGETS * new
    return is_close and _known({**saved, "budget_bytes": new}) == _known(key)


def _read(file: Path) -> SavedLimit | None:
    """Read one file. Return None if it is absent, or cannot be used, which is logged with the reason."""
    if not file.is_file():
        return None
    try:
        limit = msgspec.convert(read_json(file), SavedLimit)
    except (InputError, *UNREADABLE) as error:
        reason = str(error)
    else:
        if limit.schema == SCHEMA:
            return limit
        reason = f"schema {limit.schema}, this autobatch reads {SCHEMA}"
    _LOG.warning("%s", printable(f"the saved limit {file} is ignored: {reason}"))
    return None
