"""Checks of the sharded tensors of a checkpoint: their parts are input, also with valid sums."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

_Size = Annotated[int, Meta(ge=0)]
PLACES = "DCP_SHARDING_INFO"
"""Entry of the header in which torch.distributed.checkpoint keeps the place of each part."""


class ShardNote(msgspec.Struct):
    """A sharded tensor; see `autobatch.distributed.sharding.state.separate`."""

    shape: list[_Size]
    dtype: str
    dim: _Size | None
    kept_at: str
    """The place under which the files have it: tied tensors are kept once."""


class _Offsets(msgspec.Struct):
    saved_offsets: list[_Size]


class _Part(NamedTuple):
    start: list[int]
    shape: list[int]
    dtype: str


def check_shards(path: Path, notes: Mapping[str, ShardNote]) -> None:
    """Check that the files of a checkpoint have every element of every sharded tensor, once.

    Only their headers are read.

    Args:
        path: the folder of the checkpoint.
        notes: the sharded tensors by place.

    Raises:
        ValueError: a part is missing, lies elsewhere, or has another type; names it.
    """
    parts: dict[str, list[_Part]] = {}
    for file in sorted(path.glob("*.safetensors")):
        for place, part in _parts_of(file):
            parts.setdefault(place, []).append(part)
    for place, note in notes.items():
        if note.kept_at not in notes or notes[note.kept_at].kept_at != note.kept_at:
            raise ValueError(f"{place} must be kept at the place of a sharded tensor, found {note.kept_at}")
        _check_parts(note.kept_at, note, parts.get(note.kept_at, []))


def _parts_of(file: Path) -> Iterator[tuple[str, _Part]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            header = json.loads((opened.metadata() or {}).get(PLACES, "{}"))
            offsets = msgspec.convert(header, dict[str, _Offsets])
            for place in opened.keys():  # noqa: SIM118 - it is no mapping
                if place not in offsets:
                    raise ValueError(f"{file.name} does not tell the place of {place}")
                part = opened.get_slice(place)
                dtype = str(part[:0].dtype).removeprefix("torch.")
                yield place, _Part(offsets[place].saved_offsets, list(part.get_shape()), dtype)
    except SafetensorError as error:
        raise ValueError(f"{file.name} cannot be read ({error})") from None


def _check_parts(place: str, note: ShardNote, parts: list[_Part]) -> None:
    """Check that the parts of a tensor follow each other along the dimension that is sharded."""
    filled = [part for part in parts if all(part.shape)]
    if not filled and all(note.shape):
        raise ValueError(f"no file has a part of {place}")
    dim, end = note.dim or 0, 0
    for part in sorted(filled, key=lambda one: one.start):
        expected = [0] * len(note.shape)
        expected[dim] = end
        rest = note.shape[:dim] + note.shape[dim + 1 :]
        found = part.shape[:dim] + part.shape[dim + 1 :]
        if part.start != expected or found != rest or part.dtype != note.dtype:
            raise ValueError(
                f"a part of {place} must begin at {expected} and be {note.dtype}, found {part.shape} of "
                f"{part.dtype} at {part.start}"
            )
        end += part.shape[dim]
    if all(note.shape) and end != note.shape[dim]:
        raise ValueError(f"the parts of {place} must have {note.shape[dim]} rows together, found {end}")
