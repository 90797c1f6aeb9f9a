"""Files and processes that tests leave behind."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import util
from pathlib import Path

SECONDS = 60.0
"""Time for processes that were killed to end."""
AFTER_ALL = -1000
"""Priority of what is done last when a process ends."""
OF_TORCH = "torchinductor_"
"""Start of the name of a cache that torch keeps beside temporary files."""


@contextmanager
def no_leftovers() -> Iterator[None]:
    """Give this process and its children a folder for temporary files, and check its end after the block.

    Raises:
        AssertionError: a file is left there, or a process that nobody waits for.
    """
    before = os.environ.get("TMPDIR"), tempfile.tempdir
    # Not in the folder of pytest: the path of a socket has a hundred characters at most.
    name = tempfile.mkdtemp(prefix="tests-")
    # After `multiprocessing` has removed its own folder, which it does when this process ends.
    util.Finalize(None, shutil.rmtree, (name,), {"ignore_errors": True}, exitpriority=AFTER_ALL)
    os.environ["TMPDIR"] = tempfile.tempdir = name
    own = util.get_temp_dir()  # forked processes use it too
    try:
        yield
    finally:
        tempfile.tempdir = before[1]
        os.environ.pop("TMPDIR")
        if before[0] is not None:
            os.environ["TMPDIR"] = before[0]
    found = _orphans(name)
    assert not found, f"processes that nobody waits for: {found}"
    files = [path.name for path in Path(name).iterdir() if path != Path(own)]
    assert not [one for one in files if not one.startswith(OF_TORCH)], f"temporary files: {files}"


def _orphans(folder: str) -> dict[int, str]:
    """Return the commands of processes that began with this folder and have lost their parent, on Linux."""
    deadline = time.monotonic() + SECONDS
    while (found := _orphans_now(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _orphans_now(folder: str) -> dict[int, str]:
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            has_folder = f"TMPDIR={folder}\0".encode() in (process / "environ").read_bytes()
            # After the name, which may contain anything but the last bracket: the state and the parent.
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            if has_folder and parent == "1":
                found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")[:200]
    return found
