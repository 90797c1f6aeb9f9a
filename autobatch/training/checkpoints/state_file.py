"""State of a run as files: its tensors as safetensors, and everything else as one JSON beside them.

A tensor is known by a name that a person can read, for example ``model/blocks.0.weight`` or
``optimizer/0/exp_avg/blocks.0.weight``. In the JSON ``{"$tensor": name}`` stands in its place. Nothing in the
files can be executed. JSON has no tuples and no numbers as keys, so these are objects whose first key begins
with ``$`` too: ``{"$tuple": [1, 2]}``. Python's JSON keeps every float bit for bit, but no bits of NaN.
"""

from __future__ import annotations

import base64
import json
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autobatch.core.units import MiB
from autobatch.step.tensors import is_sharded, local_part
from autobatch.training.checkpoints.manifest import write_file

STATE = "state.json"
"""File of a checkpoint with everything but the tensors."""
FILE_BYTES = 256 * MiB
"""Bytes of a file of tensors, unless one tensor has more. Host memory holds two copies of one file."""
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class ShardedTensor:
    """A tensor of which each rank holds a part, in files that torch.distributed.checkpoint reads."""

    name: str
    shape: list[int]
    dtype: str
    dim: int | None
    """The dimension that is cut over the ranks; None if each rank has all of it."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of the whole tensor."""
        return prod(self.shape) * _dtype_of(self.dtype).itemsize


