"""Folder of a run: its name, its files, and the lock that keeps a second run out."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from autobatch.core.errors import InputError
from autobatch.core.files import AVERAGED_WEIGHTS, METRICS, REPORT, RESULT, WEIGHTS
from autobatch.training.trackers import TENSORBOARD, TRACKERS

RUNS = Path("runs")
LOCK = ".lock"
CHECKPOINTS = "checkpoints"
OOM_FILE = "oom.json"
"""Left by a run that ended out of memory: the largest ``micro_batch`` to resume with."""


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
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"the run's folder {out} cannot be made ({error.strerror}): give another --out"
        ) from None
    if not os.access(out, os.W_OK | os.X_OK):
        raise InputError(f"the run's folder {out} is not writable: give another --out")
    lock: BaseFileLock = FileLock(out / LOCK)
    try:
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
