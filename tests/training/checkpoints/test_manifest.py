"""Damage to any file of a checkpoint is detected and named."""

from __future__ import annotations

import errno
import hashlib
from pathlib import Path

import pytest
import torch

from autobatch.core.errors import CheckpointError
from autobatch.training.checkpoints.load import load_checkpoint, load_newest
from autobatch.training.checkpoints.manifest import check_files, read_manifest, write_manifest, write_state
from tests.support.checkpoints import MANIFEST, STATE, newest, save


@pytest.mark.parametrize("name", [MANIFEST, STATE])
def test_a_change_of_any_byte_is_detected(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    content = (path / name).read_bytes()
    # Every byte of the manifest, and every 7th of the state, which is in each of its parts.
    for place in range(0, len(content), 1 if name == MANIFEST else 7):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        (path / name).write_bytes(changed)
        with pytest.raises(CheckpointError, match="step-00000002"):
            load_checkpoint(path)
    loaded = load_newest(tmp_path)
    assert loaded.state["step"] == 1
    assert len(loaded.passed_over) == 1
    assert str(path) in loaded.passed_over[0]
    assert name in loaded.passed_over[0]
    assert (path / name).read_bytes() == bytes(changed), "a damaged checkpoint is never deleted"
    (path / name).write_bytes(content)
    assert newest(tmp_path) == 2


DAMAGES = {
    "truncated": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "zeroed page": lambda content: content[:64] + bytes(128) + content[192:],
    "longer": lambda content: content + b"\0",
    "text": lambda content: b"not a checkpoint",
    "nested": lambda content: b"[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [MANIFEST, STATE])
def test_damage_is_named_and_passed_over(tmp_path: Path, name: str, damage: str) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    (path / name).write_bytes(DAMAGES[damage]((path / name).read_bytes()))
    loaded = load_newest(tmp_path)
    assert loaded.state["step"] == 1
    assert f"{path}: {name}" in loaded.passed_over[0]
    assert path.is_dir()


@pytest.mark.parametrize("name", [MANIFEST, STATE])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1)
    (save(tmp_path, 2) / name).unlink()
    loaded = load_newest(tmp_path)
    assert loaded.state["step"] == 1
    assert name in loaded.passed_over[0]


def test_another_format_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    content = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text(content.replace('"schema": 2', '"schema": 3'))
    with pytest.raises(CheckpointError, match="has format 3, and this version reads 2"):
        load_checkpoint(path)


def test_the_manifest_lists_what_is_on_the_disk(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    content = (path / STATE).read_bytes()
    manifest = read_manifest(path)
    assert manifest["files"] == {
        STATE: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    }
    assert (manifest["step"], manifest["facts"]) == (2, {"seed": 1, "step": 2})


def test_without_sums_only_sizes_are_compared(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    content = (path / STATE).read_bytes()
    (path / STATE).write_bytes(bytes(len(content)))
    check_files(path, read_manifest(path), sums=False)
    (path / STATE).write_bytes(content[:-1])
    with pytest.raises(
        CheckpointError, match=rf"{STATE} must have {len(content)} bytes, found {len(content) - 1}"
    ):
        check_files(path, read_manifest(path), sums=False)


@pytest.mark.parametrize("size", [8, 1_000_000])
def test_a_full_device_raises_the_error_of_the_system(size: int) -> None:
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_state(Path("/dev/full"), {"weights": torch.zeros(size)})
    assert caught.value.errno == errno.ENOSPC


def test_files_outside_of_the_checkpoint_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    files = read_manifest(path)["files"]
    write_manifest(
        path / MANIFEST, {"step": 2, "files": {**files, "../../secret": files[STATE]}, "facts": {}}
    )
    with pytest.raises(CheckpointError, match="lists files outside of the checkpoint"):
        read_manifest(path)
