"""Damage to the files of checkpoints: each must be found, named and passed over, and nothing executed."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import random
import shutil
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from autobatch.training.checkpoint import MANIFEST, list_checkpoints, read_manifest, write_manifest
from autobatch.training.resume import load_run_state
from autobatch.training.run_folder import CHECKPOINTS
from autobatch.training.state_file import STATE
from benchmarks.tiny_run import tiny_workload, trained_run

TENSORS = "state-00001.safetensors"
OF_TORCH = "state.pt"
"""A file as torch.save writes it, which nothing reads."""


class Damage(NamedTuple):
    """A change to the newest checkpoint: new contents of its files, None to delete one."""

    kind: str
    files: dict[str, bytes | None]
    resealed: bool = False
    """Give the changed files a manifest with right sums."""


def damage_checkpoints(root: Path, seed: int, number: int) -> tuple[dict[str, Counter[str]], list[str]]:
    """Damage the newest of three checkpoints again and again, and load the run.

    Args:
        root: an empty folder.
        seed: of the random places.
        number: flips of bits; there are fewer of the other damages.

    Returns:
        Counts by kind of damage, and what was not caught.
    """
    trained_run(root, steps=3, workload=tiny_workload())
    older, newest = list_checkpoints(root / CHECKPOINTS)[-2:]
    sound = {name: (newest / name).read_bytes() for name in (MANIFEST, STATE, TENSORS)}
    other = {name: (older / name).read_bytes() for name in sound}
    assert load_run_state(root).path == newest
    sentinel = root / "executed"
    counts: dict[str, Counter[str]] = {}
    missed: list[str] = []
    for damage in _damages(random.Random(seed), sound, other, sentinel, number):
        _apply(newest, damage)
        found = _outcome(root, older, newest, sentinel)
        counts.setdefault(damage.kind, Counter())[found] += 1
        if found != "caught":
            missed.append(f"{damage.kind}: {found}")
        sentinel.unlink(missing_ok=True)
        (newest / OF_TORCH).unlink(missing_ok=True)
        for name, content in sound.items():
            (newest / name).write_bytes(content)
    assert load_run_state(root).path == newest
    return counts, missed


def _damages(
    dice: random.Random, sound: dict[str, bytes], other: dict[str, bytes], sentinel: Path, number: int
) -> Iterator[Damage]:
    for name, content in sound.items():
        for _ in range(number // 2):
            changed = bytearray(content)
            changed[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
            yield Damage("flipped bits", {name: bytes(changed)})
        for _ in range(number // 8):
            yield Damage("truncations", {name: content[: dice.randrange(len(content))]})
            start = dice.randrange(len(content))
            zeroed = content[:start] + bytes(min(4096, len(content) - start)) + content[start + 4096 :]
            if zeroed != content:
                yield Damage("zeroed pages", {name: zeroed})
            yield Damage("longer files", {name: content + dice.randbytes(dice.randrange(1, 99))})
            yield Damage("random files", {name: dice.randbytes(dice.randrange(len(content)))})
        yield Damage("deletions", {name: None})
        yield Damage("swaps", {name: other[name]})
    yield Damage("deletions", {MANIFEST: None, STATE: None})
    yield Damage("swaps", {MANIFEST: sound[STATE], STATE: sound[MANIFEST]})
    yield Damage("swaps", dict(other))
    yield Damage("swaps", {STATE: sound[MANIFEST]})
    yield Damage("swaps", {MANIFEST: sound[STATE]})
    yield Damage("swaps", {STATE: sound[TENSORS], TENSORS: sound[STATE]}, resealed=True)
    for payload in _payloads(sentinel):
        for place in (STATE, TENSORS):
            for name, planted in ((place, payload), (OF_TORCH, payload), (OF_TORCH, _in_zip(payload))):
                yield Damage("planted pickles", {place: None, name: planted})
                yield Damage("planted pickles with right sums", {place: None, name: planted}, resealed=True)


class _Calling:
    """An object that calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Any, Any]:
        return self._call


def _payloads(sentinel: Path) -> Iterator[bytes]:
    """Yield pickles that make a file if anything executes them."""
    calls = (
        _Calling(Path.touch, sentinel),
        _Calling(os.system, f"touch '{sentinel}'"),
        _Calling(eval, f"open({str(sentinel)!r}, 'w').close()"),
        _Calling(exec, f"open({str(sentinel)!r}, 'w').close()"),
        _Calling(os.mkdir, str(sentinel)),
    )
    for call in calls:
        for protocol in range(2, 6):
            yield pickle.dumps(call, protocol=protocol)
            yield pickle.dumps({"counters": {"batches_seen": 3}, "model": call}, protocol=protocol)


def _in_zip(payload: bytes) -> bytes:
    """Return a file of torch with another pickle in it."""
    sound, changed = io.BytesIO(), io.BytesIO()
    torch.save({"counters": {"batches_seen": 3}, "model": torch.ones(3)}, sound)
    with zipfile.ZipFile(sound) as before, zipfile.ZipFile(changed, "w") as after:
        for name in before.namelist():
            after.writestr(name, payload if name.endswith("data.pkl") else before.read(name))
    return changed.getvalue()


def _apply(path: Path, damage: Damage) -> None:
    for name, content in damage.files.items():
        if content is None:
            (path / name).unlink()
        else:
            (path / name).write_bytes(content)
    if damage.resealed:
        manifest = read_manifest(path)
        entries = {name: manifest[name] for name in ("step", "facts")}
        files = {file.name: _sums_of(file) for file in path.iterdir() if file.name != MANIFEST}
        write_manifest(path / MANIFEST, {**entries, "files": files})


def _sums_of(file: Path) -> dict[str, Any]:
    content = file.read_bytes()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _outcome(root: Path, older: Path, newest: Path, sentinel: Path) -> str:
    """Load the run; return ``caught``, or what happened instead."""
    try:
        loaded = load_run_state(root)
    except BaseException as error:
        return f"raised {type(error).__name__}"
    finally:
        executed = sentinel.exists()
        if sentinel.is_dir():
            shutil.rmtree(sentinel)
    if executed:
        return "executed"
    if loaded.path != older:
        return "loaded"
    if len(loaded.passed_over) != 1 or newest.name not in loaded.passed_over[0]:
        return "not named"
    return "caught" if newest.is_dir() else "deleted"
