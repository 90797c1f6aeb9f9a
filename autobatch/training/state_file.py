"""State of a run as files: its tensors as safetensors, and everything else as one JSON beside them.

A tensor is known by a name that a person can read, for example ``model/blocks.0.weight`` or
``optimizer/0/exp_avg/blocks.0.weight``. In the JSON ``{"$tensor": name}`` stands in its place. Nothing in the
files can be executed. JSON has no tuples and no numbers as keys, so these are objects whose first key begins
with ``$`` too: ``{"$tuple": [1, 2]}``. Python's JSON keeps every float bit for bit, but no bits of NaN.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autobatch.core.errors import InputError
from autobatch.core.units import MiB
from autobatch.step.gradients import is_sharded, local_part

STATE = "state.json"
"""File of a checkpoint with everything but the tensors."""
FILE_BYTES = 256 * MiB
"""Bytes of a file of tensors, unless one tensor has more, and bytes that are written at a time."""
_PLAIN = (bool, int, float, str, type(None))
_TEXTS: dict[type, tuple[str, Callable[[Any], str]]] = {
    bytes: ("$bytes", lambda value: base64.b64encode(value).decode()),
    torch.dtype: ("$dtype", lambda value: str(value).removeprefix("torch.")),
    torch.device: ("$device", str),
}
"""Values that are written as text: their tag, and the text."""
_CONTAINERS: dict[type, str] = {
    list: "",
    tuple: "$tuple",
    torch.Size: "$tuple",
    set: "$set",
    dict: "$dict",
    OrderedDict: "$dict",
    Counter: "$counter",
}
"""Containers, and their tags."""


@dataclass(frozen=True)
class ShardedTensor:
    """A tensor of which each rank holds a part, in files that torch.distributed.checkpoint reads."""

    name: str
    shape: list[int]
    dtype: torch.dtype
    dim: int | None
    """The dimension that is cut over the ranks; None if each rank has all of it."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass
