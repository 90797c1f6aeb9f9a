"""The file that a run leaves when memory runs out, with the micro-batch for the next start."""

from __future__ import annotations

import json
from pathlib import Path

from autobatch.core.errors import AutobatchError, InputError, RestartSmallerError
from autobatch.core.files import read_json, write_atomic
from autobatch.training.checkpoints.checkpoint import list_checkpoints
from autobatch.training.checkpoints.load import Loaded
from autobatch.training.loop import Loop
from autobatch.training.run_folder import CHECKPOINTS, RunFiles

OOM_FILE = "oom.json"
"""Left by a run that ended out of memory: ``batches_seen``, the ``micro_batch`` to resume with, the error."""


def restart_hint(loop: Loop, files: RunFiles, error: AutobatchError) -> str | None:
    """Return how to continue after an error; after an out-of-memory error, write the smaller micro-batch."""
    has_checkpoint = bool(list_checkpoints(files.out / CHECKPOINTS))
    if not isinstance(error, RestartSmallerError):
        return f"resume from the newest checkpoint with: {files.resume_hint}" if has_checkpoint else None
    loop.engine.lower(loop.micro_batch)
    content = {
        "batches_seen": loop.batches_seen,
        "micro_batch": loop.micro_batch,
        "limits": loop.engine.limits,
        "error": str(error),
    }
    write_atomic(files.out / OOM_FILE, json.dumps(content, indent=1).encode())
    if has_checkpoint:
        return f"resume in smaller micro-batches with: {files.resume_hint}"
    smaller = loop.split.of_longest(loop.micro_batch)
    return f"there is no checkpoint yet: start again with --max-micro-batch {smaller}"


def apply_smaller_micro_batch(loop: Loop, out: Path, resumed: Loaded | None) -> None:
    """Use the smaller micro-batch of a resumed or restarted run that ended out of memory."""
    ranks, path = loop.engine.ranks, out / OOM_FILE
    if resumed is None and not ranks.restart:
        ranks.once(lambda: path.unlink(missing_ok=True))
        return
    found = ranks.once(lambda: _read_limits(path))
    if ranks.world > 1 and len(found) == ranks.world + 1:
        loop.engine.limits[:] = map(min, loop.engine.limits, found[1:])
        loop.micro_batch = loop.engine.limits[ranks.rank]
    elif ranks.world == 1 and found:
        loop.micro_batch = min(loop.micro_batch, found[0])


def _read_limits(path: Path) -> list[int]:
    """Return the micro-batch that a run left when memory ran out, then those of all ranks; or nothing."""
    try:
        content = read_json(path)
        found = [content["micro_batch"], *content.get("limits", [])]
    except (InputError, KeyError, TypeError, AttributeError):
        return []
    return found if all(isinstance(one, int) and one >= 1 for one in found) else []
