"""Limits that were found on this machine, with the programs of their steps.

One JSON file per key, under ``profiles/<device>/limits`` of the data directory. The budget is no part of the
key: the programs say what fits in any. A file that cannot be used is ignored with a logged reason.

A later probe first runs what the programs say. A run that agrees with them to the byte ends the search;
otherwise they are only a guess.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from autobatch.core.errors import InputError
from autobatch.core.files import UNREADABLE, read_json, write_atomic
from autobatch.core.progress import Progress
from autobatch.core.text import printable
from autobatch.core.version import __version__
from autobatch.footprint.program import Program
from autobatch.rehearsal.setup import KeyValue

_LOG = logging.getLogger(__name__)


class SavedLimit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The largest micro-batch of a workload on a device, as it was found."""

    micro_batch: Annotated[int, msgspec.Meta(gt=0, le=2**63 - 1)]
    date: str = ""
    """ISO date on which it was found."""
    autobatch: str = __version__
    """The version that found it. Another one may record other events."""
    packed: bytes = b""
    """The programs of its steps; see `SavedLimit.programs`."""

    def programs(self) -> tuple[Program, ...]:
        """Return the programs; none if they are unreadable, or of another version."""
        try:
            packed = zlib.decompress(self.packed) if self.autobatch == __version__ else b""
            return msgspec.msgpack.decode(packed, type=tuple[Program, ...])
        except (zlib.error, *UNREADABLE):
            return ()


def recall(key: Mapping[str, KeyValue], home: Path) -> SavedLimit | None:
    """Return the saved limit of a key under any budget; None if there is none."""
    file = path_of(key, home)
    try:
        return msgspec.convert(read_json(file), SavedLimit) if file.is_file() else None
    except (InputError, *UNREADABLE) as error:
        _LOG.warning("%s", printable(f"the saved limit {file} is ignored: {error}"))
        return None


def keep(
    micro_batch: int,
    programs: Sequence[Program],
    key: Mapping[str, KeyValue],
    home: Path,
    progress: Progress,
) -> Path | None:
    """Save an answer in place of an earlier one, and return its file; None if that fails, with a note."""
    limit = SavedLimit(
        micro_batch=micro_batch,
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        packed=zlib.compress(msgspec.msgpack.encode(programs)) if programs else b"",
    )
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
    digest = hashlib.sha256(msgspec.json.encode(known, order="deterministic")).hexdigest()
    device = re.sub(r"[^a-z0-9]+", "-", str(key.get("device")).casefold()).strip("-")
    return home / "profiles" / (device or "device") / "limits" / f"{digest}.json"
