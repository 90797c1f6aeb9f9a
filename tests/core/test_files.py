"""Atomic writes: a file is written whole or not at all."""

from __future__ import annotations

import pytest

from autobatch.core.files import write_atomic


def test_folders_are_made_and_an_old_file_is_replaced(tmp_path):
    path = tmp_path / "a" / "b" / "file"
    assert write_atomic(path, b"old") == path
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = write_atomic(tmp_path / "file", b"old")

    def fails(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_replaced_file_keeps_its_mode_and_a_new_one_can_be_read_by_all(tmp_path):
    path = write_atomic(tmp_path / "file", b"old")
    assert path.stat().st_mode & 0o777 == 0o644
    path.chmod(0o600)
    write_atomic(path, b"new")
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_folder_in_the_way_is_an_error(tmp_path):
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError, match="file"):
        write_atomic(tmp_path / "file", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
