"""Folder of a run: its name, its files, the lock that keeps a second run out, and the trained weights."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout
from torch import Tensor

from autobatch.core.errors import CheckpointError, InputError
from autobatch.core.files import AVERAGED_WEIGHTS, METRICS, REPORT, RESULT, WEIGHTS, replaced_file
from autobatch.core.text import error_text
from autobatch.distributed.engine import Shared, Whole
from autobatch.step.train_state import TrainState
from autobatch.training.metrics import TENSORBOARD, TRACKERS

RUNS = Path("runs")
LOCK = ".lock"
CHECKPOINTS = "checkpoints"
OOM_FILE = "oom.json"
"""Left by a run that ended out of memory: the largest ``micro_batch`` to resume with."""
METADATA = {"format": "pt"}
"""Written into every file of weights; transformers reads only files whose format it knows. A second entry
would make the bytes of a file differ from run to run, because safetensors writes them in any order."""


def folder_of(asked: str | None, name: str, *, resume: bool) -> Path:
    """Return the folder of a run: the one that was asked for, else ``runs/NAME/DATE``.

    That is a new one or, to ``resume``, the last that has checkpoints.

    Raises:
        InputError: there is no run to resume.
    """
    if asked is not None:
        return Path(asked)
    runs = RUNS / name
    if resume:
        known = sorted(path.parent for path in runs.glob(f"*/{CHECKPOINTS}") if path.is_dir())
        if not known:
            raise InputError(
                f"--resume found no run in {runs}: give its folder with --out, or start without --resume"
            )
        return known[-1]
    stamp = datetime.datetime.now(tz=datetime.UTC).strftime("%Y%m%d-%H%M%S")
    names = itertools.chain([stamp], (f"{stamp}-{number}" for number in itertools.count(2)))
    return next(runs / name for name in names if not os.path.lexists(runs / name))


@contextlib.contextmanager
def claim_folder(out: Path) -> Iterator[None]:
    """Hold the folder for this run within the block; the system releases it even if the process is killed.

    Folders that were made for it are removed if nothing was written.

    Raises:
        InputError: it is not writable, or another run holds it.
    """
    made = [path for path in (out, *out.absolute().parents) if not os.path.lexists(path)]
    lock: BaseFileLock = FileLock(out / LOCK)
    try:
        out.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except Timeout:  # which is an OSError, too
            raise
        except (OSError, NotImplementedError):  # the file system has no locks, so a file stands for one
            lock = SoftFileLock(out / f"{LOCK}-held")
            lock.acquire(blocking=False)
    except Timeout:
        raise InputError(
            f"another run is writing to {out}: wait until it ends, or give another --out"
        ) from None
    except OSError as error:
        raise InputError(
            f"the run's folder {out} cannot be written ({error.strerror or error}): give another --out"
        ) from None
    try:
        yield
    finally:
        lock.release()
        with contextlib.suppress(OSError):
            if made and os.listdir(out) == [LOCK]:
                (out / LOCK).unlink()
            for path in made:
                path.rmdir()


def move_earlier_run(out: Path) -> str | None:
    """Move an earlier run out of the folder, so that its files neither mix with the new ones nor get lost.

    Returns:
        Its new folder; None if there was no earlier run.
    """
    names = (CHECKPOINTS, OOM_FILE, METRICS, TRACKERS, TENSORBOARD, WEIGHTS, AVERAGED_WEIGHTS, RESULT, REPORT)
    old = [path for path in (out / name for name in names) if os.path.lexists(path)]
    if not old:
        return None
    numbered = (out / f"previous-{number}" for number in itertools.count(1))
    folder = next(path for path in numbered if not path.exists())
    folder.mkdir()
    for path in old:
        path.rename(folder / path.name)
    return str(folder)


def export_weights(train_state: TrainState, folder: Path, engine: Whole) -> None:
    """Write the weights as safetensors, and their averages if there are any.

    All ranks call it, and rank 0 writes. Of tied weights a file has one, and its metadata name the others
    (`safetensors.torch.save_model`).

    Raises:
        CheckpointError: a file cannot be written, or safetensors cannot hold a part of the state dict.
    """

    def export(name: str) -> None:
        if isinstance(engine, Shared):
            # Only here: importing it takes a second.
            from autobatch.distributed.shard import gather_weights

            weights = gather_weights(train_state.model)
        else:
            weights = train_state.model.state_dict()
        engine.ranks.once(lambda: _write(weights, folder / name))

    export(WEIGHTS)
    if train_state.average is not None:
        with train_state.averaged():
            export(AVERAGED_WEIGHTS)


def _write(weights: Mapping[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_model

    try:
        # Names are those before ``torch.compile``. Of a part of another tensor, not tied to it, a copy.
        own = {
            ".".join(part for part in name.split(".") if part != "_orig_mod"): (
                value if value.nbytes == value.untyped_storage().nbytes() else value.clone()
            )
            for name, value in sorted(weights.items())
        }
        model: Any = SimpleNamespace(state_dict=lambda: dict(own))  # all that is asked of a model
        with replaced_file(path) as temporary:
            save_model(model, str(temporary), {**METADATA})  # it adds the names of tied weights
    except Exception as error:  # of many kinds, for a full disk and for what safetensors cannot hold
        reason = f"{type(error).__name__}: {error_text(error, first_line=True)}".rstrip(".")
        raise CheckpointError(
            f"the weights could not be written to {path} ({reason}). The checkpoints hold them too"
        ) from error
