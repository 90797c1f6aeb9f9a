"""Checkpoints that survive a kill at any instant and are verified before they are loaded.

A checkpoint is a folder ``step-N``. It is written as ``step-N.tmp-PID``: every file is flushed to the disk,
and the manifest comes last, with their sizes and SHA-256 sums and a sum of its own. Then the folder is
renamed and its parent flushed, so a folder called ``step-N`` is complete. Later damage is detected on
reading: the checkpoint is named and passed over, never deleted. Nothing in a file is executed. An error of
memory that runs out while one is read is raised as it is, because it says nothing about the file.

    step-N.tmp-PID ──► step-N ──► step-N.trash-PID ──► deleted       (more than ``keep_last``)
                          └─────► step-N.damaged-K                   (the run reaches the same step again)

Sharded tensors are written by all ranks with torch.distributed.checkpoint; rank 0 writes the rest
and publishes. No rank continues before. A checkpoint is read by any number of ranks, sharded or not.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from autobatch.core.errors import CheckpointError, DoesNotFitError, InputError
from autobatch.core.units import format_bytes
from autobatch.device.host import host_memory
from autobatch.device.oom import is_oom
from autobatch.distributed.ranks import Ranks
from autobatch.training.state_file import Packed, pack, read_state, write_file, write_state

SCHEMA = 5
"""Format of checkpoints; 5 has one micro-batch for all ranks."""
MANIFEST = "manifest.json"
_PREFIX = b'{"sha256": "'
_BODY_START = len(_PREFIX) + 64 + 2
"""Offset of the first byte that the manifest's own sum covers."""
_NAME = re.compile(r"step-(\d+)")
_LEFTOVER = re.compile(r"step-\d+\.(?:tmp|trash)-\d+")


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    state: Mapping[str, Any],
    facts: Mapping[str, Any],
    keep_last: int = 3,
    protected: Path | None = None,
    ranks: Ranks | None = None,
) -> Path:
    """Write a checkpoint, then delete all but the last ``keep_last``, oldest first.

    Args:
        folder: the folder of all checkpoints of the run.
        step: batches seen, which names the checkpoint.
        state: tensors and plain values; see `autobatch.training.state_file`.
        facts: JSON that users and resumes read without loading tensors.
        keep_last: checkpoints to keep.
        protected: the checkpoint that the run was resumed from, which is never deleted.
        ranks: all of them call this; None if this process trains alone.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: the disk is full or not writable, for some rank; earlier checkpoints are intact.
        DoesNotFitError: the host memory of a rank does not suffice.
        InputError: the state holds what no file can hold.
    """
    ranks, packed = ranks or Ranks(), pack(state)
    temporary = folder / f"step-{step:08d}.tmp-{os.getpid()}"

    def begin() -> str:
        with _as_checkpoint_error(temporary):
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
        return str(temporary)

    def publish() -> str:
        with _as_checkpoint_error(temporary):
            files = {**write_state(temporary, packed), **shards}
            write_manifest(temporary / MANIFEST, {"step": step, "files": files, "facts": dict(facts)})
            path = _publish(temporary)
        _prune(path, keep_last=keep_last, protected=protected)
        return str(path)

    shards = _write_shards(Path(ranks.once(begin)), packed, ranks)
    return Path(ranks.once(publish))


def _write_shards(temporary: Path, packed: Packed, ranks: Ranks) -> Mapping[str, Mapping[str, Any]]:
    """Write the sharded tensors of all ranks, and return sizes and sums of their files by name."""
    if not packed.sharded:
        return {}
    # Only here: one process needs no torch.distributed.
    from autobatch.distributed.group import Group
    from autobatch.distributed.sharding.state import write_shards

    assert isinstance(ranks, Group)
    try:
        return write_shards(temporary, packed.sharded, ranks)
    except (CheckpointError, DoesNotFitError):
        ranks.once(lambda: shutil.rmtree(temporary, ignore_errors=True))
        raise


