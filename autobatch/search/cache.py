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
from autobatch.core.units import format_bytes
from autobatch.core.version import __version__
from autobatch.device.profiles import save_or_explain
from autobatch.footprint.program import Program
from autobatch.rehearsal.setup import KeyValue

SCHEMA = 3
SUFFIX = ".programs"
"""Ending of the file with the programs of a limit."""
Positive = Annotated[int, msgspec.Meta(gt=0, le=2**63 - 1)]
ASKED_FOR = {
    "budget_bytes", "device", "device_kind", "total_bytes", "precision", "gradient_dtype", "max_grad_norm",
    "ema", "whole_batch", "keeps_batches", "parallel",
}  # fmt: skip
"""Fields of the key that options change: an answer to another question is not stale."""
ANOTHER = {"model", "samples"}
"""Fields of the key in which another workload of the same name differs."""
IN_WORDS = {
    "allocator": "the settings of the allocator",
    "budget_bytes": "the budget",
    "device": "the device",
    "device_kind": "the kind of device",
    "ema": "the average of the weights",
    "files": "a file that the command names",
    "gradient_dtype": "the type of the gradients",
    "keeps_batches": "the training loop",
    "loss": "the loss function",
    "max_grad_norm": "the clipping of gradients",
    "model": "the model",
    "optimizer": "the optimizer",
    "parallel": "the way ranks share the model",
    "precision": "the precision",
    "samples": "the shape or type of the samples",
    "torch": "torch",
    "total_bytes": "the memory of the device",
    "whole_batch": "the number of samples that the loss sees",
    "world_size": "the number of ranks",
}
"""Fields of the key as a user knows them."""
SHOWN = {"device", "precision", "torch", "world_size"}
"""Fields whose values are shown as they are; those in bytes are shown with their unit, others not at all."""
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


def recall(
    key: Mapping[str, KeyValue], home: Path, progress: Progress, *, may_vary: bool
) -> CachedLimit | None:
    """Return the saved limit of a key, with a note if there is one that is out of date. See `lookup`."""
    saved, stale = lookup(key, home, may_vary=may_vary)
    if stale is not None:
        progress.note(f"{stale}. It is probed again")
    return saved


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

    Returns:
        None, with a note if the directory is not writable. Without one, the search was stopped, or not the
        budget refused a size.
    """
    if probe.upper_bound_by is None or any(attempt.is_below_budget for attempt in probe.attempts):
        return None
    limit = CachedLimit(
        key=dict(key),
        micro_batch=probe.micro_batch,
        limited_by=probe.limited_by,
        upper_bound_by=probe.upper_bound_by,
        multiple=probe.multiple,
        cap=cap,
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
    )
    try:
        file = store(limit, home)
    except InputError as error:
        progress.note(f"the limit was not saved: {error}")
        return None
    save_programs(programs, file)
    return file


def store(limit: CachedLimit, home: Path) -> Path:
    """Save a limit atomically in place of an earlier one of the same key, and return its path.

    Raises:
        InputError: the directory is not writable.
    """
    content = msgspec.json.format(msgspec.json.encode(limit, order="deterministic"))
    return save_or_explain(entry_path(limit.key, home), content + b"\n")


def lookup(
    key: Mapping[str, KeyValue], home: Path, *, may_vary: bool = False
) -> tuple[CachedLimit | None, str | None]:
    """Return the limit of a key; else None, and what has changed since a stale one was saved, in words.

    Of several stale ones, that counts in which the fewest fields differ, and of those the newest. If the
    budget ``may_vary`` because it follows free memory, the limit of a close one is taken too.
    """
    exact = _read(entry_path(key, home))
    if exact is not None and not _changed(exact, key):
        return exact, None
    if key.get("workload") is None:
        return None, None
    limits = filter(None, map(_read, sorted((home / "profiles").glob("*/limits/*.json"))))
    relatives = [
        (limit, changed)
        for limit in limits
        if limit.key.get("workload") == key["workload"]
        and (changed := _changed(limit, key))
        and not ANOTHER.issubset(changed)
    ]
    relatives.sort(key=lambda pair: pair[0].date, reverse=True)
    stale, changed = min(relatives, key=lambda pair: len(pair[1]), default=(None, []))
    if stale is None:
        return None, None
    if may_vary and changed == ["budget_bytes"] and _has_close_budget(stale, key):
        return stale, None
    if set(changed) <= ASKED_FOR:
        return None, None
    changes = ", ".join(_in_words(name, stale.key.get(name), key.get(name)) for name in changed)
    return None, f"the limit saved on {stale.date} is not used: {changes}"


def entry_path(key: Mapping[str, KeyValue], home: Path) -> Path:
    """Return the file of a key's limit."""
    # Fields that are unknown count as absent.
    known = {field: value for field, value in key.items() if value is not None}
    canonical = msgspec.json.encode(known, order="deterministic")
    device = re.sub(r"[^a-z0-9]+", "-", str(key.get("device")).casefold()).strip("-")
    folder = home / "profiles" / (device or "device") / "limits"
    return folder / f"{hashlib.sha256(canonical).hexdigest()}.json"


def _changed(limit: CachedLimit, key: Mapping[str, KeyValue]) -> list[str]:
    """Return the names of the fields in which the key of a limit differs."""
    return sorted(name for name in limit.key.keys() | key.keys() if limit.key.get(name) != key.get(name))


def _in_words(name: str, old: KeyValue, new: KeyValue) -> str:
    """Describe a change of a field, with both values if a user knows them."""
    what = f"{IN_WORDS.get(name, name)} changed"
    if old is None or new is None:
        return what
    if name.endswith("_bytes") and isinstance(old, int) and isinstance(new, int):
        return f"{what} from {format_bytes(old)} to {format_bytes(new)}"
    return f"{what} from {old} to {new}" if name in SHOWN else what


def _has_close_budget(limit: CachedLimit, key: Mapping[str, KeyValue]) -> bool:
    old, new = limit.key.get("budget_bytes"), key.get("budget_bytes")
    return isinstance(old, int) and isinstance(new, int) and abs(new - old) <= CLOSE_BUDGETS * new


def _read(file: Path) -> CachedLimit | None:
    """Read one file. Return None if it is absent, or cannot be used, which is logged with the reason."""
    if not file.is_file():
        return None
    try:
        limit = msgspec.convert(read_json(file), CachedLimit)
    except (InputError, *UNREADABLE) as error:
        reason = str(error)
    else:
        if limit.schema == SCHEMA:
            return limit
        reason = f"schema {limit.schema}, this autobatch reads {SCHEMA}"
    _LOG.warning("%s", printable(f"the saved limit {file} is ignored: {reason}"))
    return None


class _SavedPrograms(msgspec.Struct, frozen=True, array_like=True):
    """Programs with the version that wrote them; another version may record other events."""

    autobatch: str
    programs: tuple[Program, ...]


def save_programs(programs: tuple[Program, ...], limit: Path) -> None:
    """Save the programs of a limit beside its file, if there are any and the folder is writable."""
    if programs:
        content = msgspec.msgpack.encode(_SavedPrograms(__version__, programs))
        with suppress(OSError, InputError):
            write_atomic(limit.with_suffix(SUFFIX), content)


def load_programs(limit: Path) -> tuple[Program, ...]:
    """Return the programs that were saved with a limit; none if they are unreadable or of another version."""
    try:
        saved = msgspec.msgpack.decode(limit.with_suffix(SUFFIX).read_bytes(), type=_SavedPrograms)
    except (OSError, *UNREADABLE):
        return ()
    return saved.programs if saved.autobatch == __version__ else ()
