"""Reading of checkpoints: the newest valid one, and what is wrong with those after it.

Nothing in a file is executed. A damaged checkpoint is named and passed over, never deleted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from autobatch.core.errors import CheckpointError, InputError
from autobatch.device.oom import is_oom
from autobatch.distributed.ranks import Ranks
from autobatch.training.checkpoints.checkpoint import list_checkpoints
from autobatch.training.checkpoints.manifest import check_files, read_manifest
from autobatch.training.checkpoints.state_file import read_state


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
        The checkpoint; ``None`` if the folder has none at all.

    Raises:
        InputError: every checkpoint is damaged.
        Exception: memory ran out, which does not make a checkpoint damaged; see `autobatch.device.oom`.
    """
    ranks = ranks or Ranks()
    passed_over: list[str] = []
    for name in ranks.once(lambda: [path.name for path in reversed(list_checkpoints(folder))]):
        found, reason = None, None
        try:
            found = load_checkpoint(folder / name, check, part=(ranks.rank, ranks.world))
        except CheckpointError as error:
            reason = str(error)
        reasons = [one for one in ranks.gather(reason) if one is not None]
        if found is not None and not reasons:
            return found._replace(passed_over=passed_over)
        passed_over.append(reasons[0])
    if passed_over:
        raise InputError(
            f"no checkpoint in {folder} is valid ({', '.join(passed_over)}): start without --resume, or "
            "restore one of them from a copy"
        )
    return None


def load_checkpoint(path: Path, check: Check = lambda *_: None, *, part: tuple[int, int] = (0, 1)) -> Loaded:
    """Load a checkpoint.

    Args:
        path: its folder.
        check: see `load_newest`.
        part: see `autobatch.training.checkpoints.manifest.check_files`.

    Raises:
        CheckpointError: it is damaged; names the fault.
        Exception: memory ran out; see `load_newest`.
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
