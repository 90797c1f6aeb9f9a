"""Checkpoints that survive a kill at any instant and are verified before they are loaded.

A checkpoint is a folder ``step-N`` with the state of a run in ``state.pt``, as `torch.save` writes it, and a
manifest. It is written as ``step-N.tmp``: every file is flushed to the disk, and the manifest comes last,
with their sizes and SHA-256 sums and a sum of its own. Then the folder is renamed and its parent flushed, so
a folder called ``step-N`` is complete. Later damage is detected on reading: the checkpoint is named and
passed over, never deleted. ``state.pt`` is read with ``weights_only=True``, so nothing in it is executed.

    step-N.tmp ──► step-N ──► deleted            (more than ``keep_last``)
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
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.serialization import get_unsafe_globals_in_checkpoint

from autobatch.core.errors import CheckpointError, DoesNotFitError, InputError
from autobatch.core.files import file_entry, replaced_file, sync_directory, write_atomic
from autobatch.device.oom import first_line, is_oom, memory_named
from autobatch.distributed.ranks import Ranks
from autobatch.step.gradients import is_sharded
from autobatch.workload.nested import map_leaves

SCHEMA = 9
"""Format of checkpoints; 9 keeps the facts of the run and of its ranks under their names in messages."""
MANIFEST = "manifest.json"
STATE = "state.pt"
SHARDED = "sharded"
"""Entry of a state: the name, shape, type and cut dimension of each sharded tensor, by its place."""


def check_savable(state: Mapping[str, Any]) -> None:
    """Check that a state can be read back from a file; no values of tensors are read.

    Raises:
        InputError: it holds objects that are read by executing code; names the part and the class.
    """

    def emptied(_: str, leaf: Any) -> Any:
        is_plain = type(leaf) in (Tensor, nn.Parameter) and leaf.layout is torch.strided
        return torch.empty_like(leaf, device="meta") if is_plain and not leaf.is_quantized else leaf

    for part, value in _without_shards(state)[0].items():
        file = io.BytesIO()
        try:
            torch.save(map_leaves(value, emptied), file)
            file.seek(0)
            reasons = get_unsafe_globals_in_checkpoint(file)
        except Exception as error:  # of many kinds, as objects have their own ways to be saved
            reasons = [first_line(error)]
        if reasons:
            raise InputError(
                f"the state of the workload's {part} cannot be kept in a checkpoint, which is read without "
                f"executing code, found {', '.join(reasons)}: keep only numbers, text, tensors and lists, "
                "tuples, sets and dicts of them"
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
    temporary = target.with_suffix(".tmp")

    def begin() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        with replaced_file(temporary / STATE) as path, path.open("wb") as file:
            torch.save(plain, file)

    def publish() -> None:
        files = {STATE: file_entry(temporary / STATE), **of_ranks}
        write_atomic(temporary / MANIFEST, sealed({"step": step, "files": files, "facts": dict(facts)}))
        temporary.rename(target)
        sync_directory(folder)
        older = [path for path in list_checkpoints(folder) if step_of(path) <= step]
        for path in older[:-keep_last]:
            # Each is renamed first, so none is ever incomplete. One that cannot be deleted now (permissions)
            # is tried again after the next checkpoint.
            with contextlib.suppress(OSError):
                shutil.rmtree(path.rename(path.with_suffix(".tmp")))

    of_ranks: Mapping[str, Mapping[str, Any]] = {}
    try:
        ranks.once(begin)
        if shards:
            # Only here: one process needs no torch.distributed.
            from autobatch.distributed.group import Group
            from autobatch.distributed.shard import write_shards

            assert isinstance(ranks, Group)
            of_ranks = write_shards(temporary, shards, ranks)
        ranks.once(publish)
    except BaseException as error:
        if not ranks.rank:
            shutil.rmtree(temporary, ignore_errors=True)
        # torch's own error does not name a full disk.
        cause = error.__context__ if isinstance(error, RuntimeError) else error
        if not isinstance(cause, OSError):
            raise
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written to {folder}: {cause.strerror or cause}. "
            "Free some space there; no earlier checkpoint is lost"
        ) from error
    return target


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


def list_checkpoints(folder: Path) -> list[Path]:
    """Return all published checkpoints, valid or not, oldest first."""
    return sorted(
        (path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdecimal()), key=step_of
    )


def step_of(path: Path) -> int:
    """Return the step that names a checkpoint."""
    return int(path.name.removeprefix("step-"))


def begin_after(folder: Path, step: int) -> None:
    """Prepare a folder for a run that continues from the checkpoint of a step, or begins with step 0.

    What a killed process left half-written is deleted. Checkpoints of later steps, which were passed over,
    are set aside, because the run reaches these steps again.
    """
    for path in folder.glob("step-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
    for path in list_checkpoints(folder):
        if step_of(path) > step:
            names = (path.with_name(f"{path.name}.damaged-{number}") for number in itertools.count(1))
            path.rename(next(name for name in names if not name.exists()))


def sealed(manifest: Mapping[str, Any]) -> bytes:
    """Return the content of a manifest, which begins with the SHA-256 of the rest."""
    manifest = {"schema": SCHEMA, **manifest}
    sha256 = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return json.dumps({"sha256": sha256, **manifest}, indent=1).encode()


def read_manifest(path: Path, *, checks_files: bool = True) -> dict[str, Any]:
    """Read the manifest of the checkpoint ``path``, and check the files that it lists.

    Raises:
        CheckpointError: it is missing, changed, of another step, or has another format; or a file was changed
            or added.
    """
    name = MANIFEST
    try:
        content = (path / MANIFEST).read_bytes()
        manifest: dict[str, Any] = json.loads(content)
        del manifest["sha256"]
        schema, is_same = manifest["schema"], sealed(manifest) == content
        is_same = is_same and manifest["step"] == step_of(path)
        # The readers of tensors take every such file of the folder.
        tensors = [file.name for file in path.glob("*.safetensors")]
        for name in sorted({*manifest["files"], *tensors}) if is_same and checks_files else ():
            is_same = file_entry(path / name) == manifest["files"].get(name)
            if not is_same:
                break
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if is_oom(error):
            raise
        raise CheckpointError(f"{path}: {name} cannot be read ({type(error).__name__})") from None
    if schema != SCHEMA:
        raise CheckpointError(f"{path}: {MANIFEST} has format {schema}, and this version reads {SCHEMA}")
    if not is_same:
        raise CheckpointError(f"{path}: {name} was changed after it was written (SHA-256 differs)")
    return manifest


class Loaded(NamedTuple):
    """The newest valid checkpoint."""

    path: Path
    state: dict[str, Any]
    """Its tensors are pages of the file until they are written."""
    facts: dict[str, Any]
    """Facts that were written beside the state: the plan, the versions, the data order."""
    passed_over: list[str]
    """Newer checkpoints that are damaged, and why; one per line."""


def load_newest(folder: Path, ranks: Ranks | None = None) -> Loaded:
    """Load the newest valid checkpoint, and name the damaged ones that were passed over.

    All ranks call it and load the same one, and rank 0 compares the sums.

    Raises:
        InputError: there is no checkpoint, or every one is damaged.
        DoesNotFitError: the host memory does not suffice to load it.
    """
    ranks = ranks or Ranks()
    passed_over: list[str] = []
    for name in ranks.once(lambda: [path.name for path in reversed(list_checkpoints(folder))]):
        path, reason = folder / name, ""
        try:
            with memory_named(f"a checkpoint, which is intact, was loaded from {folder}"):
                manifest = read_manifest(path, checks_files=ranks.rank == 0)
                state = torch.load(path / STATE, map_location="cpu", weights_only=True, mmap=True)
        except DoesNotFitError:
            raise
        except CheckpointError as error:
            reason = str(error)
        except Exception as error:  # a hostile or foreign file may make the reader raise anything
            reason = f"{path}: {STATE} cannot be read ({type(error).__name__})"
        reasons = [failure for failure in ranks.gather(reason) if failure]
        if not reasons:
            return Loaded(path, state, manifest["facts"], passed_over)
        passed_over.append(reasons[0])
    if not passed_over:
        raise InputError(f"--resume found no checkpoint in {folder}: start without --resume")
    raise InputError(
        f"no checkpoint in {folder} is valid ({', '.join(passed_over)}): start without --resume, or restore "
        "one of them from a copy"
    )
