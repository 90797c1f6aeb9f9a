"""The folder for the sockets of loader workers, with short and long paths."""

from __future__ import annotations

import multiprocessing.util
import os
import shutil
import tempfile
from multiprocessing.connection import Listener
from pathlib import Path

import pytest

from autobatch.core.errors import InputError
from autobatch.workload.socket_folder import LONGEST, SHORT, open_socket_folder

pytestmark = pytest.mark.skipif(os.name != "posix", reason="has no such sockets")


@pytest.fixture(autouse=True)
def no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process forget its folder until the end of a test."""
    monkeypatch.delitem(multiprocessing.current_process()._config, "tempdir", raising=False)
    # The test removes it, before the end of the process.
    monkeypatch.setattr(multiprocessing.util, "Finalize", lambda *_, **__: None)


@pytest.mark.parametrize("spare", [-1, 0, 1, 40])
def test_a_socket_can_be_opened_whatever_the_path_for_temporary_files(
    spare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir=SHORT) as short:
        length = LONGEST - len("/pymp-12345678/listener-12345678") + spare
        usual = Path(short, "x" * (length - len(short) - 1))
        usual.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(usual))
        open_socket_folder()
        assert tempfile.tempdir == str(usual)
        with Listener(family="AF_UNIX") as listener:
            folder = Path(str(listener.address)).parent
        shutil.rmtree(folder)
        assert folder.parent == (Path(SHORT) if spare > 0 else usual)


def test_a_folder_that_is_too_long_already_is_refused_with_its_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = "/" + "x" * 100
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", folder)
    with pytest.raises(InputError, match=rf"at most {LONGEST} bytes, 119 here: set TMPDIR"):
        open_socket_folder()