def _publish(temporary: Path) -> Path:
    """Give a folder that is complete the name of a checkpoint."""
    target = temporary.with_suffix("")
    _sync_directory(temporary)
    if target.exists():
        # A resumed run reached the same step: keep the old checkpoint until the new one is published.
        damaged = (target.with_name(f"{target.name}.damaged-{number}") for number in itertools.count(1))
        target.rename(
            _trash(target) if is_valid(target) else next(path for path in damaged if not path.exists())
        )
    temporary.rename(target)
    _sync_directory(temporary.parent)
    shutil.rmtree(_trash(target), ignore_errors=True)
    return target


@contextlib.contextmanager
def _as_checkpoint_error(temporary: Path) -> Iterator[None]:
    """Undo a failed checkpoint, and name the cause if the system refused something within the block."""
    target = temporary.with_suffix("")
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):
            if _trash(target).exists() and not target.exists():
                _trash(target).rename(target)
        shutil.rmtree(temporary, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise CheckpointError(
            f"the checkpoint of step {_number(target)} could not be written to {temporary.parent}: "
            f"{error.strerror or error}. Free some space there; no earlier checkpoint is lost"
        ) from error


def list_checkpoints(folder: Path) -> list[Path]:
    """Return all published checkpoints, valid or not, oldest first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def clean_leftovers(folder: Path) -> None:
    """Delete what a killed process left half-written, and bring back a checkpoint that it had set aside."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if not _LEFTOVER.fullmatch(path.name):
            continue
        published = folder / path.name.split(".")[0]
        if ".trash-" in path.name and not published.exists() and is_valid(path):
            path.rename(published)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _prune(newest: Path, *, keep_last: int, protected: Path | None) -> None:
    """Delete the oldest checkpoints over ``keep_last``, each by one rename, so that none is ever incomplete.

    Damaged checkpoints are neither counted nor deleted. Neither are later steps, which the run passed over.
    """
    known = [path for path in list_checkpoints(newest.parent) if _number(path) <= _number(newest)]
    for path in [path for path in known if is_valid(path, sums=False)][:-keep_last]:
        if path in (newest, protected):
            continue
        # A checkpoint that cannot be deleted now (permissions) is tried again at the next one.
        with contextlib.suppress(OSError):
            path.rename(_trash(path))
            shutil.rmtree(_trash(path))


def _sync_directory(directory: Path) -> None:
    """Make renames durable, unless the file system cannot flush a directory."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):
            raise
    finally:
        os.close(descriptor)


def _number(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _trash(path: Path) -> Path:
    return path.with_name(f"{path.name}.trash-{os.getpid()}")


class _File(msgspec.Struct):
    """A file of a checkpoint, as its manifest lists it."""

    bytes: int
    sha256: str


class _Manifest(msgspec.Struct):
    """The content of a manifest."""

    files: dict[str, _File]
    facts: dict[str, Any]


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest as JSON that begins with the SHA-256 of the rest, and flush it to the disk.

    Raises:
        OSError: the file cannot be written.
    """
    body = json.dumps({"schema": SCHEMA, **manifest}, indent=1)[1:].encode()
    write_file(path, [_PREFIX, hashlib.sha256(body).hexdigest().encode(), b'",', body])


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of the checkpoint ``path``.

    Raises:
        CheckpointError: it is missing, changed, incomplete, or has another format.
    """
    try:
        content = (path / MANIFEST).read_bytes()
        manifest = json.loads(content)
        schema = manifest["schema"]
        if schema == SCHEMA:
            msgspec.convert(manifest, _Manifest)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        if is_oom(error):
            raise
        raise CheckpointError(f"{path}: {MANIFEST} cannot be read ({type(error).__name__})") from None
    if schema != SCHEMA:
        raise CheckpointError(f"{path}: {MANIFEST} has format {schema}, and this version reads {SCHEMA}")
    body = content[_BODY_START:]
    if content != _PREFIX + hashlib.sha256(body).hexdigest().encode() + b'",' + body:
        raise CheckpointError(f"{path}: {MANIFEST} was changed after it was written (SHA-256 differs)")
    if not all(Path(name).name == name for name in manifest["files"]):
        raise CheckpointError(f"{path}: {MANIFEST} lists files outside of the checkpoint")
    return dict(manifest)


def check_files(
    path: Path, manifest: Mapping[str, Any], *, sums: bool = True, part: tuple[int, int] = (0, 1)
) -> None:
    """Check the files of the checkpoint ``path``: those of the manifest, and no others.

    Args:
        path: its folder.
        manifest: the expected sizes and sums.
        sums: also read every file and compare its sum, not only its size.
        part: the rank, and the number of ranks that compare the sums of all files together.

    Raises:
        CheckpointError: a file differs; names it and the fault.
    """
    rank, world = part
    for number, (name, expected) in enumerate(sorted(manifest["files"].items())):
        try:
            size = (path / name).stat().st_size
            found = expected["sha256"]
            if sums and number % world == rank and size == expected["bytes"]:
                with (path / name).open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            if is_oom(error):
                raise
            raise CheckpointError(f"{path}: {name} cannot be read ({error.strerror})") from None
        if size != expected["bytes"]:
            raise CheckpointError(f"{path}: {name} must have {expected['bytes']} bytes, found {size}")
        if found != expected["sha256"]:
            raise CheckpointError(f"{path}: {name} was changed after it was written (SHA-256 differs)")
    # The readers of tensors take every such file of the folder.
    try:
        present = sorted(one.name for one in path.glob("*.safetensors"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from None
    for name in present:
        if name not in manifest["files"]:
            raise CheckpointError(f"{path}: {name} is not listed in {MANIFEST}")


def is_valid(path: Path, *, sums: bool = True) -> bool:
    """Return whether a checkpoint is unchanged since it was written; without ``sums``, of the same sizes."""
    try:
        check_files(path, read_manifest(path), sums=sums)
    except CheckpointError:
        return False
    return True


class Loaded(NamedTuple):
    """The newest valid checkpoint."""

    path: Path
    state: dict[str, Any]
    facts: dict[str, Any]
    """Facts that were written beside the state: the plan, the versions, the data order."""
    passed_over: list[str]
    """Newer checkpoints that are damaged, and why; one per line."""


Check: TypeAlias = Callable[[Path, dict[str, Any], dict[str, Any]], None]
"""Checks the content of a checkpoint: its folder, its state, its facts."""


def load_newest(folder: Path, check: Check = lambda *_: None, ranks: Ranks | None = None) -> Loaded | None:
    """Load the newest valid checkpoint, and name the damaged ones that were passed over.

    Args:
        folder: the folder of all checkpoints of the run.
        check: raises a `CheckpointError` if a checkpoint with valid sums holds something else.
        ranks: all of them call this and load the same one; each compares the sums of some files. None if
            this process trains alone.

    Returns:
        The checkpoint; None if the folder has none at all.

    Raises:
        InputError: every checkpoint is damaged.
    """
    ranks = ranks or Ranks()
    passed_over: list[str] = []
    for name in ranks.once(lambda: [path.name for path in reversed(list_checkpoints(folder))]):
        reason = ""
        try:
            found = load_checkpoint(folder / name, check, part=(ranks.rank, ranks.world))
        except CheckpointError as error:
            reason = str(error)
        reasons = [one for one in ranks.gather(reason) if one]
        if not reasons:
            return found._replace(passed_over=passed_over)
        passed_over.append(reasons[0])
    if passed_over:
        raise InputError(
            f"no checkpoint in {folder} is valid ({', '.join(passed_over)}): start without --resume, or "
            "restore one of them from a copy"
        )
    return None


def load_checkpoint(path: Path, check: Check = lambda *_: None, *, part: tuple[int, int] = (0, 1)) -> Loaded:
    """Load the checkpoint ``path``; for ``check`` see `load_newest`, for ``part`` `check_files`.

    Raises:
        CheckpointError: it is damaged; names the fault.
    """
    manifest = read_manifest(path)
    check_files(path, manifest, part=part)
    try:
        state = read_state(path)
        check(path, state, manifest["facts"])
    except CheckpointError:
        raise
    except Exception as error:  # a hostile or foreign file may make the readers raise anything
        if is_oom(error):
            raise
        raise CheckpointError(f"{path}: its state cannot be read ({type(error).__name__})") from None
    return Loaded(path, state, manifest["facts"], [])


def available_host_memory() -> str:
    """Return the host memory that is available, in words; ``unknown`` if it cannot be read now."""
    try:
        return format_bytes(host_memory().available_bytes)
    except MemoryError:
        return format_bytes(None)
