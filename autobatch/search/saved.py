"""Limits that were found on this machine, with the programs of their steps.

One JSON file per key, under ``profiles/<device>/limits`` of the data directory. The budget is no part of the
key: the programs say what fits in any. A file that cannot be used is ignored with a logged reason.

A later probe first runs what the programs say. A run that agrees with them to the byte ends the search;
otherwise they are only a guess.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec

from autobatch.core import __version__
from autobatch.core.files import UNREADABLE, write_atomic
from autobatch.core.progress import Progress
from autobatch.core.text import printable
from autobatch.footprint.program import Program
from autobatch.rehearsal.setup import KeyValue

_LOG = logging.getLogger(__name__)


class SavedLimit(msgspec.Struct, frozen=True, kw_only=True):
    """The largest micro-batch of a workload on a device, as it was found."""

    micro_batch: Annotated[int, msgspec.Meta(gt=0, le=2**63 - 1)]
    programs: tuple[Program, ...] = ()
    """The steps at any size, in each order that ran."""
    date: str = msgspec.field(default_factory=lambda: datetime.now(UTC).date().isoformat())
    """ISO date on which it was found."""


def recall(key: Mapping[str, KeyValue], home: Path) -> SavedLimit | None:
    """Return the saved limit of a key under any budget; None if there is none."""
    file = path_of(key, home)
    try:
        return msgspec.json.decode(file.read_bytes(), type=SavedLimit) if file.is_file() else None
    except (OSError, *UNREADABLE) as error:
        _LOG.warning("%s", printable(f"the saved limit {file} is ignored: {error}"))
        return None


def keep(limit: SavedLimit, key: Mapping[str, KeyValue], home: Path, progress: Progress) -> Path | None:
    """Save a limit in place of an earlier one, and return its file; None if that fails, with a note."""
    file = path_of(key, home)
    try:
        return write_atomic(file, msgspec.json.encode(limit) + b"\n")
    except OSError as error:
        progress.note(
            f"the limit was not saved: {file} cannot be written: {error.strerror or error}; set "
            "AUTOBATCH_HOME to a writable directory"
        )
        return None


def path_of(key: Mapping[str, KeyValue], home: Path) -> Path:
    """Return the file of a key's limit, whatever its budget."""
    known = {name: value for name, value in key.items() if value is not None and name != "budget_bytes"}
    known["autobatch"] = __version__  # another version may record other events
    digest = hashlib.sha256(msgspec.json.encode(known, order="deterministic")).hexdigest()
    device = re.sub(r"[^a-z0-9]+", "-", str(key.get("device")).casefold()).strip("-")
    return home / "profiles" / (device or "device") / "limits" / f"{digest}.json"
