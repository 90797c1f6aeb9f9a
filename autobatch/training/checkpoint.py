"""Checkpoints that survive a kill at any instant and are verified before they are loaded.

A checkpoint is a folder ``step-N`` with the state of a run in ``state.pt``, as `torch.save` writes it, and a
manifest. It is written as ``step-N.tmp-PID``: every file is flushed to the disk, and the manifest comes last,
with their sizes and SHA-256 sums and a sum of its own. Then the folder is renamed and its parent flushed, so
a folder called ``step-N`` is complete. Later damage is detected on reading: the checkpoint is named and
passed over, never deleted. ``state.pt`` is read with ``weights_only=True``, so nothing in it is executed.

    step-N.tmp-PID ──► step-N ──► deleted            (more than ``keep_last``)
                          └─────► step-N.damaged-K   (the run is resumed from an earlier one)

Sharded tensors are written by all ranks with torch.distributed.checkpoint; rank 0 writes the rest
and publishes. No rank continues before. A checkpoint is read by any number of ranks, sharded or not.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.serialization import get_unsafe_globals_in_checkpoint

from autobatch.core.errors import AutobatchError, CheckpointError, DoesNotFitError, InputError
from autobatch.core.files import file_entry, sync_directory
from autobatch.device.oom import first_line, is_oom
from autobatch.distributed.ranks import Ranks
from autobatch.step.gradients import is_sharded
from autobatch.workload.nested import map_leaves

SCHEMA = 8
"""Format of checkpoints; 8 keeps the facts of the run under their names in messages."""
MANIFEST = "manifest.json"
STATE = "state.pt"
SHARDED = "sharded"
"""Entry of a state: the name, shape, type and cut dimension of each sharded tensor, by its place."""
_NAME = re.compile(r"step-(\d+)")
_LEFTOVER = re.compile(r"step-\d+\.tmp-\d+")


def check_savable(state: Mapping[str, Any]) -> None:
    """Check that a state can be read back from a file; no values of tensors are read.

    Raises:
        InputError: it holds objects that are read by executing code; names the part and the class.
    """

    def emptied(_: str, leaf: Any) -> Any:
        is_plain = type(leaf) in (Tensor, nn.Parameter) and leaf.layout is torch.strided
        return torch.empty_like(leaf, device="meta") if is_plain and not leaf.is_quantized else leaf

    for part, value in _without_shards(state)[0].items():
        file, reason = io.BytesIO(), ""
        try:
            torch.save(map_leaves(value, emptied), file)
            file.seek(0)
            reason = ", ".join(get_unsafe_globals_in_checkpoint(file))
        except Exception as error:  # of many kinds, as objects have their own ways to be saved
            reason = first_line(error)
        if reason:
            raise InputError(
                f"the state of the workload's {part} cannot be kept in a checkpoint, which is read without "
                f"executing code, found {reason}: keep only numbers, text, tensors and lists, tuples, sets "
                "and dicts of them"
            )


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    state: Mapping[str, Any],
    facts: Mapping[str, Any],
    keep_last: int = 3,
    ranks: Ranks | None = None,
) -> Path:
    """Write a checkpoint, then delete all but the last ``keep_last``, oldest first.

    Args:
        folder: of all checkpoints of the run.
        step: batches seen, which names the checkpoint.
        state: tensors and plain values, as `check_savable` wants them.
        facts: JSON that users and resumes read without loading tensors.
        keep_last: checkpoints to keep.
        ranks: all of them call this.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: the disk is full or not writable, for some rank; earlier checkpoints are intact.
        DoesNotFitError: the host memory of a rank does not suffice.
    """
    ranks = ranks or Ranks()
    plain, shards = _without_shards(state)
    target = folder / f"step-{step:08d}"
    temporary = _temporary(target)

    def begin() -> str:
        with _as_checkpoint_error(target):
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
        return str(temporary)

    def publish() -> str:
        with _as_checkpoint_error(target):
            files = {STATE: _write_state(temporary / STATE, plain), **of_ranks}
            write_manifest(temporary / MANIFEST, {"step": step, "files": files, "facts": dict(facts)})
            sync_directory(temporary)
            temporary.rename(target)
            sync_directory(folder)
        older = [path for path in list_checkpoints(folder) if step_of(path) <= step]
        for path in older[:-keep_last]:
            # Each is renamed first, so none is ever incomplete. One that cannot be deleted now (permissions)
            # is tried again after the next checkpoint.
            with contextlib.suppress(OSError):
                shutil.rmtree(path.rename(_temporary(path)))
        return str(target)

    place = Path(ranks.once(begin))
    of_ranks: Mapping[str, Mapping[str, Any]] = {}
    if shards:
        # Only here: one process needs no torch.distributed.
        from autobatch.distributed.group import Group
        from autobatch.distributed.shard import write_shards

        assert isinstance(ranks, Group)
        try:
            of_ranks = write_shards(place, shards, ranks)
        except (CheckpointError, DoesNotFitError):
            ranks.once(lambda: shutil.rmtree(place, ignore_errors=True))
            raise
    return Path(ranks.once(publish))


def _without_shards(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a state with plain numbers and without sharded tensors, which it lists; and these by name."""
    shards: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    forms: dict[str, tuple[str, list[int], torch.dtype, int | None]] = {}
    numpy = sys.modules.get("numpy")

    def plain(place: str, leaf: Any) -> Any:
        if numpy is not None and isinstance(leaf, numpy.generic):
            return leaf.item()
        if not isinstance(leaf, Tensor) or not is_sharded(leaf):
            return leaf.detach() if isinstance(leaf, nn.Parameter) else leaf
        # Tied weights are one object, on every rank.
        name = names.setdefault(id(leaf), place)
        shards[name] = leaf.detach()
        (placement,) = leaf.placements  # type: ignore[attr-defined]
        forms[place] = name, [*leaf.shape], leaf.dtype, getattr(placement, "dim", None)
        return None

    found = map_leaves(dict(state), plain)
    return found | {SHARDED: forms} if forms else found, shards


