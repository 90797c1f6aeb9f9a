"""Limits that were found on this machine, by everything that changes them, with the programs of their steps.

One JSON file per key, under ``profiles/<device>/limits`` of the data directory, and beside it the programs.
A file that cannot be used is ignored with a logged reason and left alone: a newer autobatch may have written
it.

A later probe runs the saved limit first. A run that agrees with the saved programs to the byte ends the
search; otherwise both are only a guess.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from autobatch.core.errors import InputError
from autobatch.core.files import UNREADABLE, read_json, write_atomic
from autobatch.core.progress import Progress
from autobatch.core.records import LimitedBy, Probe, UpperBoundBy
from autobatch.core.text import printable
from autobatch.core.version import __version__
from autobatch.device.profiles import save_or_explain
from autobatch.footprint.program import Program
from autobatch.rehearsal.setup import KeyValue

SCHEMA = 3
SUFFIX = ".programs"
"""Ending of the file with the programs of a limit."""
CLOSE_BUDGETS = 0.05
"""Share within which two budgets that follow free memory count as the same."""

_LOG = logging.getLogger(__name__)
Positive = Annotated[int, msgspec.Meta(gt=0, le=2**63 - 1)]


class SavedLimit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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


def recall(
    key: Mapping[str, KeyValue], home: Path, *, may_vary: bool = False
) -> tuple[SavedLimit | None, tuple[Program, ...]]:
    """Return the saved limit of a key and its programs; None and no programs if there is none.

    Args:
        key: everything that changes the answer.
        home: data directory.
        may_vary: the budget follows free memory, so the limit of a close budget is taken, too.
    """
    file = path_of(key, home)
    limit = _read(file)
    if limit is not None and _known(limit.key) != _known(key):
        limit = None
    if limit is None and may_vary:
        files = sorted(file.parent.glob("*.json"))
        near = [(saved, other) for other in files if (saved := _read(other)) and _is_near(saved.key, key)]
        limit, file = max(near, key=lambda pair: pair[0].date, default=(None, file))
    return limit, () if limit is None else _programs(file)


def keep(
    probe: Probe,
    programs: tuple[Program, ...],
    key: Mapping[str, KeyValue],
    *,
    cap: int,
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
        limited_by=probe.limited_by,
        upper_bound_by=probe.upper_bound_by,
        multiple=probe.multiple,
        cap=cap,
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
    )
    content = msgspec.json.format(msgspec.json.encode(limit, order="deterministic"))
    try:
        file = save_or_explain(path_of(key, home), content + b"\n")
    except InputError as error:
        progress.note(f"the limit was not saved: {error}")
        return None
    if programs:
        with suppress(OSError, InputError):
            saved = _Programs(__version__, programs)
            write_atomic(file.with_suffix(SUFFIX), msgspec.msgpack.encode(saved))
    return file


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


class _Programs(msgspec.Struct, frozen=True, array_like=True):
    """Programs with the version that wrote them; another version may record other events."""

    autobatch: str
    programs: tuple[Program, ...]


def _programs(limit: Path) -> tuple[Program, ...]:
    """Return the programs that were saved with a limit; none if they are unreadable or of another version."""
    try:
        saved = msgspec.msgpack.decode(limit.with_suffix(SUFFIX).read_bytes(), type=_Programs)
    except (OSError, *UNREADABLE):
        return ()
    return saved.programs if saved.autobatch == __version__ else ()
