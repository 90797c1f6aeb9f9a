"""State of a run in one file of the safetensors format: tensors, and everything else as JSON in its header.

Nothing in the file can be executed. JSON has no tuples, no numbers as keys and no tensors, so each of these
is an object whose first key begins with ``$``, for example ``{"$tuple": [1, 2]}``. Python's JSON keeps
integers of up to 4,300 digits, and every float bit for bit (of NaN only that it is one).

The library of safetensors reads these files too. It is not used here, because it needs the bytes of all
tensors beside the tensors, and maps files into memory that may be deleted later.
"""

from __future__ import annotations

import base64
import json
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import IO, Any

import torch
from torch import Tensor, nn

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Types of the format. Tensors of other types are kept as bytes."""
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_CLASSES: tuple[type[Tensor], ...] = (Tensor, nn.Parameter)
"""Classes of tensors that a file can hold. Others may have more than their values."""
_PLAIN = (bool, int, float, str, type(None))
_HEADER_BYTES = 8
_ALIGNMENT = 8
"""The header is filled up to a multiple of it, as the library does."""
_PART_BYTES = 1 << 26
"""Bytes that are copied and written at a time."""


def write_state_file(file: IO[bytes], state: Mapping[str, Any]) -> None:
    """Write a state.

    Args:
        file: open for writing.
        state: tensors and plain values in containers.

    Raises:
        TypeError: it holds something else; names its class.
        OSError: the file cannot be written.
    """
    packed = pack(state)
    header: dict[str, Any] = {"__metadata__": {"state": json.dumps(packed.value)}}
    end = 0
    for name, tensor in packed.tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(len(text).to_bytes(_HEADER_BYTES, "little") + text)
    for tensor in packed.tensors.values():
        for part in torch.split(_bytes_of(tensor), _PART_BYTES):
            file.write(part.cpu().numpy().data)


def read_state_file(file: IO[bytes]) -> Any:
    """Read what `write_state_file` has written, on the CPU.

    Raises:
        ValueError: the file has another content.
        Exception: a foreign file may let the reader of JSON raise anything.
    """
    left = file.seek(0, os.SEEK_END) - _HEADER_BYTES
    file.seek(0)
    size = int.from_bytes(file.read(_HEADER_BYTES), "little")
    if size > left:
        raise ValueError(f"the header must have {size} bytes, found {left}")
    header = json.loads(file.read(size))
    value = json.loads(header.pop("__metadata__")["state"])
    end = 0
    for name, entry in header.items():
        begin, end = end, end + prod(entry["shape"]) * _DTYPES[entry["dtype"]].itemsize
        if entry["data_offsets"] != [begin, end]:
            raise ValueError(f"tensor {name} must lie at {[begin, end]}, found {entry['data_offsets']}")
    # Before memory is taken for them.
    if end != left - size:
        raise ValueError(f"the tensors must have {end} bytes, found {left - size}")
    tensors = {name: _read_tensor(file, _DTYPES[one["dtype"]], one["shape"]) for name, one in header.items()}
    return _Unpacker(tensors).unpack(value)


@dataclass
class Packed:
    """A state as JSON, and its tensors."""

    value: Any = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """By the numbers that the JSON has for them: contiguous, and of a type of the format."""
    _numbers: dict[tuple[object, ...], str] = field(default_factory=dict)

    def add(self, tensor: Tensor) -> str:
        """Add a tensor, and return its number; the same one for the same memory."""
        memory = tensor.data_ptr(), tensor.device, tuple(tensor.shape), tensor.stride(), tensor.dtype
        number = self._numbers.get(memory) if tensor.numel() else None
        if number is None:
            number = self._numbers[memory] = str(len(self.tensors))
            self.tensors[number] = tensor
        return number


def pack(state: Any) -> Packed:
    """Return a state as JSON and tensors. No values of tensors are read, except of those that are not dense.

    Raises:
        TypeError: it holds something else; names its class.
    """
    packed = Packed()
    packed.value = _packed(state, packed)
    return packed


def _packed(value: Any, into: Packed) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return _packed_tensor(value, into)
    if kind not in _PACKERS:
        raise TypeError(f"{kind.__module__}.{kind.__qualname__}")
    return _PACKERS[kind](value, into)


def _packed_dict(value: dict[Any, Any], into: Packed) -> dict[str, Any]:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: _packed(item, into) for key, item in value.items()}
    return {"$dict": _pairs(value, into)}


def _packed_ordered(value: OrderedDict[Any, Any], into: Packed) -> dict[str, Any]:
    """Return it with its attributes: a state dict has the versions of its modules there."""
    more = {"attributes": _packed(vars(value), into)} if vars(value) else {}
    return {"$ordered": _pairs(value, into), **more}


def _pairs(value: Mapping[Any, Any], into: Packed) -> list[list[Any]]:
    return [[_packed(key, into), _packed(item, into)] for key, item in value.items()]


def _items(value: Iterable[Any], into: Packed) -> list[Any]:
    return [_packed(item, into) for item in value]


_PACKERS: dict[type, Callable[[Any, Packed], Any]] = {
    list: _items,
    dict: _packed_dict,
    OrderedDict: _packed_ordered,
    Counter: lambda value, into: {"$counter": _pairs(value, into)},
    tuple: lambda value, into: {"$tuple": _items(value, into)},
    set: lambda value, into: {"$set": _items(value, into)},
    torch.Size: lambda value, into: {"$size": _items(value, into)},
    bytes: lambda value, _: {"$bytes": base64.b64encode(value).decode()},
    bytearray: lambda value, _: {"$bytearray": base64.b64encode(value).decode()},
    complex: lambda value, _: {"$complex": [value.real, value.imag]},
    torch.dtype: lambda value, _: {"$dtype": str(value).removeprefix("torch.")},
    torch.device: lambda value, _: {"$device": str(value)},
}
"""The JSON of values by their class."""


def _packed_tensor(tensor: Tensor, into: Packed) -> dict[str, Any]:
    kind = type(tensor)
    has_more = tensor.is_quantized or tensor.layout not in (torch.strided, torch.sparse_coo)
    if kind not in _CLASSES or has_more:
        raise TypeError(f"{kind.__module__}.{kind.__qualname__} of {tensor.dtype} and {tensor.layout}")
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        indices, values = _packed(tensor._indices(), into), _packed(tensor._values(), into)
        return {"$sparse": [indices, values, list(tensor.shape), tensor.is_coalesced()]}
    tensor = tensor.resolve_conj().resolve_neg()
    # Dimensions in the order of the memory, so that channels-last stays what it is.
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    dense = tensor.permute(order)
    if not dense.is_contiguous():
        order, dense = list(range(tensor.dim())), tensor.contiguous()
    found: dict[str, Any] = {}
    if tensor.dtype not in _NAMES:
        found = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(dense.shape)}
        dense = _bytes_of(dense)
    if order != sorted(order):
        found["order"] = order
    return {"$tensor": into.add(dense), **found}


@dataclass(frozen=True)
class _Unpacker:
    tensors: Mapping[str, Tensor]

    def unpack(self, value: Any) -> Any:
        """Return the value that was packed.

        Raises:
            ValueError: the JSON has an unknown kind of value.
        """
        if isinstance(value, list):
            return [self.unpack(item) for item in value]
        if not isinstance(value, dict):
            return value
        kind = next(iter(value), "")
        if not kind.startswith("$"):
            return {key: self.unpack(item) for key, item in value.items()}
        if kind == "$tensor":
            return self._tensor(value)
        if kind == "$ordered":
            made = OrderedDict(self._pairs(value[kind]))
            vars(made).update(self.unpack(value.get("attributes", {})))
            return made
        if kind not in _MAKERS:
            raise ValueError(f"{kind} is no kind of value")
        return _MAKERS[kind](self, value[kind])

    def _tensor(self, value: Mapping[str, Any]) -> Tensor:
        tensor = self.tensors[value["$tensor"]]
        if "dtype" in value:
            if value["dtype"].startswith("q"):  # without its scale, torch reads past its memory
                raise ValueError(f"{value['dtype']} is a quantized type, found only its bytes")
            tensor = tensor.view(_dtype_of(value["dtype"])).reshape(value["shape"])
        if "order" not in value:
            return tensor
        return tensor.permute([value["order"].index(dim) for dim in range(tensor.dim())])

    def _pairs(self, pairs: list[list[Any]]) -> Iterator[tuple[Any, Any]]:
        return ((self.unpack(key), self.unpack(item)) for key, item in pairs)

    def _sparse(self, parts: list[Any]) -> Tensor:
        indices, values, shape, is_coalesced = parts
        # torch 2.11 warns if the argument for it is used.
        with torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
            made: Tensor = torch.sparse_coo_tensor(
                self.unpack(indices), self.unpack(values), shape, is_coalesced=is_coalesced
            )
        return made


_MAKERS: dict[str, Callable[[_Unpacker, Any], Any]] = {
    "$dict": lambda unpacker, pairs: dict(unpacker._pairs(pairs)),
    "$counter": lambda unpacker, pairs: Counter(dict(unpacker._pairs(pairs))),
    "$tuple": lambda unpacker, items: tuple(unpacker.unpack(items)),
    "$set": lambda unpacker, items: set(unpacker.unpack(items)),
    "$size": lambda unpacker, items: torch.Size(unpacker.unpack(items)),
    "$bytes": lambda _, text: base64.b64decode(text, validate=True),
    "$bytearray": lambda _, text: bytearray(base64.b64decode(text, validate=True)),
    "$complex": lambda _, parts: complex(*parts),
    "$dtype": lambda _, name: _dtype_of(name),
    "$device": lambda _, name: torch.device(name),
    "$sparse": lambda unpacker, parts: unpacker._sparse(parts),
}


def _dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is no type of tensors")
    return found


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, as a tensor."""
    return tensor.reshape(-1).view(torch.uint8)


def _read_tensor(file: IO[bytes], dtype: torch.dtype, shape: list[int]) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype, device="cpu")  # whatever the default device of the user is
    content = _bytes_of(tensor).numpy()
    if content.size and file.readinto(content) != content.size:  # type: ignore[attr-defined]
        raise ValueError(f"a tensor must have {content.size} bytes")
    return tensor
