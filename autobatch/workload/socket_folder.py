"""The folder of the sockets through which loader workers send tensors."""

from __future__ import annotations

import multiprocessing.util
import os
import sys
import tempfile

from autobatch.core.errors import InputError

SHORT = "/tmp"
"""Folder whose path is short enough for a socket. Python makes a private one in it."""
LONGEST = 107 if sys.platform == "linux" else 103
"""Bytes in the path of a socket (``sun_path`` in unix(7), without its final zero)."""
_FOLDER, _SOCKET = "/pymp-12345678", "/listener-12345678"


def open_socket_folder() -> None:
    """Make this process's folder for sockets, which its workers then use.

    Without it, each worker makes one of its own, and a worker that is killed leaves it behind. If the folder
    for temporary files has a long path, it is made in ``/tmp``, as by Python 3.14.
    A worker that cannot open its socket sends nothing, and the loop would wait in vain.

    Raises:
        InputError: this process has a folder already, whose path is too long.
    """
    if os.name != "posix":
        return
    usual = tempfile.gettempdir()
    if _is_too_long(usual + _FOLDER + _SOCKET):
        tempfile.tempdir = SHORT
    try:
        folder = multiprocessing.util.get_temp_dir()
    finally:
        tempfile.tempdir = usual
    if _is_too_long(folder + _SOCKET):
        raise InputError(
            f"loader workers send through sockets in {folder}, and the path of a socket has at most "
            f"{LONGEST} bytes, {len(os.fsencode(folder + _SOCKET))} here: set TMPDIR to a shorter path, or "
            "use --workers 0"
        )


def _is_too_long(path: str) -> bool:
    return len(os.fsencode(path)) > LONGEST