def _write_state(path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Write a state, flush it to the disk, and return its entry in the manifest."""
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return file_entry(path)


@contextlib.contextmanager
def _as_checkpoint_error(target: Path) -> Iterator[None]:
    """Undo a failed checkpoint, and name the cause if the system refused something within the block."""
    try:
        yield
    except BaseException as error:
        shutil.rmtree(_temporary(target), ignore_errors=True)
        # torch's own error does not name a full disk.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError) or isinstance(error, AutobatchError):
            raise
        raise CheckpointError(
            f"the checkpoint of step {step_of(target)} could not be written to {target.parent}: "
            f"{cause.strerror or cause}. Free some space there; no earlier checkpoint is lost"
        ) from error


def list_checkpoints(folder: Path) -> list[Path]:
    """Return all published checkpoints, valid or not, oldest first."""
    names = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in names if _NAME.fullmatch(path.name)), key=step_of)


def begin_after(folder: Path, step: int) -> None:
    """Prepare a folder for a run that continues from the checkpoint of a step, or begins with step 0.

    What a killed process left half-written is deleted. Checkpoints of later steps, which were passed over,
    are set aside, because the run reaches these steps again.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
    for path in list_checkpoints(folder):
        if step_of(path) > step:
            names = (path.with_name(f"{path.name}.damaged-{number}") for number in itertools.count(1))
            path.rename(next(name for name in names if not name.exists()))


def step_of(path: Path) -> int:
    """Return the step that names a checkpoint."""
    return int(path.name.removeprefix("step-"))


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp-{os.getpid()}")


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Write a manifest, which begins with the SHA-256 of the rest, and flush it to the disk.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("wb") as file:
        file.write(_sealed({"schema": SCHEMA, **manifest}))
        file.flush()
        os.fsync(file.fileno())


def _sealed(manifest: Mapping[str, Any]) -> bytes:
    sha256 = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return json.dumps({"sha256": sha256, **manifest}, indent=1).encode()


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of the checkpoint ``path``.

    Raises:
        CheckpointError: it is missing, changed, of another step, or has another format.
    """
    try:
        content = (path / MANIFEST).read_bytes()
        manifest: dict[str, Any] = json.loads(content)
        del manifest["sha256"]
        schema, is_same = manifest["schema"], _sealed(manifest) == content
        is_same = is_same and manifest["step"] == step_of(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if is_oom(error):
            raise
        raise CheckpointError(f"{path}: {MANIFEST} cannot be read ({type(error).__name__})") from None
    if schema != SCHEMA:
        raise CheckpointError(f"{path}: {MANIFEST} has format {schema}, and this version reads {SCHEMA}")
    if not is_same:
        raise CheckpointError(f"{path}: {MANIFEST} was changed after it was written (SHA-256 differs)")
    return manifest


def check_files(path: Path, manifest: Mapping[str, Any]) -> None:
    """Check the files of the checkpoint ``path``: those of the manifest, and no other ones with tensors.

    Raises:
        CheckpointError: a file differs; names it.
    """
    # The readers of tensors take every such file of the folder.
    for name in sorted({*manifest["files"], *(file.name for file in path.glob("*.safetensors"))}):
        try:
            is_same = file_entry(path / name) == manifest["files"].get(name)
        except OSError as error:
            if is_oom(error):
                raise
            raise CheckpointError(f"{path}: {name} cannot be read ({error.strerror})") from None
        if not is_same:
            raise CheckpointError(f"{path}: {name} was changed after it was written (SHA-256 differs)")


class Loaded(NamedTuple):
    """The newest valid checkpoint."""

    path: Path
    state: dict[str, Any]
    """Its tensors are pages of the file until they are written."""
    facts: dict[str, Any]
    """Facts that were written beside the state: the plan, the versions, the data order."""
    passed_over: list[str]
    """Newer checkpoints that are damaged, and why; one per line."""


def load_newest(folder: Path, ranks: Ranks | None = None) -> Loaded | None:
    """Load the newest valid checkpoint, and name the damaged ones that were passed over.

    All ranks call it and load the same one, and rank 0 compares the sums.

    Returns:
        The checkpoint; None if the folder has none at all.

    Raises:
        InputError: every checkpoint is damaged.
    """
    ranks = ranks or Ranks()
    passed_over: list[str] = []
    for name in ranks.once(lambda: [path.name for path in reversed(list_checkpoints(folder))]):
        path, reason = folder / name, ""
        try:
            manifest = read_manifest(path)
            if ranks.rank == 0:
                check_files(path, manifest)
            state = torch.load(path / STATE, map_location="cpu", weights_only=True, mmap=True)
        except CheckpointError as error:
            reason = str(error)
        except Exception as error:  # a hostile or foreign file may make the reader raise anything
            if is_oom(error):
                raise
            reason = f"{path}: {STATE} cannot be read ({type(error).__name__})"
        reasons = [failure for failure in ranks.gather(reason) if failure]
        if not reasons:
            return Loaded(path, state, manifest["facts"], passed_over)
        passed_over.append(reasons[0])
    if passed_over:
        raise InputError(
            f"no checkpoint in {folder} is valid ({', '.join(passed_over)}): start without --resume, or "
            "restore one of them from a copy"
        )
    return None
