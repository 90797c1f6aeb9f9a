"""Atomic writes, and reads whose failures are one line."""

from __future__ import annotations

import errno

import pytest

from autobatch import InputError
from autobatch.core.files import read_toml, write_atomic


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch) -> None:
    path = tmp_path / "a" / "file"
    assert write_atomic(path, b"older") == path
    write_atomic(path, b"old")

    def is_full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", is_full)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


DEEP = 100_000


def test_every_unreadable_file_is_one_line_with_the_path(tmp_path) -> None:
    path = tmp_path / "file"
    for content in ("a = " + "[" * DEEP, "a = " + "9" * 5000, "a = ", "\udcff", "a\0 = 1"):
        path.write_bytes(content.encode(errors="surrogateescape"))
        with pytest.raises(InputError) as raised:
            read_toml(path)
        line = str(raised.value)
        assert line.startswith(f"{path} is not ")
        assert line.isprintable()
        assert len(line) < 500 + len(str(path))
    for name in ("absent", "nul\0", "x" * 300, "."):
        with pytest.raises(InputError, match="cannot be read: "):
            read_toml(tmp_path / name)