@dataclass
class Packed:
    """A state as JSON, and its tensors by name. Tensors that share all of their memory have one name."""

    value: Any = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    sharded: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of which this rank holds a part; the same names on every rank."""
    _names: dict[tuple[object, ...], str] = field(default_factory=dict)

    def add(self, tensor: Tensor, name: str) -> str:
        """Add a tensor, and return its name, which is another one if its memory is known."""
        memory = _memory_of(tensor)
        if memory in self._names and tensor.numel():
            return self._names[memory]
        while name in self.tensors or name in self.sharded:
            name += "'"
        self._names[memory] = name
        (self.sharded if is_sharded(tensor) else self.tensors)[name] = tensor
        return name


def pack(state: Mapping[str, Any]) -> Packed:
    """Return a state as JSON and tensors; no values of tensors are read.

    Args:
        state: tensors and plain values in dicts, lists, tuples and sets. ``names``, if it is there, has the
            names of the parameters that the optimizers and the average know by number.

    Raises:
        TypeError: it holds something else; names its class.
    """
    packed = Packed()
    names = state.get("names", {})
    packed.value = {key: _packed(value, (key,), names, packed) for key, value in state.items()}
    return packed


def _packed(value: Any, path: tuple[str, ...], names: Mapping[str, Any], into: Packed) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        value = value.item()
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return _packed_tensor(value, _name_of(path, names), into)
    if kind in _TEXTS:
        tag, text_of = _TEXTS[kind]
        return {tag: text_of(value)}
    if kind not in _CONTAINERS:
        raise TypeError(f"{kind.__module__}.{kind.__qualname__}")
    is_mapping = isinstance(value, dict)
    keys = value.keys() if is_mapping else range(len(value))
    items = [
        _packed(item, (*path, str(key)), names, into)
        for key, item in zip(keys, value.values() if is_mapping else value, strict=True)
    ]
    if kind is list:
        return items
    if kind in (dict, OrderedDict) and all(type(key) is str and not key.startswith("$") for key in keys):
        return dict(zip(keys, items, strict=True))
    if is_mapping:
        items = [[_packed(key, (), names, into), item] for key, item in zip(keys, items, strict=True)]
    return {_CONTAINERS[kind]: items}


_TEXTS: dict[type, tuple[str, Callable[[Any], str]]] = {
    bytes: ("$bytes", lambda value: base64.b64encode(value).decode()),
    torch.dtype: ("$dtype", lambda value: str(value).removeprefix("torch.")),
    torch.device: ("$device", str),
}
_CONTAINERS: dict[type, str] = {
    list: "",
    tuple: "$tuple",
    torch.Size: "$tuple",
    set: "$set",
    dict: "$dict",
    OrderedDict: "$dict",
    Counter: "$counter",
}


def _packed_tensor(tensor: Tensor, name: str, into: Packed) -> dict[str, Any]:
    if is_sharded(tensor):
        (placement,) = tensor.placements  # type: ignore[attr-defined]
        dtype = str(tensor.dtype).removeprefix("torch.")
        found = {"shape": list(tensor.shape), "dtype": dtype, "dim": getattr(placement, "dim", None)}
        return {"$sharded": into.add(tensor, name), **found}
    check_tensor(tensor)
    return {"$tensor": into.add(tensor, name)}


def check_tensor(tensor: Tensor) -> None:
    """Check that a file can hold a tensor: other classes of tensors may have more than their values.

    Raises:
        TypeError: it cannot; names the class, the type and the layout.
    """
    kind = type(tensor)
    is_dense = tensor.layout is torch.strided and not tensor.is_quantized
    if kind not in (Tensor, nn.Parameter) or not is_dense or not _is_known(tensor.dtype):
        raise TypeError(f"{kind.__module__}.{kind.__qualname__} of {tensor.dtype} and {tensor.layout}")


@cache
def _is_known(dtype: torch.dtype) -> bool:
    """Return whether the format has a type of tensors."""
    from safetensors.torch import save

    try:
        save({"one": torch.zeros(1, dtype=dtype, device="cpu")})
    except (KeyError, ValueError, RuntimeError, AttributeError):
        return False
    except Exception as error:
        if type(error).__name__ != "SafetensorError":
            raise
        return False
    return True


def _name_of(path: tuple[str, ...], names: Mapping[str, Any]) -> str:
    """Return the name of the tensor at some keys, with the name of its parameter in place of a number."""
    match path:
        case ("optimizers", place, "state", number, key, *more) if number.isdigit():
            return "/".join(("optimizer", place, key, names["optimizers"][int(place)][int(number)], *more))
        case ("average", "averages", number):
            return f"average/{names['average'][int(number)]}"
    return "/".join(path)


def write_state(folder: Path, packed: Packed) -> dict[str, dict[str, Any]]:
    """Write a state without its sharded tensors, and flush it to the disk.

    Returns:
        Size in bytes and SHA-256 of each file by name, as the manifest lists them.

    Raises:
        OSError: a file cannot be written.
    """
    from safetensors.torch import save

    files = {STATE: write_file(folder / STATE, json.dumps(packed.value, indent=1).encode())}
    for number, tensors in enumerate(_by_file(packed.tensors), 1):
        content = save({name: _on_host(tensor) for name, tensor in tensors.items()})
        name = f"state-{number:05d}.safetensors"
        files[name] = write_file(folder / name, content)
    return files


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


def _on_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU, with memory of its own in which its elements follow each other."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def read_state(folder: Path) -> dict[str, Any]:
    """Read what `write_state` has written, on the CPU; a `ShardedTensor` stands for each sharded one.

    Raises:
        ValueError: a file has another content.
        Exception: a foreign file may let the readers raise anything.
    """
    from safetensors.torch import load

    value = json.loads((folder / STATE).read_bytes())
    if not isinstance(value, dict):
        raise TypeError(f"the state must be an object, found {type(value).__name__}")
    tensors: dict[str, Tensor] = {}
    with torch.device("cpu"):  # whatever the default device of the user is
        for file in sorted(folder.glob("state-*.safetensors")):
            tensors.update(load(file.read_bytes()))
        return {key: _unpacked(item, tensors) for key, item in value.items()}


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
        return ShardedTensor(value[tag], value["shape"], value["dtype"], value["dim"])
    if tag not in _MAKERS:
        raise ValueError(f"{tag} is no kind of value")
    content = value[tag]
    return _MAKERS[tag](_unpacked(content, tensors) if isinstance(content, list) else content)


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


def replace_sharded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return a state with tensors, by name, in place of each `ShardedTensor`."""
    if isinstance(value, ShardedTensor):
        return tensors[value.name]
    if isinstance(value, dict):
        return {key: replace_sharded(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(replace_sharded(item, tensors) for item in value)
    return value


def sharded_tensors(value: Any) -> dict[str, ShardedTensor]:
    """Return the sharded tensors of a state by name."""
    if isinstance(value, ShardedTensor):
        return {value.name: value}
    items: Iterable[Any] = value.values() if isinstance(value, dict) else value
    found: dict[str, ShardedTensor] = {}
    if isinstance(value, dict | list | tuple):
        for item in items:
            found.update(sharded_tensors(item))
    return found


def _memory_of(tensor: Tensor) -> tuple[object, ...]:
    """Return what tied tensors have in common, on every rank: also an empty part has memory of its own."""
    own = local_part(tensor)
    storage = own.untyped_storage()._cdata
    return storage, own.storage_offset(), tuple(tensor.shape), own.stride(), tensor.dtype
