"""Files and processes that tests leave behind."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import util
from pathlib import Path
from unittest.mock import patch

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
    # Not in the folder of pytest: the path of a socket has a hundred characters at most.
    name = tempfile.mkdtemp(prefix="tests-")
    # After `multiprocessing` has removed its own folder, which it does when this process ends.
    util.Finalize(None, shutil.rmtree, (name,), {"ignore_errors": True}, exitpriority=AFTER_ALL)
    with patch.dict(os.environ, TMPDIR=name), patch.object(tempfile, "tempdir", name):
        own = util.get_temp_dir()  # forked processes use it too
        yield
    wait_until(lambda: not _orphans(name), f"processes that nobody waits for: {_orphans(name)}")
    files = [path.name for path in Path(name).iterdir() if path != Path(own)]
    assert not [file for file in files if not file.startswith(OF_TORCH)], f"temporary files: {files}"


def wait_until(is_done: Callable[[], bool], complaint: object) -> None:
    """Wait until something is so; processes that were killed need some time to end."""
    deadline = time.monotonic() + 60
    while not is_done():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.05)


def _orphans(folder: str) -> dict[int, str]:
    """Return the commands of processes that began with this folder and have lost their parent, on Linux."""
    orphans = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            has_folder = f"TMPDIR={folder}\0".encode() in (process / "environ").read_bytes()
            # After the name, which may contain anything but the last bracket: the state and the parent.
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            if has_folder and parent == "1":
                orphans[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")[:200]
    return orphans
