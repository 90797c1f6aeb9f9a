"""Damage to the files of checkpoints: each must be found, named and passed over, and nothing executed.

Forgeries have right sums, so that only their content is wrong: each is passed over, refused in one line, or
a value that a run may have.
"""

from __future__ import annotations

import copy
import hashlib
import io
import math
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autobatch import AutobatchError, NonFiniteError
from autobatch.training.checkpoint import MANIFEST, STATE, list_checkpoints, read_manifest, write_manifest
from autobatch.training.resume import load_run_state
from autobatch.training.run_folder import CHECKPOINTS
from benchmarks.report import Findings
from benchmarks.tiny_run import tiny_run, train
from benchmarks.wrong_files import PLANTED

PICKLE = "state.pkl"
"""A file that nothing reads."""


class Damage(NamedTuple):
    """A change to the newest checkpoint: new contents of its files, None to delete one."""

    kind: str
    files: dict[str, bytes | None]
    resealed: bool = False
    """Give the changed files a manifest with right sums."""


def damage_checkpoints(root: Path, seed: int, number: int) -> Findings:
    """Damage the newest of three checkpoints again and again, and load the run.

    Args:
        root: an empty folder.
        seed: of the random places.
        number: flips of bits; there are fewer of the other damages.
    """
    train(tiny_run(root))
    older, newest = list_checkpoints(root / CHECKPOINTS)[-2:]
    sound = {name: (newest / name).read_bytes() for name in (MANIFEST, STATE)}
    other = {name: (older / name).read_bytes() for name in sound}
    assert load_run_state(root).path == newest
    sentinel, findings = root / "executed", Findings()
    for damage in _damages(random.Random(seed), sound, other, sentinel, number):
        _apply(newest, damage)
        found = _outcome(root, older, newest, sentinel)
        findings.add(damage.kind, found, "" if found == "caught" else found)
        sentinel.unlink(missing_ok=True)
        (newest / PICKLE).unlink(missing_ok=True)
        for name, content in sound.items():
            (newest / name).write_bytes(content)
    assert load_run_state(root).path == newest
    return findings


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
    yield Damage("swaps", {STATE: sound[MANIFEST]}, resealed=True)
    for payload in payloads(sentinel):
        for name, planted in ((STATE, payload), (STATE, _in_zip(payload)), (PICKLE, payload)):
            yield Damage("planted pickles", {STATE: None, name: planted})
            yield Damage("planted pickles with right sums", {STATE: None, name: planted}, resealed=True)


class _Calling:
    """An object that calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Any, Any]:
        return self._call


def payloads(sentinel: Path) -> Iterator[bytes]:
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


FORGED: tuple[Any, ...] = (None, -1, 2**70, 0.5, math.nan, PLANTED, [], {}, [3], True)
"""Values in place of each value of a checkpoint."""
MANY = 3
"""Items of a list that are forged; the first ones."""


def forge_checkpoints(root: Path, stride: int = 1, places: Collection[str] = ()) -> Findings:
    """Forge the newest of two checkpoints again and again, with right sums, and resume the run.

    Args:
        root: an empty folder.
        stride: forgeries from one that is tried to the next.
        places: forgeries to try, for example ``state/model/0.bias = longer``; all if none are given.
    """
    begun, folder, findings = root / "begun", root / "forged", Findings()
    train(tiny_run(begun))
    *_, newest, last = list_checkpoints(begun / CHECKPOINTS)
    shutil.rmtree(last)
    facts, state = read_manifest(newest)["facts"], torch.load(newest / STATE, weights_only=True)
    chosen = (
        forged for forged in _changes({"facts": facts, "state": state}) if not places or forged[0] in places
    )
    for place, forged in islice(chosen, 0, None, stride):
        shutil.copytree(begun, folder)
        path = folder / CHECKPOINTS / newest.name
        torch.save(forged.get("state"), path / STATE)
        step = int(newest.name.removeprefix("step-"))
        files = {STATE: _sums_of(path / STATE)}
        write_manifest(path / MANIFEST, {"step": step, "facts": forged.get("facts"), "files": files})
        found, said = _resumed(folder)
        is_fault = found not in ("passed over", "refused", "trained") or not said.isprintable()
        findings.add(place.partition("/")[0], found, f"{place}: {found}: {said!r}" if is_fault else "")
        shutil.rmtree(folder)
    return findings


def _changes(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield every place in a tree, and the tree with each other value, or nothing, there."""
    for place in [*_places(tree)]:
        value = tree
        for key in place:
            value = value[key]
        for what, other in [*_others(value).items(), ("nothing", KeyError)]:
            changed = copy.deepcopy(tree)
            parent = changed
            for key in place[:-1]:
                parent = parent[key]
            if other is KeyError:
                del parent[place[-1]]
            else:
                parent[place[-1]] = other
            yield f"{'/'.join(map(str, place))} = {what}", changed
        if isinstance(value, Tensor) and isinstance(place[-1], str):
            changed = copy.deepcopy(tree)
            parent = changed
            for key in place[:-1]:
                parent = parent[key]
            parent[f"{place[-1]}\0"] = parent.pop(place[-1])
            yield f"{'/'.join(map(str, place))} with NUL", changed


def _others(value: Any) -> dict[str, Any]:
    """Return the values to put in the place of one, by name."""
    if not isinstance(value, Tensor):
        return {str(other): other for other in FORGED}
    return {
        "longer": torch.cat([value.reshape(-1), torch.ones(1, dtype=value.dtype)]),
        "empty": value.reshape(-1)[:0].clone(),
        "integers": torch.zeros_like(value, dtype=torch.int64),
        "NaN": value * math.nan,
        "another rank": value[None],
        "a number": 3,
    }


def _places(tree: Any) -> Iterator[tuple[Any, ...]]:
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree[:MANY])
    for key, value in [*pairs]:
        yield (key,)
        if isinstance(value, dict | list):
            yield from ((key, *rest) for rest in _places(value))


def _resumed(out: Path) -> tuple[str, str]:
    """Resume a run, and return how that ended, and the line."""
    try:
        resumed = train(tiny_run(out, resume=True)).resumed
    except AutobatchError as error:
        # Weights of a run that diverged are a checkpoint like any other: the first step says so.
        is_refused = error.exit_code == 2 or isinstance(error, NonFiniteError)
        return "refused" if is_refused else f"exit {error.exit_code}", str(error)
    except Exception as error:
        return f"raised {type(error).__name__}", repr(error)[:300]
    return "passed over" if resumed.passed_over else "trained", " ".join(resumed.passed_over)
