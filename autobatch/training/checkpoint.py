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
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import msgspec
import torch
from torch import Tensor, nn
from torch.serialization import get_unsafe_globals_in_checkpoint

from autobatch.core.errors import CheckpointError, DoesNotFitError, InputError
from autobatch.core.files import sync_directory
from autobatch.device.oom import first_line, is_oom
from autobatch.distributed.ranks import Ranks
from autobatch.step.gradients import is_sharded

SCHEMA = 6
"""Format of checkpoints; 6 has the state in one file of torch."""
MANIFEST = "manifest.json"
STATE = "state.pt"
SHARDED = "$sharded"
"""Key of what stands for a sharded tensor in a state: its name; see `ShardedTensor`."""
_PREFIX = b'{"sha256": "'
_BODY_START = len(_PREFIX) + 64 + 2
"""Offset of the first byte that the manifest's own sum covers."""
_NAME = re.compile(r"step-(\d+)")
_LEFTOVER = re.compile(r"step-\d+\.tmp-\d+")


class ShardedTensor(NamedTuple):
    """Form of a tensor of which each rank holds a part."""

    shape: list[int]
    dtype: torch.dtype
    dim: int | None
    """The dimension that is cut over the ranks; None if each rank has all of it."""


def map_leaves(value: Any, change: Callable[[str, Any], Any], place: str = "") -> Any:
    """Return a state with each leaf changed.

    Args:
        value: dicts, lists and tuples of leaves. Objects of other classes are leaves.
        change: receives the place of a leaf, which are the keys joined by slashes, and the leaf.
        place: of the value.
    """

    def inner(key: object, item: Any) -> Any:
        return map_leaves(item, change, f"{place}/{key}" if place else str(key))

    if type(value) in (dict, OrderedDict, Counter):
        return type(value)({key: inner(key, item) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(inner(number, item) for number, item in enumerate(value))
    return change(place, value)


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
        folder: the folder of all checkpoints of the run.
        step: batches seen, which names the checkpoint.
        state: tensors and plain values, as `check_savable` wants them.
        facts: JSON that users and resumes read without loading tensors.
        keep_last: checkpoints to keep.
        ranks: all of them call this; None if this process trains alone.

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
        _prune(target, keep_last)
        return str(target)

    of_ranks = _write_shards(Path(ranks.once(begin)), shards, ranks)
    return Path(ranks.once(publish))


def _without_shards(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a state with plain numbers, and a form in place of each sharded tensor; and these by name."""
    shards: dict[str, Tensor] = {}
    names: dict[int, str] = {}
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
        form = ShardedTensor([*leaf.shape], leaf.dtype, getattr(placement, "dim", None))
        return {SHARDED: name, **form._asdict()}

    return map_leaves(dict(state), plain), shards


def sharded_tensors(state: Any) -> dict[str, ShardedTensor]:
    """Return the forms of the sharded tensors of a state that was read, by name."""
    found: dict[str, ShardedTensor] = {}

    def collect(form: dict[str, Any]) -> None:
        found[form[SHARDED]] = ShardedTensor(form["shape"], form["dtype"], form["dim"])

    replace_sharded(state, collect)
    return found


def replace_sharded(state: Any, replacement: Callable[[dict[str, Any]], Any]) -> Any:
    """Return a state with something else in place of the form of each sharded tensor."""
    if isinstance(state, dict):
        if SHARDED in state:
            return replacement(state)
        return {key: replace_sharded(item, replacement) for key, item in state.items()}
    if type(state) in (list, tuple):
        return type(state)(replace_sharded(item, replacement) for item in state)
    return state


def _write_shards(
    temporary: Path, shards: Mapping[str, Tensor], ranks: Ranks
) -> Mapping[str, Mapping[str, Any]]:
    """Write the sharded tensors of all ranks, and return sizes and sums of their files by name."""
    if not shards:
        return {}
    # Only here: one process needs no torch.distributed.
    from autobatch.distributed.group import Group
    from autobatch.distributed.sharding.state import write_shards

    assert isinstance(ranks, Group)
    try:
        return write_shards(temporary, shards, ranks)
    except (CheckpointError, DoesNotFitError):
        ranks.once(lambda: shutil.rmtree(temporary, ignore_errors=True))
        raise


class _NamingFile:
    """File that keeps its first error: torch raises another one, which does not name a full disk."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: BaseException | None = None

    def write(self, part: bytes | memoryview) -> int:
        """Write a part."""
        try:
            return self._file.write(part)
        except BaseException as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Do nothing: the file is flushed once, at its end."""


def _write_state(path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Write a state, flush it to the disk, and return its size and sum."""
    with path.open("wb") as file:
        naming = _NamingFile(file)
        try:
            torch.save(state, naming)  # type: ignore[arg-type]
        except Exception:
            if naming.error is None:
                raise
        if naming.error is not None:
            raise naming.error
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": _sum_of(path)}


def _sum_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _as_checkpoint_error(target: Path) -> Iterator[None]:
    """Undo a failed checkpoint, and name the cause if the system refused something within the block."""
    try:
        yield
    except BaseException as error:
        shutil.rmtree(_temporary(target), ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise CheckpointError(
            f"the checkpoint of step {_number(target)} could not be written to {target.parent}: "
            f"{error.strerror or error}. Free some space there; no earlier checkpoint is lost"
        ) from error


def list_checkpoints(folder: Path) -> list[Path]:
    """Return all published checkpoints, valid or not, oldest first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def begin_after(folder: Path, step: int) -> None:
    """Prepare a folder for a run that continues from the checkpoint of a step, or begins with step 0.

    What a killed process left half-written is deleted. Checkpoints of later steps, which were passed over,
    are set aside, because the run reaches these steps again.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
    for path in list_checkpoints(folder):
        if _number(path) > step:
            names = (path.with_name(f"{path.name}.damaged-{number}") for number in itertools.count(1))
            path.rename(next(name for name in names if not name.exists()))


def _prune(newest: Path, keep_last: int) -> None:
    """Delete the oldest checkpoints over ``keep_last``. Each is renamed first, so none is ever incomplete."""
    older = [path for path in list_checkpoints(newest.parent) if _number(path) <= _number(newest)]
    for path in older[:-keep_last]:
        # A checkpoint that cannot be deleted now (permissions) is tried again at the next one.
        with contextlib.suppress(OSError):
            shutil.rmtree(path.rename(_temporary(path)))


def _number(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp-{os.getpid()}")


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
    with path.open("wb") as file:
        file.write(_PREFIX + hashlib.sha256(body).hexdigest().encode() + b'",' + body)
        file.flush()
        os.fsync(file.fileno())


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


def check_files(path: Path, manifest: Mapping[str, Any]) -> None:
    """Check the files of the checkpoint ``path``: those of the manifest, and no others.

    Raises:
        CheckpointError: a file differs; names it and the fault.
    """
    try:
        for name, expected in sorted(manifest["files"].items()):
            size = (path / name).stat().st_size
            if size != expected["bytes"]:
                raise CheckpointError(f"{path}: {name} must have {expected['bytes']} bytes, found {size}")
            if _sum_of(path / name) != expected["sha256"]:
                raise CheckpointError(f"{path}: {name} was changed after it was written (SHA-256 differs)")
        # The readers of tensors take every such file of the folder.
        for file_path in sorted(path.glob("*.safetensors")):
            if file_path.name not in manifest["files"]:
                raise CheckpointError(f"{path}: {file_path.name} is not listed in {MANIFEST}")
    except OSError as error:
        if is_oom(error) or isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: {error.filename} cannot be read ({error.strerror})") from None


def is_valid(path: Path) -> bool:
    """Return whether a checkpoint is unchanged since it was written."""
    try:
        check_files(path, read_manifest(path))
    except CheckpointError:
        return False
    return True


class Loaded(NamedTuple):
    """The newest valid checkpoint."""

    path: Path
    state: dict[str, Any]
    """Its tensors are pages of the file until they are written."""
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
        ranks: all of them call this and load the same one, and rank 0 compares the sums. None if this process
            trains alone.

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
            check(path, state, manifest["facts"])
        except CheckpointError as error:
            reason = str(error)
        except Exception as error:  # a hostile or foreign file may make the reader raise anything
            if is_oom(error):
                raise
            reason = f"{path}: {STATE} cannot be read ({type(error).__name__})"
        reasons = [found for found in ranks.gather(reason) if found]
        if not reasons:
            return Loaded(path, state, manifest["facts"], passed_over)
        passed_over.append(reasons[0])
    if passed_over:
        raise InputError(
            f"no checkpoint in {folder} is valid ({', '.join(passed_over)}): start without --resume, or "
            "restore one of them from a copy"
        )
    return None
