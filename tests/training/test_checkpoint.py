"""Checkpoints are loaded as they were saved, pruned from the oldest, never executed, and damage is named."""

from __future__ import annotations

import shutil
from collections import Counter, OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

from autobatch import InputError
from autobatch.training.checkpoint import (
    MANIFEST,
    SCHEMA,
    STATE,
    begin_after,
    check_savable,
    list_checkpoints,
    load_newest,
    read_manifest,
)
from tests.support.checkpoints import is_valid, newest, save, seal
from tests.support.planted import payloads


def test_a_checkpoint_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    tied = torch.randn(100)
    values = [None, True, 2**70, "text", b"bytes", (1, [2]), {1, "a"}, Counter({3: 2}), OrderedDict(a=1)]
    state = {
        "tensors": [torch.empty(0, 3), torch.arange(12).reshape(3, 4).t(), torch.arange(9.0)[::7]],
        "values": values,
        "numbers": [numpy.float64(0.1), numpy.int32(3)],
        "tied": [tied, nn.Parameter(tied)],
    }
    check_savable(state)
    with torch.device("meta"):  # the default device of a user changes nothing
        path = save(tmp_path, 2, state=state)
        loaded = load_newest(tmp_path)
    assert (loaded.path, loaded.facts, loaded.passed_over) == (path, {"seed": 1, "step": 2}, [])
    assert all(map(torch.equal, loaded.state["tensors"], state["tensors"]))
    assert loaded.state["values"] == values
    assert list(map(type, loaded.state["values"])) == list(map(type, values))
    assert list(map(type, loaded.state["numbers"])) == [float, int]
    first, second = loaded.state["tied"]
    assert torch.equal(first, tied)
    assert first.data_ptr() == second.data_ptr()


@pytest.mark.parametrize("name", [MANIFEST, STATE])
def test_a_change_of_any_byte_is_detected(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    content = (path / name).read_bytes()
    for place in range(0, len(content), 1 if name == MANIFEST else 7):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        (path / name).write_bytes(changed)
        assert not is_valid(path)
    loaded = load_newest(tmp_path)
    assert loaded.state["step"] == 1
    (line,) = loaded.passed_over
    assert name in line
    assert (path / name).read_bytes() == bytes(changed), "a damaged checkpoint is never deleted"
    (path / name).write_bytes(content)
    assert newest(tmp_path) == 2


def test_a_file_that_is_cut_missing_or_planted_is_detected(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    for change, message in (
        (lambda: (path / STATE).write_bytes((path / STATE).read_bytes()[:-1]), f"{STATE} was changed"),
        ((path / STATE).unlink, f"{STATE} cannot be read"),
        ((path / "planted.safetensors").touch, r"planted\.safetensors was changed"),
        (lambda: path.rename(path.with_name("step-00000003")), "was changed"),
    ):
        seal(path, {})
        assert is_valid(path)
        change()
        with pytest.raises(InputError, match=f"no checkpoint .* is valid .*{message}"):
            load_newest(tmp_path)
        shutil.rmtree(tmp_path)
        save(tmp_path, 2)
    content = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text(content.replace(f'"schema": {SCHEMA}', '"schema": 5'))
    with pytest.raises(InputError, match="has format 5, and this version reads"):
        load_newest(tmp_path)


def test_a_forged_state_with_right_sums_is_refused_and_not_executed(tmp_path: Path) -> None:
    path, sentinel = save(tmp_path, 2), tmp_path / "executed"
    for payload in payloads(sentinel):
        (path / STATE).write_bytes(payload)
        seal(path, {})
        with pytest.raises(InputError, match=r"is valid .*state\.pt cannot be read") as caught:
            load_newest(tmp_path)
        assert not sentinel.exists()
        assert "\n" not in str(caught.value)


def test_checkpoints_of_later_steps_are_set_aside_and_leftovers_deleted(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "step-00000004.tmp").mkdir()
    (tmp_path / "step-00000003.damaged-1").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-00000003" / STATE).write_bytes(b"damaged")
    begin_after(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "notes.txt", "step-00000001", "step-00000002", "step-00000003.damaged-1", "step-00000003.damaged-2",
    ]  # fmt: skip
    save(tmp_path, 3, keep_last=2)
    assert [read_manifest(path)["step"] for path in list_checkpoints(tmp_path)] == [2, 3]
    assert (tmp_path / "step-00000003.damaged-2" / STATE).read_bytes() == b"damaged"
