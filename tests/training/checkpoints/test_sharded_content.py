"""The parts of a sharded tensor must be all there, once, in their places and types."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from autobatch.core.errors import CheckpointError
from autobatch.training.checkpoints.load import load_checkpoint
from autobatch.training.checkpoints.sharded_content import PLACES, ShardNote, check_shards
from tests.support.checkpoints import save

WEIGHT = ShardNote(shape=[5, 2], dtype="float32", dim=0, kept_at="model.weight")
NOTES = {"model.weight": WEIGHT, "model.tied": WEIGHT}


def write(folder: Path, rank: int, start: int, rows: int, *, dtype=torch.float32, width: int = 2) -> None:
    places = {"model.weight": {"saved_offsets": [start, 0]}}
    save_file(
        {"model.weight": torch.zeros(rows, width, dtype=dtype)},
        folder / f"shard-0000{rank + 1}-model-00001-of-00001.safetensors",
        metadata={PLACES: json.dumps(places)},
    )


def test_all_parts_are_found_in_any_order_and_empty_ones_do_not_count(tmp_path: Path) -> None:
    write(tmp_path, 0, 3, 2)
    write(tmp_path, 1, 0, 3)
    write(tmp_path, 2, 5, 0)
    check_shards(tmp_path, NOTES)
    check_shards(tmp_path, {"empty": ShardNote(shape=[0, 2], dtype="float32", dim=0, kept_at="empty")})


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "no file has a part of model.weight"),
        ([(0, 3)], "must have 5 rows together, found 3"),
        ([(0, 2), (3, 2)], r"must begin at \[2, 0\] and be float32, found \[2, 2\] of float32 at \[3, 0\]"),
        ([(0, 3), (2, 3)], r"must begin at \[3, 0\]"),
        ([(0, 3), (3, 3)], "must have 5 rows together, found 6"),
    ],
)
def test_a_missing_or_doubled_part_is_named(tmp_path: Path, parts, message: str) -> None:
    for rank, (start, rows) in enumerate(parts):
        write(tmp_path, rank, start, rows)
    with pytest.raises(ValueError, match=message):
        check_shards(tmp_path, NOTES)


def test_another_type_or_shape_is_named(tmp_path: Path) -> None:
    write(tmp_path, 0, 0, 5, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"be float32, found .* of float16"):
        check_shards(tmp_path, NOTES)
    write(tmp_path, 0, 0, 5, width=3)
    with pytest.raises(ValueError, match=r"found \[5, 3\]"):
        check_shards(tmp_path, NOTES)


def test_a_file_without_places_or_of_another_kind_is_named(tmp_path: Path) -> None:
    save_file({"model.weight": torch.zeros(5, 2)}, tmp_path / "shard-00001.safetensors")
    with pytest.raises(ValueError, match=r"shard-00001\.safetensors does not tell the place of model"):
        check_shards(tmp_path, NOTES)
    (tmp_path / "shard-00001.safetensors").write_bytes(b"text")
    with pytest.raises(ValueError, match=r"shard-00001\.safetensors cannot be read"):
        check_shards(tmp_path, NOTES)


def test_a_file_that_the_manifest_does_not_list_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    write(path, 0, 0, 5)
    with pytest.raises(CheckpointError, match=r"shard-00001.* is not listed in manifest\.json"):
        load_checkpoint(path)


def test_a_tensor_kept_nowhere_is_named(tmp_path: Path) -> None:
    write(tmp_path, 0, 0, 5)
    for notes in ({"model.tied": WEIGHT}, {**NOTES, "a": ShardNote([5, 2], "float32", 0, "model.tied")}):
        check_shards(tmp_path, NOTES)
        with pytest.raises(ValueError, match=r"must be kept at the place of a sharded tensor, found model\."):
            check_shards(tmp_path, {**notes, "b": ShardNote([5, 2], "float32", 0, "model.other")})
