"""Checkpoints that were damaged, or made by somebody who means harm."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from autobatch.core.errors import CheckpointError
from autobatch.training.checkpoint import is_valid, load_newest, save_checkpoint, verify

MANIFEST, STATE = "manifest.json", "state.pt"


def save(folder: Path, step: int, size: int = 8, **options) -> Path:
    state = {"weights": torch.full((size,), float(step)), "step": step}
    return save_checkpoint(folder, step=step, state=state, facts={"seed": 1, "step": step}, **options)


def newest(folder: Path) -> int | None:
    loaded = load_newest(folder)
    return None if loaded is None else loaded.state["step"]


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    loaded = load_newest(tmp_path)
    assert (loaded.path, loaded.facts, loaded.passed_over) == (path, {"seed": 1, "step": 2}, [])
    assert torch.equal(loaded.state["weights"], torch.full((8,), 2.0))
    assert load_newest(tmp_path / "nothing") is None


@pytest.mark.parametrize("name", [MANIFEST, STATE])
def test_a_change_of_any_byte_is_seen(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    content = (path / name).read_bytes()
    # All of the manifest; of the state every 7th byte, which meets each of its parts.
    for place in range(0, len(content), 1 if name == MANIFEST else 7):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        (path / name).write_bytes(changed)
        with pytest.raises(CheckpointError, match="step-00000002"):
            verify(path)
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


def test_where_all_are_damaged_all_are_named(tmp_path: Path) -> None:
    for step in (1, 2):
        (save(tmp_path, step) / STATE).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*step-00000002.*step-00000001"):
        load_newest(tmp_path)


def test_a_future_format_is_said_to_be_one(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    content = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text(content.replace('"schema": 2', '"schema": 3'))
    with pytest.raises(CheckpointError, match="has format 3, and this version reads 2"):
        verify(path)


class Malicious:
    """Writes a file when it is unpickled."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self):
        return (Path.touch, (self.sentinel,))


@pytest.mark.parametrize("raw", [True, False])
def test_a_malicious_pickle_is_refused_and_not_executed(tmp_path: Path, raw: bool, monkeypatch) -> None:
    """Even one with a manifest that is right in every byte."""
    folder = tmp_path / "checkpoints"
    sentinel = tmp_path / "sentinel"
    save(folder, 1)

    def write(state, file) -> None:
        if raw:
            file.write(pickle.dumps(Malicious(sentinel)))
        else:
            real(state, file)

    real = torch.save
    monkeypatch.setattr(torch, "save", write)
    save_checkpoint(folder, step=2, state={"step": Malicious(sentinel)}, facts={})
    assert is_valid(folder / "step-00000002")
    loaded = load_newest(folder)
    assert loaded.state["step"] == 1
    assert "state.pt cannot be read" in loaded.passed_over[0]
    assert not sentinel.exists()
    pickle.loads(pickle.dumps(Malicious(sentinel)))
    assert sentinel.exists(), "the pickle does what it says where it is executed"
