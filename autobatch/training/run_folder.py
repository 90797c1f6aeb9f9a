"""The folder of a run: how it is called, that it can be written, and that one run at a time writes to it."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from autobatch.core.errors import (
    CheckpointError,
    InputError,
)
from autobatch.step.train_state import TrainState

WEIGHTS = "model.safetensors"


AVERAGED_WEIGHTS = "model-ema.safetensors"
"""The averages in place of the weights; buffers as they are."""


def export_weights(train_state: TrainState, folder: Path) -> None:
    """Write the weights, and their averages where any are kept, as safetensors.

    Raises:
        CheckpointError: a file cannot be written.
    """
    _export(train_state.model, folder / WEIGHTS)
    if train_state.average is not None:
        with train_state.average.swapped_in():
            _export(train_state.model, folder / AVERAGED_WEIGHTS)


def _export(model: nn.Module, path: Path) -> None:
    """Write one file, whole or not at all; parameters that are tied are stored once."""
    from safetensors.torch import save_model

    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        save_model(model, str(temporary))
        temporary.chmod(0o644)  # it is made for its owner's eyes alone
        temporary.replace(path)
    except Exception as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
            raise CheckpointError(
                f"the weights could not be written to {path}: {error}; the checkpoints hold them all the same"
            ) from error
        raise


CHECKPOINTS = "checkpoints"


METRICS = "metrics.jsonl"


RUNS = Path("runs")


RESULT = "result.json"


REPORT = "report.html"


def folder_of(asked: str | None, name: str, *, resume: bool) -> Path:
    """Where a run writes: what was ``asked`` for, else ``runs/NAME/DATE``, the last of them to resume.

    Raises:
        InputError: there is nothing to resume.
    """
    if asked is not None:
        return Path(asked)
    runs = RUNS / name
    if resume:
        known = sorted(path.parent for path in runs.glob(f"*/{CHECKPOINTS}") if path.is_dir())
        if not known:
            raise InputError(f"--resume found no run in {runs}: give --out DIR, or start without --resume")
        return known[-1]
    stamp = datetime.datetime.now(tz=datetime.UTC).strftime("%Y%m%d-%H%M%S")
    out = runs / stamp
    number = 1
    while out.exists():
        number += 1
        out = runs / f"{stamp}-{number}"
    return out


@contextlib.contextmanager
def claim_folder(out: Path) -> Iterator[None]:
    """Inside, the folder is this run's alone; the system lets go of it however the process ends.

    What was made for it goes again where nothing was written.

    Raises:
        InputError: it cannot be written, or another run writes to it.
    """
    made = [path for path in (out, *out.absolute().parents) if not path.exists()]
    _make(out)
    try:
        with _locked(out):
            yield
    finally:
        with contextlib.suppress(OSError):
            for path in made:
                path.rmdir()


def move_earlier_run(out: Path) -> Path | None:
    """Move an earlier run of the same folder out of the way: nothing is lost, nothing is mixed.

    Returns:
        Where it stands now; ``None`` where there was none.
    """
    names = (CHECKPOINTS, METRICS, WEIGHTS, AVERAGED_WEIGHTS, RESULT, REPORT)
    old = [path for path in (out / name for name in names) if path.exists()]
    if not old:
        return None
    number = 1
    while (out / f"previous-{number}").exists():
        number += 1
    folder = out / f"previous-{number}"
    folder.mkdir(parents=True)
    for path in old:
        path.rename(folder / path.name)
    return folder


def _make(out: Path) -> None:
    """Make a run's folder, or say that it cannot be written, before minutes are spent."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"the run's folder {out} cannot be made: {error.strerror}; give another --out"
        ) from None
    if not os.access(out, os.W_OK | os.X_OK):
        raise InputError(f"the run's folder {out} cannot be written; give another --out")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold an advisory lock on the folder itself, which leaves no file behind (flock(2))."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"another run is writing to {folder}: wait for its end, or give another --out"
            ) from None
        except OSError:  # a file system without such locks, which some of those on networks are
            pass
        yield
    finally:
        os.close(descriptor)
