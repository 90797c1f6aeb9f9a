"""Atomic writes, and reads whose failures are one line."""

from __future__ import annotations

import errno
import os

import pytest

from autobatch import InputError
from autobatch.core.files import read_json, read_toml, write_atomic


def test_folders_are_made_and_an_old_file_is_replaced(tmp_path):
    path = tmp_path / "a" / "b" / "file"
    assert write_atomic(path, b"old") == path
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = write_atomic(tmp_path / "file", b"old")

    def is_full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", is_full)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("mask", "mode"), [(0o077, 0o600), (0o002, 0o664)])
def test_a_file_honours_the_umask(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        assert write_atomic(tmp_path / "file", b"new").stat().st_mode & 0o777 == mode
    finally:
        os.umask(before)


DEEP = 100_000
NOT_JSON = ["[" * DEEP, "NaN", "1e999", '{"a":' * DEEP, "9" * 5000, "{", "", "\udcff", "nul\0"]
NOT_TOML = ["a = " + "[" * DEEP, "a = " + "{a = " * DEEP, "a = " + "9" * 5000, "a = ", "\udcff", "a\0 = 1"]


@pytest.mark.parametrize(
    ("read", "content"),
    [(read_json, text) for text in NOT_JSON] + [(read_toml, text) for text in NOT_TOML],
    ids=lambda value: value.__name__ if callable(value) else repr(value[:5]),
)
def test_every_unreadable_content_is_one_line_with_the_path(tmp_path, read, content):
    path = tmp_path / "file"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(InputError) as raised:
        read(path)
    line = str(raised.value)
    assert line.startswith(f"{path} is not ")
    assert line.isprintable()
    assert len(line) < 500 + len(str(path))


@pytest.mark.parametrize("read", [read_json, read_toml])
@pytest.mark.parametrize("name", ["absent", "nul\0", "x" * 300, "."])
def test_a_file_that_cannot_be_opened_is_one_line(tmp_path, read, name):
    with pytest.raises(InputError, match="cannot be read: "):
        read(tmp_path / name)
