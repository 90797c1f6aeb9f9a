"""Checkpoints that survive a kill at any instant and are verified before they are loaded.

A checkpoint is a folder ``step-N``. It is written as ``step-N.tmp-PID``: every file is flushed to the disk,
and the manifest comes last, with their sizes and SHA-256 sums and a sum of its own. Then the folder is
renamed and its parent flushed, so a folder called ``step-N`` is complete. Later damage is detected on
reading: the checkpoint is named and passed over, never deleted.

    step-N.tmp-PID ──► step-N ──► step-N.trash-PID ──► deleted       (more than ``keep_last``)
                          └─────► step-N.damaged-K                   (the run reaches the same step again)

Tensors that ranks share are written by all of them with torch.distributed.checkpoint; rank 0 writes the rest
and publishes. No rank continues before. A checkpoint is read by any number of ranks, sharded or not.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autobatch.core.errors import CheckpointError, DoesNotFitError
from autobatch.core.units import format_bytes
from autobatch.device.host import host_memory
from autobatch.distributed.ranks import Ranks
from autobatch.training.checkpoints.manifest import MANIFEST, check_files, read_manifest, write_manifest
from autobatch.training.checkpoints.state_file import Packed, pack, write_state

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
        state: tensors and plain values; see `autobatch.training.checkpoints.state_file`.
        facts: JSON that users and resumes read without loading tensors.
        keep_last: checkpoints to keep.
        protected: the checkpoint that the run was resumed from, which is never deleted.
        ranks: all of them call this; None if this process trains alone.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: the disk is full or not writable, for some rank; earlier checkpoints are intact.
        DoesNotFitError: the host memory of a rank does not suffice.
    """
    ranks = ranks or Ranks()
    packed = pack(state)
    temporary = Path(ranks.once(lambda: str(_begin(folder, step))))
    shards = _write_shards(temporary, packed, ranks)

    def publish() -> str:
        path = _publish(temporary, packed, facts, shards)
        _prune(path, keep_last=keep_last, protected=protected)
        return str(path)

    return Path(ranks.once(publish))


def _begin(folder: Path, step: int) -> Path:
    """Make the folder that becomes a checkpoint when it is published."""
    temporary = folder / f"step-{step:08d}.tmp-{os.getpid()}"
    with _as_checkpoint_error(temporary):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    return temporary


def _write_shards(temporary: Path, packed: Packed, ranks: Ranks) -> Mapping[str, Mapping[str, Any]]:
    """Write the sharded tensors of all ranks, and return sizes and sums of their files by name."""
    if not packed.sharded:
        return {}
    # Only here: one process needs no torch.distributed.
    from autobatch.distributed.group import Group
    from autobatch.distributed.sharding.files import write_shards

    assert isinstance(ranks, Group)
    try:
        return write_shards(temporary, packed.sharded, ranks)
    except (CheckpointError, DoesNotFitError):
        ranks.once(lambda: shutil.rmtree(temporary, ignore_errors=True))
        raise


def _publish(
    temporary: Path, packed: Packed, facts: Mapping[str, Any], shards: Mapping[str, Mapping[str, Any]]
) -> Path:
    """Write the state and the manifest, and give the folder its name."""
    folder, target = temporary.parent, temporary.with_suffix("")
    with _as_checkpoint_error(temporary):
        files = {**write_state(temporary, packed), **shards}
        write_manifest(temporary / MANIFEST, {"step": _number(target), "files": files, "facts": dict(facts)})
        _sync_directory(temporary)
        if target.exists():
            # A resumed run reached the same step: keep the old checkpoint until the new one is published.
            target.rename(_trash(target) if is_valid(target) else _damaged(target))
        temporary.rename(target)
        _sync_directory(folder)
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


def is_valid(path: Path) -> bool:
    """Return whether a checkpoint is unchanged since it was written."""
    try:
        check_files(path, read_manifest(path))
    except CheckpointError:
        return False
    return True


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


def _prune(newest: Path, *, keep_last: int, protected: Path | None) -> None:
    """Delete the oldest checkpoints over ``keep_last``, each by one rename, so that none is ever incomplete.

    Damaged checkpoints are neither counted nor deleted. Neither are later steps: the run passed over them.

    Args:
        newest: the checkpoint that was just published.
        keep_last: checkpoints to keep.
        protected: see `save_checkpoint`.
    """
    known = [path for path in list_checkpoints(newest.parent) if _number(path) <= _number(newest)]
    for path in [path for path in known if _looks_complete(path)][:-keep_last]:
        if path in (newest, protected):
            continue
        # A checkpoint that cannot be deleted now (permissions) is tried again at the next one.
        with contextlib.suppress(OSError):
            path.rename(_trash(path))
            shutil.rmtree(_trash(path))


def _looks_complete(path: Path) -> bool:
    """Return whether manifest and sizes are right; sums are compared only on loading."""
    try:
        check_files(path, read_manifest(path), sums=False)
    except (OSError, MemoryError):  # a CheckpointError is an OSError; what is unknown is not deleted
        return False
    return True


def _number(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _trash(path: Path) -> Path:
    return path.with_name(f"{path.name}.trash-{os.getpid()}")


def _damaged(path: Path) -> Path:
    number = 1
    while path.with_name(f"{path.name}.damaged-{number}").exists():
        number += 1
    return path.with_name(f"{path.name}.damaged-{number}")


def available_host_memory() -> str:
    """Return the host memory that is available, in words; ``unknown`` if it cannot be read now."""
    try:
        return format_bytes(host_memory().available_bytes)
    except MemoryError:
        return format_bytes(None)