class Packed:
    """A state as JSON, and its tensors by name. Tensors that share all of their memory have one name."""

    names: Mapping[str, Any]
    """Names of the parameters that the optimizers and the average know by number."""
    value: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    sharded: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of which this rank holds a part; the same names on every rank."""
    _names: dict[tuple[object, ...], str] = field(default_factory=dict)

    def pack(self, value: Any, path: tuple[str, ...]) -> Any:
        """Return a value, to which the keys of ``path`` lead, as JSON, and add its tensors.

        Raises:
            TypeError: a file cannot hold it; names its class.
        """
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic):
            value = value.item()
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, Tensor):
            return self._pack_tensor(value, path)
        if kind in _TEXTS:
            tag, text_of = _TEXTS[kind]
            return {tag: text_of(value)}
        if kind not in _CONTAINERS:
            raise TypeError(f"{kind.__module__}.{kind.__qualname__}")
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        items = {key: self.pack(item, (*path, str(key))) for key, item in pairs}
        if kind is list:
            return [*items.values()]
        if not isinstance(value, dict):
            return {_CONTAINERS[kind]: [*items.values()]}
        is_plain = kind is not Counter and all(type(key) is str and not key.startswith("$") for key in items)
        return items if is_plain else {_CONTAINERS[kind]: [[self.pack(k, ()), v] for k, v in items.items()]}

    def _pack_tensor(self, tensor: Tensor, path: tuple[str, ...]) -> dict[str, Any]:
        """Return what stands in the place of a tensor, and add it unless its memory has a name already."""
        own = local_part(tensor)  # tied alike on every rank: also an empty part has memory of its own
        kind, shards = type(tensor), is_sharded(tensor)
        is_dense = tensor.layout is torch.strided and not tensor.is_quantized
        # Other classes of tensors may have more than their values.
        is_known = shards or (kind in (Tensor, nn.Parameter) and is_dense and can_be_written(tensor.dtype))
        if not is_known:
            raise TypeError(f"{kind.__module__}.{kind.__qualname__} of {tensor.dtype} and {tensor.layout}")
        place = own.untyped_storage()._cdata, own.storage_offset()
        memory = (*place, tuple(tensor.shape), own.stride(), tensor.dtype)
        name = self._names.get(memory) if tensor.numel() else None
        if name is None:
            name = self._name_of(path)
            while name in self.tensors or name in self.sharded:
                name += "'"
            self._names[memory] = name
            (self.sharded if shards else self.tensors)[name] = tensor
        if not shards:
            return {"$tensor": name}
        (placement,) = tensor.placements  # type: ignore[attr-defined]
        dtype, dim = str(tensor.dtype).removeprefix("torch."), getattr(placement, "dim", None)
        return {"$sharded": name, "shape": list(tensor.shape), "dtype": dtype, "dim": dim}

    def _name_of(self, path: tuple[str, ...]) -> str:
        """Return the name of the tensor at some keys, with the name of its parameter in place of a number."""
        match path:
            case ("optimizers", place, "state", number, key, *more) if number.isdigit():
                parameter = self.names["optimizers"][int(place)][int(number)]
                return "/".join(("optimizer", place, key, parameter, *more))
            case ("average", "averages", number):
                return f"average/{self.names['average'][int(number)]}"
        return "/".join(path)


def pack(state: Mapping[str, Any]) -> Packed:
    """Return a state as JSON and tensors; no values of tensors are read.

    Args:
        state: tensors and plain values in dicts, lists, tuples and sets. ``names``, if it is there, has the
            names of the parameters that the optimizers and the average know by number.

    Raises:
        InputError: it holds objects that a checkpoint cannot hold; names the part and the class.
    """
    packed = Packed(state.get("names", {}))
    for part, value in state.items():
        try:
            packed.value[part] = packed.pack(value, (part,))
        except TypeError as error:
            raise InputError(
                f"the state of the workload's {part} cannot be kept in a checkpoint, which is read without "
                f"executing code, found {error}: keep only numbers, text, tensors and lists, tuples, sets "
                "and dicts of them"
            ) from None
    return packed


def can_be_written(dtype: torch.dtype) -> bool:
    """Return whether safetensors has a type of tensors."""
    return _name_of(dtype) is not None


@cache
def _name_of(dtype: torch.dtype) -> str | None:
    """Return the name of a type of tensors in safetensors; None if it has none."""
    from safetensors.torch import save

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of types about to be removed
            content = save({"one": torch.zeros(1, dtype=dtype, device="cpu")})
    except Exception:  # of many kinds, for example KeyError and safetensors' own
        return None
    entry = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["one"]
    # It counts the halves of a type of two values.
    return str(entry["dtype"]) if entry["shape"] == [1] else None


@cache
def _types() -> dict[str, torch.dtype]:
    """Return the types of tensors by their names in safetensors."""
    types = {one for one in vars(torch).values() if isinstance(one, torch.dtype)}
    return {name: one for one in types if (name := _name_of(one)) is not None}


def write_state(
    folder: Path, packed: Packed, begin_part: Callable[[], object] = lambda: None
) -> dict[str, dict[str, Any]]:
    """Write a state without its sharded tensors, and return what `write_file` returns by name of the file.

    Args:
        folder: exists.
        packed: the state.
        begin_part: called before each part of a file.
    """
    files = {STATE: write_file(folder / STATE, [json.dumps(packed.value, indent=1).encode()])}
    for number, tensors in enumerate(_by_file(packed.tensors), 1):
        name = f"state-{number:05d}.safetensors"
        files[name] = write_file(folder / name, tensor_parts(tensors, begin_part=begin_part))
    return files


def tensor_parts(
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    begin_part: Callable[[], object] = lambda: None,
) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file in parts, the same for equal tensors.

    The library's own writer takes three copies of the tensors, and sorts the metadata anew each time.
    """
    ordered = sorted(tensors.items(), key=lambda one: (-one[1].itemsize, one[0]))  # keeps them aligned
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, one in ordered:
        offsets = [end, end := end + one.nbytes]
        header[name] = {"dtype": _name_of(one.dtype), "shape": [*one.shape], "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, one in ordered:
        content = _bytes_of(one.detach().resolve_conj().resolve_neg().to("cpu").contiguous())
        for start in range(0, len(content), FILE_BYTES):
            begin_part()
            yield content[start : start + FILE_BYTES]


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor on the CPU whose elements follow each other."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a file, and flush it to the disk.

    Returns:
        Size in bytes and SHA-256, as the manifest lists them.

    Raises:
        OSError: the file cannot be written.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for part in parts:
            file.write(part)
            digest.update(part)
            size += len(part)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _by_file(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of one file after the other."""
    found: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if found and size + tensor.nbytes > FILE_BYTES:
            yield found
            found, size = {}, 0
        found[name] = tensor
        size += tensor.nbytes
    if found:
        yield found


def read_state(folder: Path) -> dict[str, Any]:
    """Read what `write_state` has written, on the CPU; a `ShardedTensor` stands for each sharded one.

    Raises:
        ValueError: a file has another content.
        Exception: a foreign file may let the readers raise anything.
    """
    value = json.loads((folder / STATE).read_bytes())
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("state-*.safetensors")):
        tensors.update(_read_tensors(file))
    return {key: _unpacked(item, tensors) for key, item in value.items()}


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file; no tensor has two copies, and a disk that fails raises an error.

    Raises:
        Exception: the file has another content, which is compared with its size before memory is taken.
    """
    found = {}
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        left = path.stat().st_size - 8 - length
        header = json.loads(file.read(length if left >= 0 else 0))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            dtype, (begin, end) = _types()[entry["dtype"]], entry["data_offsets"]
            if not 0 <= begin <= end <= left or end - begin != prod(entry["shape"]) * dtype.itemsize:
                raise ValueError(f"{name} has no such place in {path.name}")
            found[name] = torch.empty(entry["shape"], dtype=dtype, device="cpu")
            file.seek(8 + length + begin)
            if file.readinto(_bytes_of(found[name])) != end - begin:
                raise ValueError(f"{path.name} ends within {name}")
    return found


def _unpacked(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpacked(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: _unpacked(item, tensors) for key, item in value.items()}
    if tag == "$tensor":
        return tensors[value[tag]]
    if tag == "$sharded":
        return ShardedTensor(value[tag], value["shape"], _dtype_of(value["dtype"]), value["dim"])
    return _MAKERS[tag](_unpacked(value[tag], tensors))


def _dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is no type of tensors")
    return found


_MAKERS: dict[str, Callable[[Any], Any]] = {
    "$dict": dict,
    "$counter": lambda pairs: Counter(dict(pairs)),
    "$tuple": tuple,
    "$set": set,
    "$bytes": lambda text: base64.b64decode(text, validate=True),
    "$dtype": _dtype_of,
    "$device": torch.device,
}
"""The values of the tagged objects of the JSON."""


def replace_sharded(value: Any, replacement: Callable[[ShardedTensor], Any]) -> Any:
    """Return a state with something else in place of each `ShardedTensor`."""
    if isinstance(value, ShardedTensor):
        return replacement(value)
    if isinstance(value, dict):
        return {key: replace_sharded(item, replacement) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(replace_sharded(item, replacement) for item in value)
    return value


def sharded_tensors(state: Mapping[str, Any]) -> dict[str, ShardedTensor]:
    """Return the sharded tensors of a state by name."""
    found: dict[str, ShardedTensor] = {}
    replace_sharded(dict(state), lambda tensor: found.setdefault(tensor.name, tensor))
    return found
